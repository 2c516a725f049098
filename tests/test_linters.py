# SPDX-License-Identifier: Apache-2.0
"""`scripts/lint` finds planted faults, one linter each, and says which linter it was; the rest still runs."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WORKFLOW = ".github/workflows/checks.yml"
# linter -> a file, and the fault: text that is replaced (or, when empty, text that is added at the end)
FAULTS = {
    "ruff": ("setup.py", "", "import os\n"),
    "format": ("setup.py", "", "x = {  1:2 }\n"),
    "shellcheck": (".ci/run", "", "cd $UNQUOTED/folder\n"),
    "hadolint": ("Dockerfile", "", "RUN cd /tmp && sudo true\n"),
    "workflows": (WORKFLOW, "runs-on:", "runs-in:"),
    "zizmor": (WORKFLOW, "- run: make setup", "- run: echo ${{ github.head_ref }}"),
    "recipes": ("recipes/schema.json", '"recipe_version"', '"recipe_vers"'),
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What the fast linters read, in a repository of its own; `.venv` is this one."""
    for name in (".ci", ".github", "docker", "recipes", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Dockerfile", "docker-bake.hcl", ".hadolint.yaml", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def lint(tree: Path, *names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tree / "scripts" / "lint", *names], capture_output=True, text=True, cwd=tree)


def test_this_tree_is_clean(tree):
    run = lint(tree, *FAULTS)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines() == [f"lint: {name}: ok" for name in FAULTS]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(tree, name):
    path, old, new = FAULTS[name]
    file = tree / path
    text = file.read_text("utf-8")
    assert old in text
    file.write_text(text.replace(old, new) if old else text + new, encoding="utf-8")
    run = lint(tree, name, "bake")
    assert run.returncode == 1
    assert f"lint: {name}: failed" in run.stdout and "lint: bake: ok" in run.stdout
    assert run.stderr == f"lint: failed: {name}\n"


def test_an_unknown_linter_is_refused(tree):
    run = lint(tree, "pylint")
    assert run.returncode == 1 and "unknown linter pylint" in run.stdout
