# SPDX-License-Identifier: Apache-2.0
"""Every fault known from other implementations, planted alone, turns a named test red: its check fails with the fault
in the engine and holds as soon as it is taken out."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import step_checks as checks
import step_faults

from aeon_ddtree.engine.decoder import Decoder

pytest_plugins = ["step_fixtures"]
pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Case:
    """test: the one that turns red; check: what it asserts; complaint: what it must say of the fault, as a pattern."""

    test: str
    check: Callable[[list[checks.Request], checks.Truth], object]
    complaint: str


def _node_logits(done: list[checks.Request], truth: checks.Truth) -> None:
    checks.node_logits(done, checks.replay_fp64(truth))


def _own_trees(done: list[checks.Request], truth: checks.Truth) -> None:
    checks.own_trees(done)


# Never row 0: under each of these faults the root is still right.
LOGITS = Case("test_logits.test_rows_of_random_trees", _node_logits, "logits of row [1-9][0-9]* at depth")
DRAFTER = "test_drafter.test_drafter_context_and_logits"
STATE = "test_state.test_state_after_every_commit"
PADDING = "test_state.test_padding_is_never_committed"

CASES = {
    "sibling_visible": LOGITS,
    "neighbours_state": LOGITS,
    "flat_convolution": LOGITS,
    "position_by_row": LOGITS,
    "shapes_swapped": LOGITS,
    "layer_not_folded": Case(STATE, checks.target_state, "recurrent of layer 0 differs"),
    "root_not_folded": Case(STATE, checks.target_state, "recurrent of layer [0-6] differs"),
    "window_of_prefix": Case(STATE, checks.target_state, "window of layer 0 differs"),
    "kv_not_moved": Case(STATE, checks.target_state, "key of layer 3 differs"),
    "one_kv_layer_not_moved": Case(STATE, checks.target_state, "key of layer 7 differs"),
    "padding_acceptable": Case(PADDING, checks.target_state, "committed, path .* differs"),
    "trees_swapped": Case("test_state.test_every_request_verifies_its_own_tree", _own_trees, "drafted"),
    "bonus_as_accepted": Case(DRAFTER, checks.drafter_inputs, "the block starts at"),
    "hidden_states_by_prefix": Case(DRAFTER, checks.drafter_inputs, "drafter's key of layer 0 differs"),
}


def test_every_fault_has_its_test() -> None:
    assert set(CASES) == set(step_faults.PLANTS)
    for case in CASES.values():
        module, name = case.test.split(".")
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("fault", CASES)
def test_fault_turns_its_test_red(tree: Decoder, plain: Decoder, truth: checks.Truth, fault: str) -> None:
    case = CASES[fault]
    outputs = checks.plain_outputs(plain, truth.prompts)

    def decode(planted: str | None) -> list[checks.Request]:
        if case.test == PADDING:
            return checks.padded_windows(tree, truth, max_tokens=8, fault=planted)
        return checks.record(
            tree, truth.prompts, max_tokens=8, what=("logits", "state"), guide=outputs, seed=8, fault=planted
        )

    with pytest.raises(AssertionError, match=case.complaint):
        case.check(decode(fault), truth)
    case.check(decode(None), truth)
