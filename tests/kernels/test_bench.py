# SPDX-License-Identifier: Apache-2.0
"""The bench away from its clock: cases are checked before they are timed, wrong ones refused, goals judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from aeon_ddtree.kernels.bench import __main__ as program
from aeon_ddtree.kernels.bench import attention, case, clock, drafting, plan, recurrent, run, shapes, stock
from aeon_ddtree.kernels.bench.goals import Goal, judge

SMALL = shapes.Model(
    "small", gdn_keys=1, gdn_values=2, gdn_key_size=16, gdn_value_size=16, gdn_layers=2, taps=4,
    attention=shapes.Heads(4, 2, 16, block=24, layers=2), drafter=shapes.Heads(2, 1, 16, block=24, layers=1),
    drafter_window=20, block=8, vocabulary=97,
)  # fmt: skip
BANDWIDTH = 1000.0


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[case.Case]]:
    """One case of every kernel, at sizes that the references do at once."""
    for module in (recurrent, attention, drafting):
        monkeypatch.setattr(module, "MODELS", {"small": SMALL})
        monkeypatch.setattr(module, "WIDTHS", (8, 16))
        monkeypatch.setattr(module, "BATCHES", (2,))
    monkeypatch.setattr(attention, "CONTEXTS", (50,))
    monkeypatch.setattr(case, "_BEYOND_CACHE", 1)
    yield plan.all_cases()


def test_every_case_passes_its_check(small: list[case.Case]) -> None:
    assert {each.kernel for each in small} == set(plan.kernels()) and len(small) >= 26
    for each in small:
        ready = each.prepare(case.Source("cpu"), each)
        assert ready.check() is None, each.label
        assert ready.moved > 0 and ready.units in (1, SMALL.gdn_layers) and len(ready.calls) >= 1
        for call in ready.calls:
            call()
        assert ready.check() is None, f"{each.label} a second time"


def _shifted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, wrong by a little in the last cell of what it answers; right in fp64, which is the truth."""

    def wrong(*given: Any, **named: Any) -> Any:
        answer = function(*given, **named)
        first = answer[0] if isinstance(answer, tuple) else answer
        if first.dtype != torch.float64:
            first[(-1,) * first.ndim] += 1
        return answer

    return wrong


def _idle(*_: Any, **__: Any) -> None:
    """What commits do not do."""


WRONG = [
    ("gated_delta_tree", recurrent, "gated_delta_tree", _shifted, "out is off by"),
    ("fold_state", recurrent, "fold_states", lambda f: _idle, "state of layer 0 is off by"),
    ("causal_conv_tree", recurrent, "causal_conv_tree", _shifted, "y is off by"),
    ("conv_commit", recurrent, "conv_commits", lambda f: _idle, "windows is off by"),
    ("tree_attention", attention, "tree_attention", _shifted, "out of request 1 is off by"),
    ("drafter_block", attention, "tree_attention", _shifted, "out of request 1 is off by"),
    ("compact_kv", attention, "compact_kv", lambda f: _idle, "caches is off by"),
    ("write_kv", attention, "write_kv", lambda f: _idle, "k is off by"),
    ("build_tree", drafting, "build_tree", _shifted, "token is off by"),
    ("walk_tree", drafting, "walk_tree", _shifted, "path is off by"),
    ("keyed_sampling", drafting, "keyed_sample", _shifted, "1 of 16 draws differ"),
]


@pytest.mark.parametrize(("kernel", "module", "name", "wrong", "message"), WRONG, ids=[each[0] for each in WRONG])
def test_a_wrong_answer_is_refused_untimed(
    small: list[case.Case],
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    module: Any,
    name: str,
    wrong: Any,
    message: str,
) -> None:
    mine = next(each for each in small if each.kernel == kernel)
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    monkeypatch.setattr(clock, "time", lambda *_: pytest.fail("a wrong case was timed"))
    record = run.measure(mine, case.Source("cpu"), BANDWIDTH, with_stock=True)
    assert message in record["refused"] and "us" not in record
    assert "REFUSED" in run.line(record) and " us" not in run.line(record)


