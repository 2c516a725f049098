# SPDX-License-Identifier: Apache-2.0
"""TreePolicy: what it takes, what it refuses, and what it says then."""

import subprocess
import sys

import pytest

from aeon_ddtree.tree import TOPOLOGIES, TreePolicy


def test_horizon_and_budget_are_separate():
    policy = TreePolicy.from_options({"budget": 31}, horizon=15)
    assert (policy.horizon, policy.budget, policy.width, policy.max_path) == (15, 31, 32, 16)
    assert policy.spine_nodes == 15
    assert TreePolicy(horizon=15, budget=7).spine_nodes == 7


@pytest.mark.parametrize(("word", "nodes"), [("full", 15), ("none", 0), (3, 3)])
def test_spine_words(word, nodes):
    assert TreePolicy.from_options({"budget": 31, "spine": word}, horizon=15).spine_nodes == nodes


def test_root_leaves_spine_is_what_is_left():
    policy = TreePolicy.from_options({"budget": 15, "topology": "root_leaves", "root_leaves": 4}, horizon=15)
    assert policy.spine_nodes == 11


def test_the_horizon_is_no_option():
    assert "horizon" not in TreePolicy.option_names()
    with pytest.raises(ValueError, match="unknown tree option 'horizon'"):
        TreePolicy.from_options({"budget": 7, "horizon": 3}, horizon=15)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 0}, "1 .. 127"),
        ({"budget": 128}, "1 .. 127"),
        ({"budget": True}, "whole number"),
        ({"budget": 7.5}, "whole number"),
        ({}, "budget is missing"),
        ({"budget": 7, "top_k": 0}, "top_k=0: expected >= 1"),
        ({"budget": 7, "topk": 4}, "did you mean 'top_k'"),
        ({"budget": 7, "spine": 8}, "expected 0 .. 7"),
        ({"budget": 31, "spine": 16}, "expected 0 .. 15"),
        ({"budget": 31, "spine": "all"}, "'full' or 'none'"),
        ({"budget": 7, "topology": "best-first"}, "did you mean 'best_first'"),
        ({"budget": 7, "ranking": "coupeld"}, "did you mean 'coupled'"),
        ({"budget": 7, "tau": 0.0}, "(0, 1]"),
        ({"budget": 7, "tau": "0.5"}, "expected a number"),
        ({"budget": 7, "mix": 1.5}, "[0, 1]"),
        ({"budget": 7, "softness": 0}, "softness=0: expected > 0"),
        ({"budget": 7, "root_leaves": 2}, "topology=root_leaves"),
        ({"budget": 31, "topology": "root_leaves", "root_leaves": 4}, "budget <= 19"),
        ({"budget": 7, "topology": "root_leaves", "root_leaves": 7}, "1 .. budget - 1"),
        ({"budget": 15, "topology": "root_leaves", "root_leaves": 4, "top_k": 4}, "top_k >= 5"),
        ({"budget": 15, "topology": "root_leaves", "root_leaves": 4, "spine": 3}, "leave spine out"),
        ({"budget": 31, "top_k": 1}, "budget <= 15"),
    ],
)
def test_refusals_say_what_is_possible(options, said):
    with pytest.raises(ValueError) as error:
        TreePolicy.from_options(options, horizon=15)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_horizon_must_be_positive():
    with pytest.raises(ValueError, match="block size minus 1"):
        TreePolicy(horizon=0, budget=4)


def test_policy_loads_no_torch():
    code = "import sys, aeon_ddtree.tree.policy as p; p.TreePolicy(15, 31); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_topology_is_one_function_and_one_line(monkeypatch):
    monkeypatch.setitem(TOPOLOGIES, "mine", "aeon_ddtree.tree.building:best_first")
    assert TreePolicy(horizon=3, budget=4, topology="mine").topology == "mine"
