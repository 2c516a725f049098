# SPDX-License-Identifier: Apache-2.0
"""The training form of the target is the checkpoint's model: transformers and its own decoding say the same."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3_5ForConditionalGeneration

from aeon_ddtree.proving_ground.pair import TARGET_DIR
from aeon_ddtree.proving_ground.train import architecture as arch
from aeon_ddtree.proving_ground.train import gated_delta
from aeon_ddtree.proving_ground.train.checkpoint import load_target
from aeon_ddtree.proving_ground.train.decoding import generate


@pytest.fixture(scope="module")
def models():
    theirs = Qwen3_5ForConditionalGeneration.from_pretrained(TARGET_DIR, dtype=torch.float32).eval()
    return theirs, load_target(TARGET_DIR)


@torch.no_grad()
def test_prefill_equals_transformers(models) -> None:
    theirs, ours = models
    ids = torch.randint(0, arch.FIRST_SPECIAL, (2, 150), generator=torch.Generator().manual_seed(1))
    expected = theirs(ids, output_hidden_states=True)
    hidden, features = ours(ids, features=True)
    torch.testing.assert_close(ours.logits(hidden), expected.logits, atol=2e-3, rtol=1e-4)
    wanted = torch.cat([expected.hidden_states[i + 1] for i in arch.TARGET_LAYER_IDS], -1)
    torch.testing.assert_close(features, wanted, atol=2e-3, rtol=1e-4)


@torch.no_grad()
def test_decoding_equals_prefill(models) -> None:
    ours = models[1]
    ids = torch.randint(0, arch.FIRST_SPECIAL, (2, 70), generator=torch.Generator().manual_seed(2))
    caches = ours.new_cache(2, 70)
    for i in range(70):
        logits = ours.decode(ids[:, i], caches, torch.tensor([i]))
    torch.testing.assert_close(logits, ours.logits(ours(ids)[0][:, -1]), atol=2e-3, rtol=1e-4)


@torch.no_grad()
def test_generation_of_unequal_prompts_is_greedy(models) -> None:
    ours = models[1]
    prompts = torch.randint(0, arch.FIRST_SPECIAL, (2, 9), generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([4, 9])
    out = generate(ours, prompts, lengths, 6, torch.zeros(2, dtype=torch.bool))
    for row, length in enumerate(lengths.tolist()):
        assert out[row, :length].tolist() == prompts[row, :length].tolist()
        for end in range(length, length + 6):
            assert out[row, end] == ours.logits(ours(out[row : row + 1, :end])[0][:, -1]).argmax()


def test_chunked_rule_equals_token_by_token() -> None:
    g = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, 131, 3, 16, generator=g) for _ in range(3))
    q, k = gated_delta.unit_norm(q) / 4, gated_delta.unit_norm(k)
    decay, beta = -torch.rand(2, 131, 3, generator=g), torch.rand(2, 131, 3, generator=g)
    state = torch.zeros(2, 3, 16, 16)
    expected = torch.stack(
        [gated_delta.step(state, q[:, t], k[:, t], v[:, t], decay[:, t], beta[:, t]) for t in range(131)], 1
    )
    torch.testing.assert_close(gated_delta.chunked(q, k, v, decay, beta, torch.float32), expected, atol=1e-5, rtol=1e-4)
