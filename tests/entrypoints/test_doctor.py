# SPDX-License-Identifier: Apache-2.0
"""`aeon-ddtree doctor`: a row for every check, the plan, and the exit code; test_preflight_broken has the failures."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from preflight_world import World

from aeon_entrypoints import cli
from aeon_entrypoints.failure import Refusal
from aeon_entrypoints.preflight import CHECKS

NAMES = ["recipe and values", *(check.name for check in CHECKS)]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def doctor(world, capsys):
    def call(*arguments: str) -> tuple[int, str, str]:
        code = 0
        try:
            cli.cli.main(["doctor", *arguments], obj=world.made_machine(), standalone_mode=False)
        except SystemExit as ended:
            code = int(ended.code)
        streams = capsys.readouterr()
        return code, streams.out, streams.err

    return call


def test_all_is_well(world, doctor):
    code, out, err = doctor("--recipe", str(world.file()))
    assert (code, err) == (0, "")
    rows = out.splitlines()[1:]
    for name in NAMES:
        assert any(row.startswith(name) and " ok " in row for row in rows), (name, out)
    text = " ".join(out.split())
    for part in ("modelopt_fp4 NVFP4", "NVIDIA GB10", "largest utilisation 0.91", "4 requests × 32 rows"):
        assert part in text


def test_json(world, doctor):
    code, out, _ = doctor("--recipe", str(world.file()), "--json", "--mode", "dflash")
    answer = json.loads(out)
    assert code == 0 and answer["passed"] is True
    assert (answer["recipe"], answer["mode"], answer["device"]) == ("pair", "dflash", "cuda")
    assert [row["check"] for row in answer["checks"]] == NAMES
    assert answer["memory"]["largest_utilisation"] == 0.91
    assert (
        answer["memory"]["needed_bytes"]
        == sum(answer["memory"]["fixed_bytes"].values()) + answer["memory"]["request_bytes"]
    )
    assert answer["machine"]["gpus"][0]["unified"] is True


def test_what_failed_is_told_in_full_and_what_depends_on_it_skipped(world, doctor):
    world.shard.unlink()
    code, out, err = doctor("--recipe", str(world.file()))
    assert code == 2 and "1 of 17 checks failed" in err
    lines = out.splitlines()
    said = [line for line in lines if line.startswith("model files: ")]
    assert len(said) == 1 and str(world.index) in said[0] and said[0].endswith("[model.shard-missing]")
    assert any(line.startswith("memory plan") and "skipped" in line and "not complete" in line for line in lines)
    assert any(line.startswith("port") and " ok " in line for line in lines)


def test_every_failure_is_found_not_only_the_first(world, doctor):
    world.draft(lambda config: config.update(vocab_size=1, block_size=1))
    world.machine |= {"gpus": (), "plugins": {}}
    code, out, _ = doctor("--recipe", str(world.file()), "--json")
    found = {finding["code"] for row in json.loads(out)["checks"] for finding in row["findings"]}
    assert code == 2
    assert {"drafter.vocabulary", "drafter.block-size", "gpu.missing", "plugin.missing"} <= found


def test_values_on_the_command_line_and_after_the_dashes(world, doctor):
    code, out, _ = doctor("--recipe", str(world.file()), "--json", "--max-num-seqs", "4000")
    assert code == 2 and "tokens.budget" in out
    code, out, _ = doctor("--recipe", str(world.file()), "--json", "--", "--quantization", "gptq")
    assert code == 2 and "quantisation.flag" in out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--recipe", "no-such-recipe"], "unknown recipe"),
        (["--budget", "0"], "budget"),
        (["--commit", "branch"], "expected flat"),
        (["--", "--worker-cls", "x"], "worker-cls"),
    ],
)
def test_values_that_are_refused_are_a_row_too(world, doctor, arguments, part):
    recipe = [] if "--recipe" in arguments else ["--recipe", str(world.file())]
    code, out, _ = doctor("--json", *recipe, *arguments)
    rows = json.loads(out)["checks"]
    assert code == 2 and [row["check"] for row in rows] == NAMES
    assert rows[0]["status"] == "failed" and part in rows[0]["detail"]


def test_a_model_that_is_a_file_away(world, doctor):
    """Warnings leave the exit code alone."""
    (world.target / "tokenizer.json").unlink()
    code, out, _ = doctor("--recipe", str(world.file()))
    assert code == 0 and "[model.tokenizer]" in out


def test_on_this_machine_with_the_embedded_pair():
    """The real thing, in a process of its own; the port may be taken by others here."""
    command = [
        sys.executable,
        "-m",
        "aeon_entrypoints",
        "doctor",
        "--recipe",
        "proving-ground",
        "--json",
        "--device",
        "cpu",
    ]
    done = subprocess.run([*command, "--port", "0"], capture_output=True, text=True, timeout=120)
    answer = json.loads(done.stdout)
    failed = [row for row in answer["checks"] if row["status"] == "failed"]
    assert done.returncode == (2 if failed else 0)
    assert [row["check"] for row in failed if row["check"] != "memory plan"] == [], failed
    assert {row["check"]: row["status"] for row in answer["checks"]}["drafter fits target"] == "ok"


def test_nothing_heavy_is_imported():
    code = "import sys; from aeon_entrypoints import doctor, download, preflight; "
    code += "print([n for n in ('torch','vllm','rich','huggingface_hub','pynvml','httpx') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_without_a_drafter_there_are_rows_to_skip(world, doctor):
    shutil.rmtree(world.drafter)
    code, out, _ = doctor("--recipe", str(world.file()), "--mode", "baseline", "--json")
    status = {row["check"]: row["status"] for row in json.loads(out)["checks"]}
    assert code == 0 and status["drafter files"] == status["sliding window"] == "skipped"
    assert status["memory plan"] == "ok"


def test_without_rich_there_is_json(world, doctor, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(Refusal, match=r"rich is not installed.*--json"):
        doctor("--recipe", str(world.file()))
    assert doctor("--recipe", str(world.file()), "--json")[0] == 0
