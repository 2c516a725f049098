# SPDX-License-Identifier: Apache-2.0
"""scripts/apply_patches on a small tree: what it applies, and that whatever it refuses stays as it was."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from patched_vllm import APPLY, ROOT
from small_series import BASE, CONDITIONS, FIRST, SECOND, Case, after, git


def contents(case: Case) -> dict[str, str]:
    return {str(p.relative_to(case.tree)): p.read_text() for p in case.tree.rglob("*") if p.is_file()}


def applied(case: Case, *options: str, cwd: Path | None = None) -> None:
    done = case.run(*options, cwd=cwd)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"apply_patches: {FIRST}: applied\napply_patches: {SECOND}: applied\n"
    assert contents(case) == after(2)


def refused(case: Case, *messages: str, before: dict | None = None) -> str:
    """Exit code 1, nothing changed (nor with --check), each of `messages` (patterns) in the output."""
    before = case.state() if before is None else before
    for options in ((), ("--check",)):
        done = case.run(*options)
        said = done.stdout + done.stderr
        assert done.returncode == 1, said
        assert case.state() == before
        assert "Traceback" not in said
        assert ": applied" not in said and "would apply" not in said
        for message in messages:
            assert re.search(message, said), f"{message!r} is not in {said!r}"
    return said


def test_clean(case: Case) -> None:
    applied(case)


def test_already_applied(case: Case) -> None:
    applied(case)
    before = case.state()
    for options in ((), ("--check",)):
        done = case.run(*options)
        assert done.returncode == 0
        assert done.stdout == f"apply_patches: {FIRST}: already applied\napply_patches: {SECOND}: already applied\n"
        assert case.state() == before


def test_check_writes_nothing(case: Case) -> None:
    before = case.state()
    done = case.run("--check")
    assert done.returncode == 0 and done.stdout.count(": would apply\n") == 2
    assert case.state() == before


def test_json(case: Case) -> None:
    report = json.loads(case.run("--json").stdout)
    assert report["exit"] == 0 and report["refusal"] is None
    assert report["patches"] == [{"patch": p, "state": "applied", "detail": ""} for p in (FIRST, SECOND)]
    case.list(FIRST)
    done = case.run("--json")
    assert done.returncode == json.loads(done.stdout)["exit"] == 1
    assert SECOND in json.loads(done.stdout)["refusal"]


@pytest.mark.parametrize(("old", "new"), [("return 1", "return 1  # here"), ("def speed():", "def speed(unit='m/s'):")])
def test_a_drifted_hunk(case: Case, old: str, new: str) -> None:
    """Changed lines, and changed context: git's fuzz is not asked for."""
    case.edit("vllm/engine.py", old, new)
    refused(case, f"{FIRST}: FAILED: vllm/engine.py: the lines of the hunk at line 5 are there 0 times", "nothing was")


def test_a_drifted_hunk_of_the_second_patch(case: Case) -> None:
    """The first patch fits, and is not left behind."""
    case.edit("vllm/config/modes.py", "('plain',)", "('plain', 'other')")
    refused(case, f"{FIRST}: not applied", f"{SECOND}: FAILED: vllm/config/modes.py")


def test_a_hunk_that_fits_twice(case: Case) -> None:
    """git would take the nearest place."""
    content = BASE["vllm/engine.py"]
    (case.tree / "vllm/engine.py").write_text(content + "\n\nclass Other:\n    pass\n\n\n" + content)
    refused(case, f"{FIRST}: FAILED: vllm/engine.py: the lines of the hunk at line 5 are there 2 times, expected 1")


def test_moved_lines_still_fit(case: Case) -> None:
    (case.tree / "vllm/engine.py").write_text("# A new head.\n" * 7 + BASE["vllm/engine.py"])
    assert case.run().returncode == 0
    assert contents(case)["vllm/engine.py"] == "# A new head.\n" * 7 + after(2)["vllm/engine.py"]


def test_a_wrong_file(case: Case) -> None:
    """A file that is missing, and one that holds something else."""
    (case.tree / "vllm/config/modes.py").unlink()
    refused(case, f"{SECOND}: FAILED: vllm/config/modes.py is missing: wrong tree, or another version of vLLM")
    (case.tree / "vllm/config/modes.py").write_text("print('hello')\n")
    refused(case, f"{SECOND}: FAILED: vllm/config/modes.py: the lines of the hunk")


