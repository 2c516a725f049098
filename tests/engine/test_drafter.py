# SPDX-License-Identifier: Apache-2.0
"""The drafter that vLLM runs against one in plain PyTorch, fp64, fed with the hidden states of the committed tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import step_checks as checks

from aeon_ddtree.engine.decoder import Decoder

pytest_plugins = ["step_fixtures"]
pytestmark = pytest.mark.engine

NARROW = 6
"""A budget below the horizon; that of the fixture `tree` is above it."""


@pytest.fixture(scope="module")
def narrow(pair: Any) -> Iterator[Decoder]:
    options = {"mode": "tree", "budget": NARROW, "commit": "branch"}
    with Decoder(
        str(pair.target), str(pair.drafter), options, num_speculative_tokens=NARROW, threads=1, skip_mm_profiling=True
    ) as decoder:
        yield decoder


@pytest.mark.parametrize("commit", ["branch", "flat"])
def test_drafter_context_and_logits(tree: Decoder, plain: Decoder, truth: checks.Truth, commit: str) -> None:
    """After every step, off-spine acceptances included: K/V of every drafter layer, logits of all k positions."""
    outputs = checks.plain_outputs(plain, truth.prompts)
    done = checks.record(
        tree, truth.prompts, max_tokens=24, what=("state",), guide=outputs, options={"commit": commit}, seed=7
    )
    assert tree.stats()["off_spine"] > 0
    assert (checks.off_spine(done) > 0) == (commit == "branch")
    assert checks.drafter_inputs(done, truth) >= 20


def test_drafter_after_its_own_trees(tree: Decoder, truth: checks.Truth) -> None:
    done = checks.record(
        tree,
        truth.prompts,
        max_tokens=32,
        what=("state",),
        params={"temperature": 1.0, "seed": 3},
        options=checks.COUPLED,
    )
    assert checks.off_spine(done) > 0
    assert checks.drafter_inputs(done, truth) >= 12


def test_budget_leaves_the_drafter_alone(tree: Decoder, narrow: Decoder, plain: Decoder, truth: checks.Truth) -> None:
    """The same context gives the same k distributions, whatever the budget."""
    outputs = checks.plain_outputs(plain, truth.prompts)
    drafted = []
    for decoder in (narrow, tree):
        done = checks.record(decoder, truth.prompts, max_tokens=12, what=("state",), guide=outputs, reach=0)
        windows = {len(step["tree"]["token"]) for request in done for step in request.trees}
        drafted.append(
            {
                (i, step["draft_context"]): step["draft_logits"]
                for i, request in enumerate(done)
                for step in request.steps
            }
        )
        assert len(windows) == 1
        assert (windows.pop() - 1 < truth.drafter.block - 1) == (decoder is narrow)
    assert drafted[0].keys() == drafted[1].keys()
    assert len(drafted[0]) == 3 * 12
    for place, logits in drafted[0].items():
        assert logits.shape == (truth.drafter.block - 1, truth.drafter.config["vocab_size"])
        assert abs(logits - drafted[1][place]).max() <= checks.LOGITS, f"request {place[0]}, context {place[1]}"
