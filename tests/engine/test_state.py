# SPDX-License-Identifier: Apache-2.0
"""Committed state against transformers in fp64: KV, convolution window and recurrent state of every layer."""

from __future__ import annotations

import pytest
import step_checks as checks

pytestmark = pytest.mark.engine


def test_oracle_reproduces_plain_decoding() -> None:
    """The control for everything below: on a chain the truth says what plain decoding says."""
    done = checks.record(checks.engine(None), checks.prompts(), max_tokens=24, what=("logits", "state"))
    assert checks.target_state(done) >= 3 * 24
    for request in done:
        (truth,) = checks.replay_fp64([request.tokens])
        for step in request.steps:
            expected = truth[step["after"] - 1]
            assert abs(step["logits"][-1] - expected).max() <= checks.LOGITS
            assert expected.max() - expected[request.tokens[step["after"]]] <= 2 * checks.LOGITS


@pytest.mark.parametrize("commit", ["branch", "flat"])
def test_state_after_every_commit(commit: str) -> None:
    """Random trees whose accepted paths run through branches, more than 50 steps of two requests."""
    prompts, outputs = checks.prompts()[:2], checks.plain_outputs(128)[:2]
    done = checks.record(
        checks.engine(), prompts, max_tokens=120 if commit == "branch" else 80, what=("state",), guide=outputs,
        options={"commit": commit}, seed=3,
    )  # fmt: skip
    assert all(len(request.steps) >= 50 for request in done)
    if commit == "branch":
        assert checks.off_spine(done) >= 50
    else:
        assert checks.engine().stats()["off_spine"] >= 50
    for request, output in zip(done, outputs):
        assert request.tokens[len(request.prompt) :][: len(output)] == output[: len(request.tokens) - len(request.prompt)]
    checks.own_trees(done)
    assert checks.target_state(done) >= 100


@pytest.mark.parametrize("commit", ["branch", "flat"])
def test_state_with_drafted_trees(commit: str) -> None:
    """The drafter's own trees at T = 1, two requests of different lengths beside a prompt that arrives later."""
    checks.engine().stats(reset=True)
    done = checks.record(
        checks.engine(), checks.prompts(), max_tokens=20, what=("state",),
        params={"temperature": 1.0, "seed": 11}, options=checks.COUPLED | {"commit": commit},
    )  # fmt: skip
    assert checks.engine().stats()["off_spine"] > 0
    checks.own_trees(done)
    checks.target_state(done)


def test_padding_is_never_committed() -> None:
    """Windows filled in part, and a target that always says token 0, which padding carries."""
    checks.target_state(checks.padded_windows(max_tokens=24))


def test_every_request_verifies_its_own_tree() -> None:
    done = checks.record(
        checks.engine(), checks.prompts(), max_tokens=16, what=(), guide=checks.plain_outputs(128), padded=True, seed=4
    )
    checks.own_trees(done)
