# SPDX-License-Identifier: Apache-2.0
"""The dispatcher answers at once, without the heavy libraries, and becomes the server when it starts one."""

import json
import os
import resource
import signal
import subprocess
import sys

import pytest

HEAVY = ("torch", "vllm", "transformers", "rich", "numpy", "httpx", "huggingface_hub", "safetensors")
REPORT = f"""
import atexit, sys
atexit.register(lambda: print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr))
from aeon_entrypoints.cli import main
main()
"""
QUICK = [
    ["ddtree", "--recipe", "proving-ground", "--dry-run"],
    ["ddtree", "--dry-run"],
    ["run", "qwen36-27b-xs", "--mode", "dflash", "--profile", "gateway", "--dry-run"],
    ["qwen25-m2", "--dry-run"],
    ["validate", "proving-ground", "qwen25-m2", "qwen36-27b-xs"],
    ["show", "qwen36-27b-xs"],
    ["show", "proving-ground", "--resolved"],
    ["list"],
    ["--help"],
    ["ddtree", "--help"],
]


def run(arguments, code="from aeon_entrypoints.cli import main; main()"):
    """The finished process, and the processor time it took in seconds."""
    # As for any user, the first run leaves bytecode for the next.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_quick_and_light(arguments):
    done, _ = run(arguments, REPORT)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
    # Processor time, and the best of several: other work may hold the cores, and nothing here waits for anything.
    seconds = []
    while len(seconds) < 5 and min(seconds, default=1.0) >= 0.5:
        seconds.append(run(arguments)[1])
    assert min(seconds) < 0.5, seconds


def test_dry_run_prints_json_and_nothing_else():
    done, _ = run(QUICK[0])
    plan = json.loads(done.stdout)
    assert plan["mode"] == "ddtree"
    assert plan["argv"][1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    options = json.loads(plan["argv"][plan["argv"].index("--additional-config") + 1])["ddtree"]
    assert options["budget"] == 31
    assert plan["env"]["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_the_server_takes_the_dispatchers_place(pair, tmp_path):
    """exec: same process id, arguments intact, and SIGTERM reaches the server itself."""
    stand_in = tmp_path / "vllm" / "entrypoints" / "openai"
    stand_in.mkdir(parents=True)
    for package in (stand_in, stand_in.parent, stand_in.parent.parent):
        (package / "__init__.py").touch()
    (stand_in / "api_server.py").write_text(
        "import json, os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print(json.dumps([os.getpid(), sys.argv[1:]]), flush=True)\n"
        "signal.pause()\n"
    )
    child = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "aeon_entrypoints",
            "baseline",
            "--recipe",
            str(pair.recipe_file()),
            "--",
            "--x",
            "a 'b\" c",
        ],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        pid, arguments = json.loads(child.stdout.readline())
        assert pid == child.pid
        assert arguments[-2:] == ["--x", "a 'b\" c"]
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=10) == 7
    finally:
        child.kill()
        child.wait()
