# SPDX-License-Identifier: Apache-2.0
"""`scripts/demo.py` against a stand-in for the server: what it prints, when it exits 0, that nothing stays behind."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
DEMO = HERE.parent.parent / "scripts" / "demo.py"

spec = importlib.util.spec_from_file_location("demo", DEMO)
demo = importlib.util.module_from_spec(spec)
spec.loader.exec_module(demo)


@pytest.fixture
def command(pair, tmp_path):
    """The demo's command line and environment, with the stand-in installed as vLLM."""
    package = tmp_path / "stand_in" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    shutil.copy(HERE / "stand_in_server.py", package / "api_server.py")
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"category": c, "prompt": p} for c, p in (("coding", "def"), ("prose", "Once upon"), ("coding", "class"))]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--recipe", str(pair.recipe_file()), "--prompts", str(prompts), "--max-tokens", "4"]
    return [sys.executable, str(DEMO), *arguments], os.environ | {"PYTHONPATH": str(tmp_path / "stand_in")}


def processes_of(recipe: str) -> list[int]:
    """Processes started for this test: the stand-in's arguments carry the folder of the made-up pair."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(Path(recipe).parent) in part for part in process.info["cmdline"] or []):
            found.append(process.pid)
    return found


def run(command, behaviour=""):
    arguments, environ = command
    done = subprocess.run(arguments, env=environ | {"STAND_IN": behaviour}, capture_output=True, text=True, timeout=120)
    assert processes_of(arguments[3]) == []
    return done


def test_all_is_well(command):
    done = run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("identical to plain decoding: yes") == 4  # two categories, T = 0 and seeded
    for part in (
        "baseline: generates",
        "ddtree: generates",
        "tokens per step: 2.50",
        "of 31.0 nodes",
        "1: 90%  2: 60%",
    ):
        assert part in done.stdout
    assert "off-spine acceptances: 3" in done.stdout and "grammar 2" in done.stdout
    assert "● 'w7'  accepted, off the spine" in done.stdout and "continues with 'w8'" in done.stdout
    assert "processes left: 0" in done.stdout


@pytest.mark.parametrize(
    ("behaviour", "part"),
    [
        ("differ", "identical to plain decoding: no"),
        ("chain", "No branch off the spine was accepted"),
        ("die", "a fault of the engine"),
    ],
)
def test_it_fails_when_something_is_wrong(command, behaviour, part):
    done = run(command, behaviour)
    assert done.returncode == 1
    assert part in done.stdout + done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_it_leaves_nothing_behind(command, number, code):
    arguments, environ = command
    running = subprocess.Popen(
        arguments,
        env=environ | {"STAND_IN": "stubborn slow"},
        stdout=subprocess.PIPE,
        text=True,
        # What runs in the background inherits SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert running.stdout is not None
    while "generates" not in running.stdout.readline():
        assert running.poll() is None
    running.send_signal(number)
    assert running.wait(timeout=90) == code
    assert processes_of(arguments[3]) == []


def test_off_spine_rows():
    assert demo.off_spine({"parent": [-1, 0, 1, 1, 0], "path": [0, 1, 3]}) == [3]
    assert demo.off_spine({"parent": [-1, 0, 1, 1, 0], "path": [0, 1, 2]}) == []
    assert demo.off_spine({"parent": [-1], "path": [0]}) == []


def test_the_most_telling_tree_is_drawn(tmp_path):
    trace = tmp_path / "trace"
    assert demo.fetch_tree(trace) is None
    trees = [
        {"parent": [-1, 0, 1, 2], "path": [0, 1, 2, 3]},
        {"parent": [-1, 0, 0, 2], "path": [0, 2, 3]},
        {"parent": [-1, 0, 0, 2], "path": [0, 2]},
    ]
    trace.write_text("\n".join(map(json.dumps, trees)))
    assert demo.fetch_tree(trace) == trees[1]
    lines = list(demo.draw(trees[1], ["r", "a", "b", "c"], "z"))
    assert lines[:4] == [
        "    0 ● 'r'  root",
        "    1 ├─○ 'a'",
        "    2 └─● 'b'  accepted, off the spine",
        "    3   └─● 'c'  accepted, off the spine",
    ]
