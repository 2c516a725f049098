# SPDX-License-Identifier: Apache-2.0
"""The first word: a command, a command that is still to come, another program, or neither."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aeon_entrypoints import command, preflight
from aeon_entrypoints.passthrough import NOT_YET


def run(*arguments, **variables):
    command = [sys.executable, "-m", "aeon_entrypoints", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | variables)


@pytest.mark.parametrize("shell", ["bash", "/bin/bash"])
def test_a_shell(shell):
    done = run(shell, "-c", 'echo "$0|$1|$2"; exit 7', "zero", "a 'b\"", "--dry-run")
    assert (done.returncode, done.stdout, done.stderr) == (7, "zero|a 'b\"|--dry-run\n", "")


def test_the_arguments_of_a_program_are_untouched(tmp_path):
    program = tmp_path / "vllm"
    program.write_text(f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([os.getpid(), sys.argv[1:]]))\n")
    program.chmod(0o755)
    given = ["serve", "--help", "--", "--speculative-config", '{"a": "b c"}', "", "ü\n", "*"]
    command = [sys.executable, "-m", "aeon_entrypoints", "vllm", *given]
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    out, _ = child.communicate(timeout=60)
    assert json.loads(out) == [child.pid, given]  # the same process: signals reach it


def test_pipes_end_quietly():
    """Python ignores SIGPIPE; what it executes must not."""
    done = run("bash", "-c", "yes | head -n 1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "y\n", "")


def test_a_program_that_cannot_run(tmp_path):
    program = tmp_path / "tool"
    program.write_bytes(b"\x7fELF of another machine")
    program.chmod(0o755)
    done = run(str(program))
    assert done.returncode == 2 and "cannot be executed" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("word", ["ddtre", "no-such-program", "/no/such/program", "Dockerfile"])
def test_neither_command_nor_program(word):
    done = run(word, "--x")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert word in done.stderr and "known: " in done.stderr


@pytest.mark.parametrize("name", sorted(NOT_YET))
@pytest.mark.parametrize("arguments", [[], ["--help"], ["--x", "1"]])
def test_still_to_come(dispatch, name, arguments):
    outcome = dispatch(name, *arguments)
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    assert outcome.err.startswith(f"aeon-ddtree: {name}: not yet")


def test_no_arguments_is_help():
    done = run()
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == run("--help").stdout and "Commands:" in done.stdout


def test_run_is_the_mode_of_a_recipe(pair, dispatch):
    file = pair.recipe_file()
    assert dispatch("run", file, "--port", "0").started == dispatch("ddtree", "--recipe", file, "--port", "0").started
    assert dispatch("run", file, "--mode", "baseline").options()["mode"] == "plain"
    pair.recipe["modes"] = {"baseline": {}}
    assert dispatch("run", pair.recipe_file()).options()["mode"] == "plain"


def test_what_is_said_at_the_start(pair, dispatch, monkeypatch, tmp_path):
    (tmp_path / "build-id").write_text("v1.2.3-gb10 abcdef\n")
    monkeypatch.setenv("AEON_DDTREE_BUILD_ID_FILE", str(tmp_path / "build-id"))
    err = dispatch("ddtree", "--recipe", pair.recipe_file()).err
    for part in ("mode ddtree", "recipe pair", "device cpu", "budget 31", "build v1.2.3-gb10 abcdef", "policy flat"):
        assert part in err
    monkeypatch.setenv("AEON_DDTREE_BUILD_ID_FILE", str(tmp_path / "absent"))
    assert "build" not in dispatch("ddtree", "--recipe", pair.recipe_file()).err


def test_the_build_id_is_where_the_images_have_it():
    dockerfile = (Path(__file__).parents[2] / "Dockerfile").read_text(encoding="utf-8")
    folders = re.findall(r"build_id[.]py --flavour \S+ --out (\S+)", dockerfile)
    assert len(folders) == 2 and {f"{folder}/build-id" for folder in folders} == {str(command.BUILD_ID_FILE)}
    assert {f"{folder}/build.json" for folder in folders} == {str(preflight.BUILD_FACTS)}


def test_the_default_recipe_is_marked(dispatch, monkeypatch):
    for name in ("qwen36-27b-xs", "proving-ground"):
        assert [row["name"] for row in json.loads(dispatch("list", "--json").out) if row["default"]] == [name]
        assert [row.split()[0] for row in dispatch("list").out.splitlines() if row.endswith("(default)")] == [name]
        monkeypatch.setenv("DDTREE_RECIPE", "proving-ground")  # as the CPU image has it


def test_its_version(dispatch):
    assert dispatch("--version").out == f"aeon-ddtree {importlib.metadata.version('aeon-ddtree')}\n"


def test_the_watcher_is_told(pair, dispatch):
    arguments = ["ddtree", "--recipe", pair.recipe_file()]
    outcome = dispatch(*arguments, "--ready-timeout", "60", "--stall-after", "7", "--exit-on-stall")
    assert "--enable-server-load-tracking" in outcome.started
    assert outcome.flag("--disable-access-log-for-endpoints") == "/health,/metrics,/load"
    told = outcome.watched
    assert (told["ready_timeout"], told["stall_after"], told["exit_on_stall"], told["name"]) == (60, 7, True, "pair")
    assert told["metrics_dir"] == outcome.environ["PROMETHEUS_MULTIPROC_DIR"]
    outcome = dispatch(*arguments, "--no-watch")
    assert outcome.watched is None and "--enable-server-load-tracking" not in outcome.started
    assert "--disable-access-log-for-endpoints" not in outcome.started
    outcome = dispatch(*arguments, "--", "--disable-access-log-for-endpoints=/ping")
    assert [each for each in outcome.started if "access-log" in each] == ["--disable-access-log-for-endpoints=/ping"]


def test_without_a_temporary_folder(pair, dispatch, monkeypatch, tmp_path):
    """A read-only container: a dry run answers, a start says what it needs."""
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "file"))
    outcome = dispatch("ddtree", "--recipe", pair.recipe_file())
    assert outcome.code == 2 and outcome.started is None
    assert "folder for metrics" in outcome.err and "--tmpfs /tmp" in outcome.err

    def none():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)
    assert dispatch("ddtree", "--recipe", pair.recipe_file(), "--dry-run").code == 0
