# SPDX-License-Identifier: Apache-2.0
"""`ddtree-tree-test` from the wheel: what travels in it, what it needs, what it runs, and what it says of a failure."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from aeon_entrypoints.tree_test import AREAS, LEFT_OUT, Tally

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "aeon_ddtree",
    "entrypoints",
    "recipes",
    "bench",
    "tests",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
# distribution in the wheel's requirements -> module that its tests import
DECLARED = {"torch": "torch", "pytest": "pytest", "hypothesis": "hypothesis"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            # The weights make the wheel large, and nothing here reads them.
            shutil.copytree(
                ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "weights", "*.jsonl")
            )
        else:
            shutil.copy(ROOT / name, tree / name)
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, out], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def call(site: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command of the unpacked wheel, which comes before this project's own sources on the path."""
    environ = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    # What a user has set for a suite of his own must not matter.
    environ |= {"PYTEST_ADDOPTS": "--no-such-option", "HOME": "/nonexistent"}
    command = [sys.executable, "-m", "aeon_entrypoints", "ddtree-tree-test", *arguments]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=300)


def test_the_tests_are_in_the_wheel(site):
    for area in AREAS:
        there = {file.name for file in (ROOT / "tests" / area).glob("*.py")}
        assert there and {file.name for file in (site / "aeon_ddtree_tests" / area).glob("*.py")} == there
    # Beside them only what they share: no tests of the source tree, of the engine or of the servers.
    assert sorted(entry.name for entry in (site / "aeon_ddtree_tests").iterdir()) == sorted([*AREAS, "conftest.py"])


def test_the_wheel_asks_for_what_the_tests_import(site):
    (metadata,) = site.glob("*.dist-info/METADATA")
    asked = [line for line in metadata.read_text("utf-8").splitlines() if line.startswith("Requires-Dist: ")]
    always = {re.split("[<>=]", line.split()[1])[0] for line in asked if "extra ==" not in line}
    assert {*DECLARED, "pytest-timeout", "pytest-xdist"} <= always
    files = [f for f in (site / "aeon_ddtree_tests").rglob("*.py") if not any(f.match(glob) for glob in LEFT_OUT)]
    own = {"aeon_ddtree", *(file.stem for file in files)}
    imported = {
        name.split(".")[0]
        for file in files
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    }
    assert imported - own - set(sys.stdlib_module_names) <= set(DECLARED.values())


def test_it_runs_from_the_wheel_and_leaves_nothing_behind(site, tmp_path):
    before = sorted(site.rglob("*"))
    run = call(site, tmp_path, "-n", "2", "-k", "test_walk or test_policy or test_ancestors", "--json")
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(run.stdout)
    assert result["passed"] and result["failures"] == []
    assert set(result["areas"]) == {"tree", "verify", "kernels"}
    assert result["counts"]["passed"] > 60
    assert sorted(site.rglob("*")) == before
    assert list(tmp_path.iterdir()) == []


def test_a_failing_test_fails_it(site, tmp_path):
    broken = shutil.copytree(site, tmp_path / "site")
    walk = broken / "aeon_ddtree" / "kernels" / "walk_tree" / "__init__.py"
    walk.write_text(walk.read_text("utf-8") + "\n\ndef walk_tree(*_, **__):\n    raise ValueError('planted')\n")
    run = call(broken, tmp_path, "-n", "0", "-k", "test_walk_tree", "--", "-x")
    assert run.returncode == 1
    assert "planted" in run.stdout and "ddtree-tree-test: FAILED" in run.stdout
    assert "failed   kernels/test_walk_tree.py::" in run.stdout


def test_no_test_is_no_success(site, tmp_path):
    run = call(site, tmp_path, "-n", "0", "-k", "no_such_test")
    assert run.returncode == 5 and "NOTHING RAN" in run.stdout


def test_an_installation_without_pytest_is_named(dispatch, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "pytest" else real(name, *rest))
    outcome = dispatch("ddtree-tree-test")
    assert outcome.code == 2 and "no module named pytest" in outcome.err


def test_outcomes_are_counted_once():
    class Report:
        def __init__(self, when: str, outcome: str, nodeid: str = "verify/test_walk.py::test_a") -> None:
            self.when, self.outcome, self.nodeid = when, outcome, nodeid

    tally = Tally()
    for when in ("setup", "call", "teardown"):
        tally.pytest_runtest_logreport(Report(when, "passed"))
    tally.pytest_runtest_logreport(Report("setup", "skipped"))
    tally.pytest_runtest_logreport(Report("call", "failed", "tree/test_building.py::test_b"))
    tally.pytest_runtest_logreport(Report("setup", "failed", "tree/test_building.py::test_c"))
    assert tally.areas == {"verify": {"passed": 1, "skipped": 1}, "tree": {"failed": 1, "error": 1}}
    assert tally.sentence() == "1 passed, 1 failed, 1 skipped, 1 errors"
    assert tally.failures == ["tree/test_building.py::test_b", "tree/test_building.py::test_c"]
