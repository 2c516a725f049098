# SPDX-License-Identifier: Apache-2.0
"""Drafters with sliding-window layers: the reference's logits with patches/vllm, a refusal without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import patched_vllm
import pytest
import step_checks as checks

from aeon_ddtree.engine.decoder import Decoder, DecoderError
from aeon_ddtree.engine.options import OptionsError
from aeon_ddtree.engine.windows import check_layers, layer_windows

pytestmark = pytest.mark.engine

WINDOW = 24
"""Longer than a block, and far shorter than the contexts below."""

KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
LENGTHS = (48, 9)


@pytest.fixture(scope="module")
def drafter(pair: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return patched_vllm.windowed_drafter(pair.drafter, tmp_path_factory.mktemp("drafter") / "windowed", WINDOW, KINDS)


def start(pair: Any, drafter: Path, **arguments: Any) -> Decoder:
    options = {"mode": "tree", "budget": 31, "commit": "branch"} | checks.COUPLED
    return Decoder(
        str(pair.target), str(drafter), options, num_speculative_tokens=31, threads=1, skip_mm_profiling=True,
        method="dflash_ddtree", **arguments,
    )  # fmt: skip


@pytest.fixture(scope="module")
def windowed(pair: Any, drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    with start(pair, drafter, python_path=str(patched_vllm.patched(tmp_path_factory.mktemp("vllm")))) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def truth(pair: Any, drafter: Path) -> checks.Truth:
    return checks.Truth.of(pair.target, drafter, [pair.prompts[i] for i in (0, 80)], LENGTHS)


@pytest.fixture(scope="module")
def done(windowed: Decoder, truth: checks.Truth) -> list[checks.Request]:
    return checks.record(
        windowed,
        truth.prompts,
        max_tokens=48,
        what=("state",),
        params={"temperature": 1.0, "seed": 3},
        options=checks.COUPLED,
    )


def test_logits_beyond_the_window(done: list[checks.Request], truth: checks.Truth) -> None:
    """Within one window of context and far beyond it, at every layer's own window, off-spine acceptances included."""
    contexts = [step["after"] for request in done for step in request.steps]
    assert min(contexts) < WINDOW < 2 * WINDOW < max(contexts)
    assert checks.off_spine(done) > 0
    assert [w is not None for w in truth.drafter.windows] == [kind == "sliding_attention" for kind in KINDS]
    assert checks.drafter_inputs(done, truth) >= 15


@pytest.mark.parametrize(
    "windows", [(None, None, None), (None, None, WINDOW), (WINDOW, WINDOW, WINDOW), (WINDOW + 1, None, WINDOW)]
)
def test_other_windows_give_other_logits(
    done: list[checks.Request], truth: checks.Truth, pair: Any, windows: tuple[int | None, ...]
) -> None:
    """No windows at all, as an unpatched vLLM has it; windows of other layers; a window off by one."""
    other = checks.ReferenceDrafter.from_pretrained(pair.drafter, truth.drafter.embedding, windows)
    with pytest.raises(AssertionError, match="draft logits differ"):
        checks.drafter_inputs(done, checks.Truth(truth.target, other, truth.prompts))


def test_what_the_patched_engine_runs(windowed: Decoder, truth: checks.Truth) -> None:
    """Pitfall: auxiliary layers shifted twice, or by nobody."""
    facts = windowed.rpc(patched_vllm.facts)
    after = [layer + 1 for layer in truth.drafter.config["dflash_config"]["target_layer_ids"]]
    assert not facts["vllm"].startswith(str(patched_vllm.installed()))
    assert facts["method"] == "dflash_ddtree"
    assert facts["windows"] == list(truth.drafter.windows)
    assert facts["specs"] == {"FullAttentionSpec"}
    assert facts["aux_layers"] == facts["aux_layers_of_vllm"] == after


def test_refused_without_the_patch(pair: Any, drafter: Path) -> None:
    """No silent full attention: the message names the patch and the context that needs none."""
    with pytest.raises(DecoderError, match=f"0001-dflash-sliding-window.*--max-model-len to {WINDOW}"):
        start(pair, drafter).ready()


# -- the same without an engine


def config(**changes: Any) -> SimpleNamespace:
    values = {"num_hidden_layers": 3, "layer_types": KINDS, "sliding_window": WINDOW, "use_sliding_window": True}
    return SimpleNamespace(**values | changes)


def test_windows_by_layer() -> None:
    assert layer_windows(config()) == (WINDOW, None, WINDOW)
    assert layer_windows(config(layer_types=None)) == (None, None, None)
    assert layer_windows(config(layer_types=["full_attention"] * 3, use_sliding_window=False)) == (None, None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sliding_window": False}, "use_sliding_window false"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"layer_types": KINDS[:2]}, "each of 3 layers"),
        ({"layer_types": ["chunked_attention", *KINDS[1:]]}, "chunked_attention"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        layer_windows(config(**changes))


def test_built_layers_are_checked() -> None:
    check_layers((WINDOW, None), (WINDOW, None), 1024)
    check_layers((WINDOW, None), (None, None), WINDOW)
    for found, context in (((None, None), WINDOW + 1), ((WINDOW - 1, None), WINDOW), ((WINDOW, WINDOW), 1024)):
        with pytest.raises(RuntimeError, match="was built with window"):
            check_layers((WINDOW, None), found, context)
