# SPDX-License-Identifier: Apache-2.0
"""scripts/compile_kernels.py: variants come from the launchers, and each fault that it looks for is found."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aeon_ddtree.kernels.bench import plan, variants
from aeon_ddtree.kernels.causal_conv_tree import triton as conv

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "compile_kernels.py"
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreted Triton compiles nothing"
)


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_kernels", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["compile_kernels"] = module
    spec.loader.exec_module(module)
    return module


def test_one_kernel_for_both_targets(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "table.json"
    assert script.main(["--kernel", "conv_kernel", "--json", str(file), "--jobs", "1"]) == 0
    table = json.loads(file.read_text())
    assert {row["target"] for row in table["variants"]} == {"sm_90", "sm_121"} and not table["faults"]
    assert all(row["registers"] > 0 and row["spills"] == 0 and row["hot"] for row in table["variants"])
    assert "no faults" in capsys.readouterr().out.splitlines()[-1]


def test_variants_follow_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another cut in the launcher's own table is another variant here, with no list to keep."""
    mine = [c for c in plan.all_cases() if c.kernel == "causal_conv_tree"][:2]

    def recorded() -> list[str]:
        return [w.variant.description for w in variants.record(mine, 90, 132) if w.variant.kernel == "conv_kernel"]

    before = recorded()
    monkeypatch.setattr(conv, "ConvConfig", partial(conv.ConvConfig, 2, 64, 2))
    after = recorded()
    assert before and after and not set(before) & set(after)
    assert json.loads(after[0])["options"]["num_warps"] == 2


def test_launchers_are_told_which_device() -> None:
    """What they cut by it are constants of the kernel; options name the target in any case."""
    mine = [c for c in plan.quick_cases() if c.kernel == "tree_attention" and c.batch == 1]

    def cuts(capability: int, processors: int) -> set[str]:
        found = [w.variant for w in variants.record(mine, capability, processors)]
        return {f"{v.kernel} {json.loads(v.description)['constant_vals']}" for v in found}

    assert cuts(90, 132) != cuts(121, 48)


def test_errors_of_the_compiler_are_answers() -> None:
    mine = [c for c in plan.all_cases() if c.kernel == "causal_conv_tree"][:1]
    variant = next(w.variant for w in variants.record(mine, 90, 132) if w.variant.kernel == "conv_kernel")
    broken = json.loads(variant.description)
    place = [list(key) for key in broken["constant_keys"]].index([conv.conv_kernel.arg_names.index("ROWS")])
    broken["constant_vals"][place] = 3  # no power of two
    result = variants.compile_variant(replace(variant, description=json.dumps(broken)))
    assert result.error and result.registers == 0


def _row(**changes: Any) -> dict[str, Any]:
    row = {"target": "sm_121", "kernel": "conv_kernel", "where": "causal_conv_tree 27b W=8 R=1", "hot": True}
    return row | {"registers": 8, "spills": 0, "shared": 1024, "warps": 4, "seconds": 1.0, "error": None} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"error": "boom"}, "does not compile: boom"),
        ({"shared": (99 << 10) + 1}, "101377 bytes of shared memory, expected at most 101376"),
        ({"spills": 4}, "spills 4 bytes a thread, expected at most 0: it is hot"),
        ({"kernel": "some_kernel", "hot": False}, "is a new kernel"),
    ],
)
def test_faults(script: ModuleType, changes: dict[str, Any], message: str) -> None:
    (fault,) = script.faults_of(_row(**changes), set())
    assert message in fault and fault.startswith(f"sm_121 {changes.get('kernel', 'conv_kernel')} (")


def test_no_faults(script: ModuleType) -> None:
    for changes in ({}, {"shared": 99 << 10}, {"target": "sm_90", "shared": 200 << 10},
                    {"kernel": "_cutoff", "hot": False, "spills": 8}):  # fmt: skip
        assert script.faults_of(_row(**changes), set()) == []


def test_an_allowance_covers_what_it_names_and_no_more(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    allowance = script.Allowance("sm_121", "conv_kernel", "causal_conv_tree 27b*", 16, "2026-01-01", "a reason")
    monkeypatch.setattr(script, "ALLOWED", (allowance,))
    used: set[Any] = set()
    assert script.faults_of(_row(spills=16), used) == [] and used == {allowance}
    assert script.faults_of(_row(spills=17), set()), "more than it allows"
    assert script.faults_of(_row(spills=4, target="sm_90"), set()), "another target"
    assert script.faults_of(_row(spills=4, where="causal_conv_tree pair W=8 R=1"), set()), "another shape"


def test_an_idle_allowance_is_a_fault(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    idle = script.Allowance("sm_90", "conv_kernel", "causal_conv_tree 27b*", 16, "2026-01-01", "a reason")
    monkeypatch.setattr(script, "ALLOWED", (idle,))
    assert script.main(["--kernel", "conv_kernel", "--target", "sm_90", "--jobs", "1"]) == 1
    assert "is not needed, take it out" in capsys.readouterr().err


def test_every_kernel_of_the_bench_is_hot_or_cold(script: ModuleType) -> None:
    assert not script.HOT & script.COLD
    assert all(a.kernel in script.HOT and a.target in script.TARGETS and a.reason for a in script.ALLOWED)
