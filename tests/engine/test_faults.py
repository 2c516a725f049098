# SPDX-License-Identifier: Apache-2.0
"""Every fault known from other implementations, planted alone, turns a named test red: its check fails with the fault
in the engine and holds as soon as it is taken out."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import step_checks as checks
import step_faults

pytestmark = pytest.mark.engine

Requests = Sequence[checks.Request]


@dataclass(frozen=True)
class Case:
    """The test that turns red, its check, what the check must complain of, and the recording it is shown."""

    test: str
    check: Callable[[Requests], Any]
    complaint: str
    decode: Callable[[str | None], Requests]


def _random_trees(fault: str | None) -> Requests:
    return checks.record(
        checks.engine(), checks.prompts(), max_tokens=8, what=("logits", "state"), guide=checks.plain_outputs(128),
        seed=8, fault=fault,
    )  # fmt: skip


def _padded_windows(fault: str | None) -> Requests:
    return checks.padded_windows(max_tokens=8, fault=fault)


LOGITS = "logits of row [1-9][0-9]* at depth"
"""Never row 0: the root's logits hold under every fault of the tree."""

LOGITS_TEST = "test_logits.test_rows_of_random_trees"
DRAFTER_TEST = "test_drafter.test_drafter_context_and_logits"

CASES = {
    "sibling_visible": Case(LOGITS_TEST, checks.node_logits, LOGITS, _random_trees),
    "neighbours_state": Case(LOGITS_TEST, checks.node_logits, LOGITS, _random_trees),
    "flat_convolution": Case(LOGITS_TEST, checks.node_logits, LOGITS, _random_trees),
    "position_by_row": Case(LOGITS_TEST, checks.node_logits, LOGITS, _random_trees),
    "shapes_swapped": Case(LOGITS_TEST, checks.node_logits, LOGITS, _random_trees),
    "layer_not_folded": Case(
        "test_state.test_state_after_every_commit", checks.target_state, "recurrent of layer 0 differs", _random_trees
    ),
    "padding_acceptable": Case(
        "test_state.test_padding_is_never_committed", checks.target_state, "committed, path .* differs", _padded_windows
    ),
    "trees_swapped": Case(
        "test_state.test_every_request_verifies_its_own_tree", checks.own_trees, "drafted", _random_trees
    ),
    "bonus_as_accepted": Case(DRAFTER_TEST, checks.drafter_inputs, "the block starts at", _random_trees),
    "hidden_states_by_prefix": Case(DRAFTER_TEST, checks.drafter_inputs, "drafter's key of layer 0 differs", _random_trees),
}


def test_every_fault_has_its_test() -> None:
    assert set(CASES) == set(step_faults.PLANTS)
    for case in CASES.values():
        module, name = case.test.split(".")
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("fault", CASES)
def test_fault_turns_its_test_red(fault: str) -> None:
    case = CASES[fault]
    with pytest.raises(AssertionError, match=case.complaint):
        case.check(case.decode(fault))
    case.check(case.decode(None))