@pytest.mark.parametrize("kind", ["first patch", "second patch", "one file", "one hunk"])
def test_partly_applied(case: Case, kind: str) -> None:
    whole = after(2)
    if kind == "first patch":
        files = after(1)
    elif kind == "second patch":
        files = {path: content.replace("return 2", "return 1") for path, content in whole.items()}
    elif kind == "one file":
        files = BASE | {"vllm/config/modes.py": whole["vllm/config/modes.py"]}
    else:
        files = after(1) | {"vllm/engine.py": after(1)["vllm/engine.py"].replace("'plain'", "'tree'")}
    for path, content in files.items():
        (case.tree / path).write_text(content)
    said = refused(case, "FAILED", "start from an untouched vLLM")
    if kind == "first patch":
        assert f"{FIRST}: already applied" in said and f"{SECOND}: not applied" in said


def test_a_missing_series_entry(case: Case) -> None:
    """In each direction: listed and not there, there and not listed."""
    case.list(FIRST)
    refused(case, f"REFUSED: .*series: {SECOND} is there but not listed")
    case.list(FIRST, SECOND, "0003-more.patch")
    refused(case, "REFUSED: .*series: 0003-more.patch is not a file")
    case.list(FIRST, SECOND)
    (case.series / SECOND).unlink()
    refused(case, f"REFUSED: .*series: {SECOND} is not a file")


def test_a_broken_series(case: Case) -> None:
    before = case.state()
    case.list(FIRST, SECOND, FIRST)
    refused(case, f"{FIRST} is listed 2 times", before=before)
    case.list("# nothing")
    refused(case, "lists no patch", before=before)
    case.list(SECOND, FIRST)
    refused(case, f"{SECOND}: FAILED", before=before)
    (case.series / "series").unlink()
    refused(case, "series: missing", before=before)


@pytest.mark.parametrize(
    ("find", "replace", "message"),
    [
        (r"^\+\+\+ b/vllm/engine.py", "+++ b/setup.py", "expected a file below b/vllm/"),
        (r"^\+\+\+ b/vllm/engine.py", "+++ b/vllm/../../outside.py", "expected a file below b/vllm/"),
        (r"^--- a/vllm/engine.py", "--- a/vllm/other.py", "expected one change of a file in place"),
        (r"^index .*", "rename from vllm/engine.py", "patches may only change or add text files"),
        (r"^\+    return 2\n", "", "the hunk ends early|FAILED"),
        (r"(?s)^diff --git.*", "", "changes no file"),
    ],
)
def test_a_broken_patch(case: Case, find: str, replace: str, message: str) -> None:
    patch = case.series / FIRST
    broken, count = re.subn(find, replace, patch.read_text(), count=1, flags=re.MULTILINE)
    assert count == 1
    patch.write_text(broken)
    refused(case, message)


def test_a_post_condition_that_does_not_hold(case: Case) -> None:
    """Both when the series is about to be applied and when it is in place."""
    broken = CONDITIONS | {FIRST: [{"file": "vllm/engine.py", "in": "speed", "holds": "return 3"}]}
    (case.series / "postconditions.json").write_text(json.dumps(broken))
    message = f"{FIRST}: FAILED: post-condition: vllm/engine.py: speed does not hold `return 3`"
    refused(case, message)
    for path, content in after(2).items():
        (case.tree / path).write_text(content)
    refused(case, message)


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({FIRST: CONDITIONS[FIRST]}, "expected a list of conditions for each of"),
        (CONDITIONS | {FIRST: []}, "needs at least one condition"),
        (CONDITIONS | {FIRST: [{"file": "vllm/engine.py"}]}, "each with file, holds"),
        (CONDITIONS | {FIRST: [{"file": "vllm/engine.py", "holds": "return ("}]}, "is no Python"),
        (CONDITIONS | {FIRST: [{"file": "vllm/no.py", "holds": "return 2"}]}, "vllm/no.py does not parse"),
        (CONDITIONS | {FIRST: [{"file": "vllm/engine.py", "in": "f.g", "holds": "2"}]}, "f.g is there 0 times"),
    ],
)
def test_broken_post_conditions(case: Case, conditions: dict, message: str) -> None:
    (case.series / "postconditions.json").write_text(json.dumps(conditions))
    refused(case, message)


