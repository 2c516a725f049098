# SPDX-License-Identifier: Apache-2.0
"""Every verified row's logits are those of its path replayed alone: by transformers in fp64 and by plain decoding."""

from __future__ import annotations

import pytest
import step_checks as checks

pytestmark = pytest.mark.engine


def test_rows_of_random_trees() -> None:
    """Random shapes, three requests of different lengths, paths through branches committed in between."""
    done = checks.record(
        checks.engine(), checks.prompts(), max_tokens=12, what=("logits",), guide=checks.plain_outputs(128), seed=1
    )
    assert checks.off_spine(done) > 0
    assert checks.node_logits(done) >= 100
    assert checks.node_logits(done, checks.replay_plain, every=3) >= 40


@pytest.mark.parametrize("commit", ["branch", "flat"])
def test_rows_of_drafted_trees(commit: str) -> None:
    done = checks.record(
        checks.engine(),
        checks.prompts(),
        max_tokens=12,
        what=("logits",),
        params={"temperature": 1.0, "seed": 5},
        options=checks.COUPLED | {"commit": commit},
    )
    parents = [step["tree"]["parent"] for request in done for step in request.trees]
    assert any(parent != list(range(-1, len(parent) - 1)) for parent in parents), "no tree branched"
    assert checks.node_logits(done, every=2) >= 100
    assert checks.node_logits(done, checks.replay_plain, every=6) >= 40


def test_rows_of_chains() -> None:
    """The control that cannot be wrong: one candidate per position."""
    done = checks.record(checks.engine(), checks.prompts(), max_tokens=8, what=("logits",), options={"top_k": 1})
    for request in done:
        for step in request.trees:
            assert step["tree"]["parent"] == list(range(-1, checks.drafter().horizon))
    assert checks.node_logits(done, every=2) >= 100


def test_roots_need_no_tree() -> None:
    """The root row of every window equals what plain decoding computes after the same tokens, one token at a time."""
    plain = checks.record(checks.engine(None), checks.prompts(), max_tokens=16, what=("logits",))
    tree = checks.record(
        checks.engine(), checks.prompts(), max_tokens=16, what=("logits",), guide=checks.plain_outputs(128), seed=2
    )
    compared = 0
    for expected, found in zip(plain, tree):
        by_length = {step["before"] + step["rows"]: step["logits"][-1] for step in expected.steps}
        for step in found.trees:
            if step["before"] + 1 in by_length:
                assert abs(step["logits"][0] - by_length[step["before"] + 1]).max() <= checks.LOGITS
                compared += 1
    assert compared >= 12
