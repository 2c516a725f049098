# SPDX-License-Identifier: Apache-2.0
"""The reference drafter against the batched training form, and what a block may and may not see."""

from __future__ import annotations

import json

import pytest
import torch

from aeon_ddtree.proving_ground.pair import DRAFTER_DIR, TARGET_DIR
from aeon_ddtree.proving_ground.reference_drafter import ReferenceDrafter
from aeon_ddtree.proving_ground.train import architecture as arch
from aeon_ddtree.proving_ground.train.checkpoint import load_drafter, load_target

LENGTH = 60


@pytest.fixture(scope="module")
def setting():
    target = load_target(TARGET_DIR)
    tokens = torch.randint(0, arch.FIRST_SPECIAL, (1, LENGTH), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        features = target(tokens, features=True)[1]
    return target.embed_tokens.weight.detach(), tokens, features


@torch.no_grad()
@pytest.mark.parametrize("anchor", [0, 1, 17, 44])
def test_equals_the_training_form(setting, anchor: int) -> None:
    embedding, tokens, features = setting
    hidden = load_drafter(DRAFTER_DIR)(tokens, features, torch.tensor([[anchor, 30]]), embedding)
    expected = hidden[0, 0] @ embedding.T
    reference = ReferenceDrafter.from_pretrained(DRAFTER_DIR, embedding)
    got = reference.logits(features[0, :anchor], torch.arange(anchor), int(tokens[0, anchor]), anchor)
    assert got.shape == (15, arch.VOCAB_SIZE)
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=1e-4)


@torch.no_grad()
def test_fp64_is_close_to_fp32(setting) -> None:
    embedding, tokens, features = setting
    single = ReferenceDrafter.from_pretrained(DRAFTER_DIR, embedding)
    double = ReferenceDrafter.from_pretrained(DRAFTER_DIR, embedding.double())
    arguments = (torch.arange(40), int(tokens[0, 40]))
    a, b = single.logits(features[0, :40], *arguments), double.logits(features[0, :40], *arguments)
    assert b.dtype == torch.float64
    torch.testing.assert_close(a.double(), b, atol=2e-3, rtol=1e-4)


@torch.no_grad()
def test_depends_on_every_context_token_and_on_the_bonus(setting) -> None:
    embedding, tokens, features = setting
    reference = ReferenceDrafter.from_pretrained(DRAFTER_DIR, embedding)
    base = reference.logits(features[0, :20], torch.arange(20), int(tokens[0, 20]))
    for i in (0, 10, 19):
        changed = features[0, :20].clone()
        changed[i] = changed[i].flip(0)
        assert (reference.logits(changed, torch.arange(20), int(tokens[0, 20])) - base).abs().max() > 1e-4
    other = (int(tokens[0, 20]) + 1) % arch.FIRST_SPECIAL
    assert (reference.logits(features[0, :20], torch.arange(20), other) - base).abs().max() > 1e-2


def test_wrong_target_is_refused(setting) -> None:
    with pytest.raises(ValueError, match="target embedding"):
        ReferenceDrafter.from_pretrained(DRAFTER_DIR, setting[0][:, :128])


def test_config_follows_the_reference_conventions() -> None:
    config = json.loads((DRAFTER_DIR / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 16
    assert 0 <= config["dflash_config"]["mask_token_id"] < config["vocab_size"]
    assert max(config["dflash_config"]["target_layer_ids"]) < config["num_target_layers"]
