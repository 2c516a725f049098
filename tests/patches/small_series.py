# SPDX-License-Identifier: Apache-2.0
"""The small case of `conftest`: patches are made by git from what the files are before and after."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from patched_vllm import apply_patches

FIRST, SECOND = "0001-speed.patch", "0002-mode.patch"

BASE = {
    "vllm/__init__.py": "",
    "vllm/engine.py": """SIZE = 3
UNIT = "tokens"


def speed():
    return 1


def mode():
    return 'plain'


LAST = 4
""",
    "vllm/config/modes.py": "MODES = ('plain',)\n\n\ndef default():\n    return MODES[0]\n",
    "vllm/untouched.py": "VALUE = 1\n",
}
STEPS = {
    FIRST: {"vllm/engine.py": [("return 1", "return 2")]},
    SECOND: {
        "vllm/engine.py": [("    return 2\n", "    # faster\n    return 2\n"), ("'plain'", "'tree'")],
        "vllm/config/modes.py": [("('plain',)", "('plain', 'tree')")],
    },
}
CONDITIONS = {
    FIRST: [{"file": "vllm/engine.py", "in": "speed", "holds": "return 2"}],
    SECOND: [
        {"file": "vllm/engine.py", "in": "mode", "holds": 'return "tree"'},
        {"file": "vllm/config/modes.py", "holds": "MODES = ('plain', 'tree')"},
    ],
}


@dataclass
class Case:
    tree: Path
    series: Path

    def run(self, *options: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return apply_patches(self.tree, "--series", self.series, *options, cwd=cwd)

    def state(self) -> dict[str, tuple[str, int, int]]:
        """Every file and folder of the tree: content, mode, and time of the last change."""
        return state(self.tree)

    def edit(self, path: str, old: str, new: str) -> None:
        file = self.tree / path
        assert file.read_text().count(old) == 1
        file.write_text(file.read_text().replace(old, new))

    def list(self, *names: str) -> None:
        (self.series / "series").write_text("".join(f"{name}\n" for name in names))


def state(tree: Path) -> dict[str, tuple[str, int, int]]:
    found = {}
    for path in sorted(tree.rglob("*")):
        is_file = path.is_file() and not path.is_symlink()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if is_file else ""
        status = path.lstat()
        found[str(path.relative_to(tree))] = (content, status.st_mode, status.st_mtime_ns if is_file else 0)
    return found


def git(*arguments: str, cwd: Path) -> str:
    command = ["git", "-c", "user.name=Nobody", "-c", "user.email=nobody@example.invalid", *arguments]
    environment = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=True).stdout


def write_base(tree: Path) -> Path:
    for path, content in BASE.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(content)
    return tree


def make_case(folder: Path) -> Case:
    repository = write_base(folder / "repository")
    git("init", "--quiet", cwd=repository)
    git("add", "--all", cwd=repository)
    git("commit", "--quiet", "--message", "base", cwd=repository)
    series = folder / "series"
    series.mkdir()
    for name, changes in STEPS.items():
        for path, pairs in changes.items():
            for old, new in pairs:
                content = (repository / path).read_text()
                assert content.count(old) == 1
                (repository / path).write_text(content.replace(old, new))
        git("commit", "--quiet", "--all", "--message", name, cwd=repository)
        (series / name).write_text(git("format-patch", "-1", "-U1", "--stdout", cwd=repository))
    (series / "postconditions.json").write_text(json.dumps(CONDITIONS))
    shutil.rmtree(repository)
    case = Case(write_base(folder / "tree"), series)
    case.list(FIRST, SECOND)
    return case


def after(count: int) -> dict[str, str]:
    """The files after the first `count` patches."""
    files = dict(BASE)
    for changes in list(STEPS.values())[:count]:
        for path, pairs in changes.items():
            for old, new in pairs:
                files[path] = files[path].replace(old, new)
    return files