def test_a_patch_that_breaks_the_syntax(case: Case) -> None:
    patch = case.series / FIRST
    patch.write_text(patch.read_text().replace("+    return 2", "+    return 2)"))
    second = case.series / SECOND
    second.write_text(second.read_text().replace("     return 2\n", "     return 2)\n"))
    refused(case, "does not parse")


# -- where the tree is


def test_inside_another_repository(case: Case) -> None:
    """Plain `git apply` says nothing, does nothing and exits 0 in a subfolder of another repository."""
    outer = case.tree.parent
    git("init", "--quiet", cwd=outer)
    silent = subprocess.run(["git", "apply", str(case.series / FIRST)], cwd=case.tree, capture_output=True, check=False)
    assert silent.returncode == 0 and contents(case) == BASE
    applied(case, cwd=case.tree)


def test_a_source_tree_under_git(case: Case) -> None:
    git("init", "--quiet", cwd=case.tree)
    git("add", "--all", cwd=case.tree)
    git("commit", "--quiet", "--message", "base", cwd=case.tree)
    assert case.run().returncode == 0
    assert git("status", "--porcelain", cwd=case.tree) == " M vllm/config/modes.py\n M vllm/engine.py\n"


def test_an_installed_package(case: Case) -> None:
    """A site-packages folder: no repository, other packages beside it, files hard-linked to an installer's cache."""
    (case.tree / "vllm-0.21.0.dist-info").mkdir()
    cache = case.tree.parent / "cache.py"
    os.link(case.tree / "vllm/engine.py", cache)
    (case.tree / "vllm/engine.py").chmod(0o640)
    applied(case)
    assert cache.read_text() == BASE["vllm/engine.py"]
    assert (case.tree / "vllm/engine.py").stat().st_mode & 0o777 == 0o640


def test_links_are_refused(case: Case) -> None:
    (case.tree / "vllm/config").rename(case.tree.parent / "elsewhere")
    (case.tree / "vllm/config").symlink_to(case.tree.parent / "elsewhere")
    refused(case, "is a link or lies behind one")
    assert (case.tree.parent / "elsewhere/modes.py").read_text() == BASE["vllm/config/modes.py"]


def test_the_users_git_settings_do_not_matter(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """apply.ignoreWhitespace would let a hunk with other indentation through."""
    home = case.tree.parent / "home"
    home.mkdir()
    (home / ".gitconfig").write_text("[apply]\n\tignoreWhitespace = change\n\twhitespace = fix\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_DIR", str(home / "nowhere"))
    case.edit("vllm/engine.py", "    return 1", "      return 1")
    refused(case, f"{FIRST}: FAILED")
    case.edit("vllm/engine.py", "      return 1", "    return 1")
    applied(case)


def test_a_failed_write_is_undone(case: Case) -> None:
    """Everything that was written before it is put back."""
    if os.geteuid() == 0:
        # Root writes everywhere: a folder in the way of the second file's new content stops it too.
        (case.tree / "vllm/engine.py.apply_patches").mkdir()
    else:
        (case.tree / "vllm").chmod(0o555)
    before = case.state()
    done = case.run()
    assert done.returncode == 1 and "everything was put back" in done.stderr, done.stdout + done.stderr
    (case.tree / "vllm").chmod(0o755)
    assert {k: v[0] for k, v in case.state().items()} == {k: v[0] for k, v in before.items()}


def test_no_vllm_there(case: Case, tmp_path: Path) -> None:
    case.tree = case.tree / "vllm"
    refused(case, "holds no vllm/__init__.py.*did you mean")
    case.tree = tmp_path / "series"
    refused(case, "holds no vllm/__init__.py, expected a source tree or site-packages folder$")


def test_usage() -> None:
    assert subprocess.run([APPLY], capture_output=True, check=False, cwd=ROOT).returncode == 2
    shown = subprocess.run([APPLY, "--help"], capture_output=True, text=True, check=True).stdout
    assert all(option in shown for option in ("--check", "--series", "--json", "Exit code 0"))
