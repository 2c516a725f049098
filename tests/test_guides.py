# SPDX-License-Identifier: Apache-2.0
"""The guides in docs/: links lead somewhere, codes are ones the checks give, options are ones that commands take."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GUIDES = ["spark.md", "troubleshooting.md", "maintaining.md"]
CODE = re.compile(r"[a-z]+\.[a-z-]+")


@cache
def codes() -> frozenset[str]:
    """What stands in the preflight as a code; `{field}.x` is one of the model and of the drafter."""
    found: set[str] = set()
    for file in (ROOT / "entrypoints/preflight").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
                # "shard-empty" is given to a helper, ".weights" is the rest of f"{field}.weights"
                texts = [text] if CODE.fullmatch(text) else [f"{of}.{text.lstrip('.')}" for of in ("model", "drafter")]
                found.update(one for one in texts if CODE.fullmatch(one))
    return frozenset(found)


def anchors(text: str) -> set[str]:
    """GitHub's names of the headings."""
    heads = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", GUIDES)
def test_links_lead_to_files_and_headings(name):
    file = ROOT / "docs" / name
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", file.read_text(encoding="utf-8"))
    assert len(links) > 2
    for path, anchor in links:
        goal = (file.parent / path).resolve() if path else file
        assert goal.exists(), path
        if anchor:
            assert anchor in anchors(goal.read_text(encoding="utf-8")), f"{path}#{anchor}"
    assert f"docs/{name}" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", GUIDES)
def test_codes_are_ones_that_the_checks_give(name):
    named = set(re.findall(r"`\[([a-z.-]+)\]`", (ROOT / "docs" / name).read_text(encoding="utf-8")))
    assert named <= codes(), sorted(named - codes())
    assert "memory.plan" in codes() and "memory.plans" not in codes()


def test_options_are_ones_that_commands_take():
    help_text = ""
    for command in ("ddtree", "dflash", "doctor", "download", "show"):
        line = [sys.executable, "-m", "aeon_entrypoints", command, "--help"]
        help_text += subprocess.run(line, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    known = set(re.findall(r"--[a-z][a-z-]+", help_text))
    # docker's, git's, vLLM's, and of the scripts
    others = {
        "--rm",
        "--gpus",
        "--ipc",
        "--network",
        "--name",
        "--restart",
        "--user",
        "--target",
        "--build-arg",
        "--platform",
    }
    others |= {"--read-only", "--tmpfs", "--shm-size", "--init", "--entrypoint"}
    others |= {"--kv-cache-memory-bytes", "--limit-mm-per-prompt", "--check", "--exclude-newer"}
    for name in GUIDES:
        used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (ROOT / "docs" / name).read_text(encoding="utf-8")))
        assert used <= known | others, (name, sorted(used - known - others))
