# SPDX-License-Identifier: Apache-2.0
"""Every verified row's logits are those of its path replayed alone: by transformers in fp64 and by plain decoding."""

from __future__ import annotations

import pytest
import step_checks as checks

from aeon_ddtree.engine.decoder import Decoder

pytest_plugins = ["step_fixtures"]
pytestmark = pytest.mark.engine


def test_rows_of_random_trees(tree: Decoder, plain: Decoder, truth: checks.Truth) -> None:
    """Random shapes, three requests of different lengths, paths through branches committed in between."""
    done = checks.record(
        tree, truth.prompts, max_tokens=12, what=("logits",), guide=checks.plain_outputs(plain, truth.prompts), seed=1
    )
    assert checks.off_spine(done) > 0
    assert checks.node_logits(done, checks.replay_fp64(truth)) >= 100
    assert checks.node_logits(done, checks.replay_plain(plain), every=4) >= 40


@pytest.mark.parametrize("commit", ["branch", "flat"])
def test_rows_of_drafted_trees(tree: Decoder, plain: Decoder, truth: checks.Truth, commit: str) -> None:
    done = checks.record(
        tree,
        truth.prompts,
        max_tokens=24,
        what=("logits",),
        params={"temperature": 1.0, "seed": 5},
        options=checks.COUPLED | {"commit": commit},
    )
    parents = [step["tree"]["parent"] for request in done for step in request.trees]
    assert all(parent != list(range(-1, len(parent) - 1)) for parent in parents), "a tree did not branch"
    assert checks.node_logits(done, checks.replay_fp64(truth), every=4) >= 100
    assert checks.node_logits(done, checks.replay_plain(plain), every=8) >= 40


def test_rows_of_chains(tree: Decoder, plain: Decoder, truth: checks.Truth) -> None:
    """The control that cannot be wrong: every node's parent is the row before."""
    outputs = checks.plain_outputs(plain, truth.prompts)
    done = checks.record(tree, truth.prompts, max_tokens=12, what=("logits",), guide=outputs, chains=True, seed=2)
    for request in done:
        for step in request.trees:
            assert step["tree"]["parent"] == list(range(-1, truth.drafter.block - 1))
    assert checks.node_logits(done, checks.replay_fp64(truth)) >= 100
    assert checks.node_logits(done, checks.replay_plain(plain), every=4) >= 40


def test_roots_need_no_tree(tree: Decoder, plain: Decoder, truth: checks.Truth) -> None:
    """The root row of every window equals what plain decoding computes after the same tokens, one token at a time."""
    outputs = checks.plain_outputs(plain, truth.prompts)
    plainly = checks.record(plain, truth.prompts, max_tokens=20, what=("logits",))
    treewise = checks.record(tree, truth.prompts, max_tokens=20, what=("logits",), guide=outputs, seed=3)
    compared = 0
    for expected, found in zip(plainly, treewise):
        last_row = {step["before"] + step["rows"]: step["logits"][-1] for step in expected.steps}
        for step in found.trees:
            length = step["before"] + 1
            if length in last_row:
                assert abs(step["logits"][0] - last_row[length]).max() <= checks.LOGITS, f"{length} tokens"
                compared += 1
    assert compared >= 12
