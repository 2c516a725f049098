# SPDX-License-Identifier: Apache-2.0
"""The drafter inside vLLM against one in plain PyTorch, fp64, fed with the target's hidden states of the committed tokens."""

from __future__ import annotations

import pytest
import step_checks as checks

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("commit", ["branch", "flat"])
def test_drafter_context_and_logits(commit: str) -> None:
    """After every step, off-spine acceptances included: K/V of every drafter layer, and the logits of all k positions."""
    checks.engine().stats(reset=True)
    done = checks.record(
        checks.engine(), checks.prompts(), max_tokens=24, what=("state",), guide=checks.plain_outputs(128),
        options={"commit": commit}, seed=7,
    )  # fmt: skip
    assert checks.engine().stats()["off_spine"] > 0
    assert checks.drafter_inputs(done) >= 20


def test_drafter_after_its_own_trees() -> None:
    done = checks.record(
        checks.engine(), checks.prompts(), max_tokens=16, what=("state",),
        params={"temperature": 1.0, "seed": 3}, options=checks.COUPLED,
    )  # fmt: skip
    assert checks.off_spine(done) > 0
    assert checks.drafter_inputs(done) >= 12


def test_budget_leaves_the_drafter_alone() -> None:
    """The same context gives the same k distributions in an engine whose budget is below the horizon."""
    budget = 6
    assert budget < checks.drafter().horizon < checks.BUDGET
    drafted = []
    for decoder in (checks.engine(budget), checks.engine()):
        done = checks.record(
            decoder, checks.prompts(), max_tokens=12, what=("state",), guide=checks.plain_outputs(128), reach=0
        )
        drafted.append(
            {(i, step["draft_context"]): step["draft_logits"] for i, request in enumerate(done) for step in request.steps}
        )
    narrow, wide = drafted
    assert narrow.keys() == wide.keys()
    assert len(narrow) >= 3 * 12
    for place, logits in narrow.items():
        assert logits.shape == (checks.drafter().horizon, checks.target().config.vocab_size)
        assert abs(logits - wide[place]).max() <= 1e-5, f"request {place[0]} with {place[1]} tokens of context"
