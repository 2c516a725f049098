# SPDX-License-Identifier: Apache-2.0
"""Committed state against transformers in fp64: KV, convolution window and recurrent state of every layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import step_checks as checks
from PIL import Image
from transformers import AutoProcessor

from aeon_ddtree.engine.decoder import Decoder

pytest_plugins = ["step_fixtures"]
pytestmark = pytest.mark.engine


def test_oracle_reproduces_plain_decoding(plain: Decoder, truth: checks.Truth) -> None:
    """The control for everything below: on a chain the truth says what plain decoding says."""
    done = checks.record(plain, truth.prompts, max_tokens=24, what=("logits", "state"))
    assert checks.target_state(done, truth) == 3 * 24
    for request in done:
        run, _ = truth.target.run(request.tokens)
        for step in request.steps:
            expected = run.logits[step["after"] - 1].numpy()
            assert abs(step["logits"][-1] - expected).max() <= checks.LOGITS
            assert expected.max() - expected[request.tokens[step["after"]]] <= 2 * checks.LOGITS


@pytest.mark.parametrize("commit", ["branch", "flat"])
def test_state_after_every_commit(tree: Decoder, plain: Decoder, truth: checks.Truth, commit: str) -> None:
    """Random trees whose right paths run through branches: more than 50 steps of two requests."""
    prompts = truth.prompts[:2]
    outputs = checks.plain_outputs(plain, truth.prompts)[:2]
    done = checks.record(
        tree,
        prompts,
        max_tokens=128 if commit == "branch" else 96,
        what=("state",),
        guide=outputs,
        reach=3,
        options={"commit": commit},
        seed=4,
    )
    assert min(len(request.steps) for request in done) >= 50
    assert tree.stats()["off_spine"] >= 50
    assert (checks.off_spine(done) >= 50) == (commit == "branch")
    for request, output in zip(done, outputs):
        assert request.output[:80] == output[:80]
    checks.own_trees(done)
    assert checks.target_state(done, truth) >= 100


@pytest.mark.parametrize("commit", ["branch", "flat"])
def test_state_with_drafted_trees(tree: Decoder, truth: checks.Truth, commit: str) -> None:
    """The drafter's own trees at T = 1, three requests of different lengths, two of them arriving mid-decode."""
    done = checks.record(
        tree,
        truth.prompts,
        max_tokens=32,
        what=("state",),
        params={"temperature": 1.0, "seed": 11},
        options=checks.COUPLED | {"commit": commit},
    )
    assert tree.stats()["off_spine"] > 0
    checks.own_trees(done)
    assert checks.target_state(done, truth) >= 12


def test_state_when_tokens_are_scarce(small: Decoder, plain: Decoder, truth: checks.Truth) -> None:
    """Fewer tokens a step than requests x W: prompts come in pieces beside trees, and windows are cut short."""
    code, single, arithmetic = truth.prompts
    prompts = (arithmetic, code + arithmetic, single)
    guide = checks.plain_outputs(plain, prompts, 48)
    done = checks.record(small, prompts, max_tokens=24, what=("state",), guide=guide, seed=9)
    assert any(not step["ends_prompt"] for request in done for step in request.steps), "no prompt came in pieces"
    assert len({len(step["tree"]["token"]) for request in done for step in request.trees}) > 1, "no window was cut"
    checks.own_trees(done)
    checks.target_state(done, truth)
    checks.drafter_inputs(done, truth)


def test_state_after_a_picture(tree: Decoder, truth: checks.Truth, pair: Any) -> None:
    """Keys stand at M-RoPE positions, which are no count of tokens; the drafter goes on counting tokens."""
    noise = np.random.default_rng(1).integers(0, 256, (4, 12, 3), dtype=np.uint8)
    picture = Image.fromarray(noise).resize((192, 64))
    text = "<|vision_start|><|image_pad|><|vision_end|>" + pair.prompts[80][:60]
    done = checks.record(
        tree,
        [{"prompt": text, "multi_modal_data": {"image": [picture]}}, truth.prompts[0]],
        max_tokens=24,
        what=("state",),
        params={"temperature": 1.0, "seed": 13},
        options=checks.COUPLED,
    )
    assert checks.off_spine(done[:1]) > 0
    inputs = AutoProcessor.from_pretrained(pair.target)(text=[text], images=[picture], return_tensors="pt")
    assert inputs.pop("input_ids").tolist() == [done[0].prompt]
    assert inputs.pop("attention_mask").all()
    assert "mm_token_type_ids" in inputs
    done[0].inputs = dict(inputs)
    checks.target_state(done, truth)
    checks.drafter_inputs(done, truth)


def test_padding_is_never_committed(tree: Decoder, truth: checks.Truth) -> None:
    """Windows filled in part, and a target that always says token 0, which padding carries."""
    done = checks.padded_windows(tree, truth, max_tokens=24)
    checks.own_trees(done)
    checks.target_state(done, truth)


def test_every_request_verifies_its_own_tree(tree: Decoder, plain: Decoder, truth: checks.Truth) -> None:
    outputs = checks.plain_outputs(plain, truth.prompts)
    done = checks.record(tree, truth.prompts, max_tokens=24, what=(), guide=outputs, padded=True, seed=5)
    checks.own_trees(done)