def test_a_record_has_ours_and_the_fastest_stock(small: list[case.Case], monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([clock.Time(20.0, 19.0, 22.0), clock.Time(50.0, 49.0, 51.0), clock.Time(40.0, 39.0, 41.0)])
    monkeypatch.setattr(clock, "time", lambda calls: next(times))
    monkeypatch.setattr(stock, "flash_attention", lambda *_: {"slow": [_idle], "fast": [_idle]})
    mine = next(each for each in small if each.kernel == "tree_attention")
    record = run.measure(mine, case.Source("cpu"), BANDWIDTH, with_stock=True)
    assert record["us"] == [20.0, 19.0, 22.0] and record["bandwidth_share"] == round(record["bytes"] / 20.0 / 1000.0, 4)
    assert (record["stock_kernel"], record["stock_us"]) == ("fast", 40.0)
    assert "ratio 0.500" in run.line(record)


def test_time_of_a_launch_is_shared_by_its_layers(small: list[case.Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "time", lambda calls: clock.Time(20.0, 19.0, 22.0))
    mine = next(each for each in small if each.kernel == "fold_state")
    assert run.measure(mine, case.Source("cpu"), BANDWIDTH, with_stock=False)["us"] == [10.0, 9.5, 11.0]


def test_a_stock_kernel_that_fails_leaves_ours(small: list[case.Case], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise ImportError("no such kernel")

    monkeypatch.setattr(clock, "time", lambda calls: clock.Time(20.0, 19.0, 22.0))
    monkeypatch.setattr(stock, "convolution", missing)
    mine = next(each for each in small if each.kernel == "causal_conv_tree")
    record = run.measure(mine, case.Source("cpu"), BANDWIDTH, with_stock=True)
    assert record["us"][0] == 20.0 and record["stock_error"] == "ImportError: no such kernel"
    assert "stock_us" not in record


def _record(kernel: str, width: int, batch: int, us: float, context: int = 0, **more: Any) -> dict[str, Any]:
    base = {"kernel": kernel, "model": "27b", "width": width, "batch": batch, "context": context, "bytes": 10_000}
    return base | {"us": [us, us, us]} | more


def test_goals() -> None:
    records = [
        _record("gated_delta_tree", 16, 16, 8.0, stock_us=50.0),
        _record("fold_state", 16, 16, 2.0),
        _record("tree_attention", 16, 1, 12.0, 8192, stock_us=10.0, bandwidth_share=0.5),
        _record("tree_attention", 16, 1, 23.0, 131072, stock_us=20.0, bandwidth_share=0.71),
        _record("tree_attention", 16, 1, 19.0, 512, stock_us=10.0, bandwidth_share=0.01),
        _record("build_tree", 32, 16, 151.0),
        replace_model(_record("walk_tree", 16, 1, 99.0)),
        _record("walk_tree", 16, 1, 9.0),
    ]
    found = {goal.name: goal for goal in judge(records, bytes_per_us=4000.0)}
    ratio = found["gated_delta_tree + fold_state / stock update, W = 16, batch 16"]
    assert ratio.found == pytest.approx(0.2) and ratio.met
    share = found["gated_delta_tree + fold_state, share of copy bandwidth, W = 16, batch 16"]
    assert share.found == pytest.approx(50) and share.met is False and "MISSED" in share.line()
    name = "tree_attention, W = 16, batch 1: "
    assert found[name + "worst / FlashAttention-3, contexts >= 8192"].found == pytest.approx(1.2)
    assert found[name + "most beyond FlashAttention-3, shorter contexts"].found == pytest.approx(9)
    assert found[name + "share of copy bandwidth at 131072"].met
    assert found["build_tree with top-k, B = 31, k = 15, batch 16"].met is False
    assert found["walk_tree, slowest"].met, "only the 27B shape counts"
    unmeasured = found["compact_kv, 16 layers, batch 1"]
    assert unmeasured.met is None and "not measured" in unmeasured.line()


def replace_model(record: dict[str, Any]) -> dict[str, Any]:
    return record | {"model": "pair"}


def test_a_limit_is_met_when_reached() -> None:
    least, most = Goal("x", 60, 60.0, least=True), Goal("x", 60, 60.0)
    assert least.met and most.met and not replace(least, found=59.9).met and not replace(most, found=60.1).met


def test_quick_measures_what_goals_need() -> None:
    quick = plan.quick_cases()
    assert 20 <= len(quick) <= 40 and {each.model.name for each in quick} == {"27b"}
    made = [_record(c.kernel, c.width, c.batch, 1.0, c.context, stock_us=1.0, bandwidth_share=1.0) for c in quick]
    missing = {goal.name for goal in judge(made, 1e9) if goal.met is None}
    assert all(name.startswith("tree_attention") for name in missing), missing


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--quick"]) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and "no CUDA device" in err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_device() -> None:
    mine = next(each for each in plan.quick_cases() if each.kernel == "walk_tree")
    record = run.measure(mine, case.Source("cuda"), 4e6, with_stock=False)
    median, low, high = record["us"]
    assert 0 < low <= median <= high < 1000
