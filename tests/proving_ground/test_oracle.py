# SPDX-License-Identifier: Apache-2.0
"""The oracle reproduces plain decoding on a chain: whole prefill, pieces and single tokens agree to fp64 rounding."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3_5ForConditionalGeneration

from aeon_ddtree.proving_ground.oracle import LayerState, Oracle
from aeon_ddtree.proving_ground.pair import TARGET_DIR
from aeon_ddtree.proving_ground.train import architecture as arch

TOKENS = torch.randint(0, arch.FIRST_SPECIAL, (75,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(TARGET_DIR)


def same(a: LayerState, b: LayerState) -> None:
    assert a.kind == b.kind
    for name in ("key", "value", "conv", "state"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None)
        if x is not None:
            assert x.dtype == y.dtype == torch.float64
            torch.testing.assert_close(x, y, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("pieces", [[1] * 75, [1, 2, 3, 64, 5], [70, 1, 4]])
def test_pieces_equal_the_whole(oracle: Oracle, pieces: list[int]) -> None:
    whole, _ = oracle.run(TOKENS)
    past, at, logits = None, 0, []
    for size in pieces:
        part, past = oracle.run(TOKENS[at : at + size], past)
        logits.append(part.logits)
        at += size
    torch.testing.assert_close(torch.cat(logits), whole.logits, atol=1e-9, rtol=1e-9)
    for a, b in zip(part.layers, whole.layers, strict=True):
        same(a, b)


def test_layers_and_shapes(oracle: Oracle) -> None:
    run, _ = oracle.run(TOKENS[:10])
    assert [s.kind for s in run.layers] == arch.LAYER_TYPES
    assert run.layers[3].key.shape == (10, 2, 64)
    assert run.layers[0].conv.shape == (4, 1024)
    assert run.layers[0].state.shape == (8, 64, 64)
    assert run.hidden.shape == (9, 10, 256) and run.logits.dtype == torch.float64


@torch.no_grad()
def test_agrees_with_transformers_in_fp32(oracle: Oracle) -> None:
    plain = Qwen3_5ForConditionalGeneration.from_pretrained(TARGET_DIR, dtype=torch.float32).eval()
    expected = plain(torch.tensor([TOKENS]), use_cache=True)
    run, _ = oracle.run(TOKENS)
    torch.testing.assert_close(run.logits.float(), expected.logits[0], atol=2e-3, rtol=1e-4)
    for ours, theirs in zip(run.layers, expected.past_key_values.layers, strict=True):
        if ours.kind == "full_attention":
            torch.testing.assert_close(ours.key.float(), theirs.keys[0].transpose(0, 1), atol=2e-3, rtol=1e-3)
        else:
            torch.testing.assert_close(ours.conv.T.float(), theirs.conv_states[0], atol=2e-3, rtol=1e-3)
            torch.testing.assert_close(ours.state.float(), theirs.recurrent_states[0], atol=2e-3, rtol=1e-3)


def test_greedy_is_the_argmax_of_replayed_prefixes(oracle: Oracle) -> None:
    out = oracle.greedy(TOKENS[:20], 8)
    for i in range(8):
        run, _ = oracle.run(TOKENS[:20] + out[:i])
        assert int(run.logits[-1].argmax()) == out[i]
