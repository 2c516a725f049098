# SPDX-License-Identifier: Apache-2.0
"""Both commit policies against brute force; cutting; what is carried."""

import random
from types import SimpleNamespace

import pytest
import torch
import tree_oracles as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from aeon_ddtree.commit import branch_plan, flat_plan, gather_rows, plan_for
from aeon_ddtree.verify import path_logits, walk

VOCAB, HORIZON = 5, 9
P = HORIZON + 1


def walked(seed: int, budget: int, requests: int = 4):
    rng = random.Random(seed)
    trees, samples = [], []
    for _ in range(requests):
        tree = oracle.random_tree(rng, rng.randint(0, budget), VOCAB, HORIZON)
        sampled = [rng.randrange(VOCAB) for _ in range(budget + 1)]
        for row in range(tree.num_nodes + 1):
            children = [i for i in range(1, tree.num_nodes + 1) if tree.parent[i] == row]
            if children and rng.random() < 0.85:
                sampled[row] = tree.token[rng.choice(children)]
        trees.append(tree)
        samples.append(sampled)
    tree, sampled = oracle.batch(trees, budget + 1), torch.tensor(samples)
    return trees, samples, tree, sampled, walk(tree, sampled, P)


def expected_plan(policy: str, tree: oracle.OracleTree, sampled: list[int]) -> SimpleNamespace:
    path, last = oracle.walk(tree, sampled)
    texts = [tree.token[row] for row in path[1:]] + [last]  # every token that the walk has verified
    keep = len(path)
    if policy == "flat":
        keep = next((i for i, row in enumerate(path) if row != i), len(path))
    return SimpleNamespace(
        path=path[:keep],
        parents=[tree.parent[row] for row in path[:keep]],
        emitted=texts[:keep],
        carried=texts[keep:],
        moves=path[:keep] != list(range(keep)),
    )


def padded(values: list[int], width: int = P) -> list[int]:
    return values + [-1] * (width - len(values))


def check(plan, expected: list[SimpleNamespace]):
    for r, e in enumerate(expected):
        assert plan.path[r].tolist() == padded(e.path)
        assert plan.parent_rows[r].tolist() == padded(e.parents)
        assert plan.num_accepted[r] == len(e.path) - 1
        assert plan.num_emitted[r] == len(e.emitted) == len(e.path)
        assert plan.emitted[r].tolist() == padded(e.emitted)
        assert plan.bonus[r] == e.emitted[-1]
        assert bool(plan.moves[r]) == e.moves
        assert plan.carried[r].tolist() == padded(e.carried)
        assert plan.num_carried[r] == len(e.carried)


@pytest.mark.parametrize("policy", ["branch", "flat"])
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.sampled_from([1, 4, 15, 31, 64]))
def test_plan_equals_brute_force(policy, seed, budget):
    trees, samples, tree, sampled, walk_ = walked(seed, budget)
    plan = plan_for(policy, tree, sampled, walk_)
    check(plan, [expected_plan(policy, t, s) for t, s in zip(trees, samples)])
    assert torch.equal(plan.path_len(), plan.num_emitted)


@pytest.mark.parametrize("policy", ["branch", "flat"])
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    budget=st.sampled_from([4, 15]),
    limits=st.lists(st.integers(0, 11), min_size=4, max_size=4),
)
def test_cut_ends_the_path_exactly_there(policy, seed, budget, limits):
    trees, samples, tree, sampled, walk_ = walked(seed, budget)
    plan = plan_for(policy, tree, sampled, walk_).cut(torch.tensor(limits))
    expected = []
    for t, s, limit in zip(trees, samples, limits):
        e = expected_plan(policy, t, s)
        if max(limit, 1) < len(e.emitted):
            keep = max(limit, 1)
            e.path, e.parents, e.emitted, e.carried = e.path[:keep], e.parents[:keep], e.emitted[:keep], []
            e.moves = e.path != list(range(keep))
        expected.append(e)
    check(plan, expected)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.sampled_from([4, 15, 31]))
def test_both_policies_verify_the_same_tokens_in_the_same_order(seed, budget):
    _, _, tree, sampled, walk_ = walked(seed, budget)
    branch, flat = branch_plan(tree, sampled, walk_), flat_plan(tree, sampled, walk_)
    assert not branch.num_carried.any()
    assert not flat.moves.any()
    for r in range(4):
        whole = flat.emitted[r, : flat.num_emitted[r]].tolist() + flat.carried[r, : flat.num_carried[r]].tolist()
        assert whole == branch.emitted[r, : branch.num_emitted[r]].tolist()


def test_every_miss_still_folds_the_root():
    tree = oracle.OracleTree([0])
    tree.add(1, 0)
    batch = oracle.batch([tree], 2)
    sampled = torch.tensor([[4, 4]])
    for policy in (branch_plan, flat_plan):
        plan = policy(batch, sampled, walk(batch, sampled, 2))
        assert plan.path.tolist() == [[0, -1]]
        assert (plan.num_accepted.tolist(), plan.num_emitted.tolist(), plan.bonus.tolist()) == ([0], [1], [4])


def test_the_bonus_of_flat_may_be_a_branch_node_with_its_children_carried():
    # spine 1 2 3 and under row 1 a branch 4 -> 0: the target says 1, 4, 0, then 2.
    tree = oracle.OracleTree([0])
    for token, parent in ((1, 0), (2, 1), (3, 2), (4, 1), (0, 4)):
        tree.add(token, parent)
    batch = oracle.batch([tree], 6)
    sampled = torch.tensor([[1, 4, 3, 3, 0, 2]])
    plan = flat_plan(batch, sampled, walk(batch, sampled, 5))
    assert plan.path.tolist() == [[0, 1, -1, -1, -1]]
    assert plan.emitted.tolist() == [[1, 4, -1, -1, -1]]
    assert plan.carried.tolist() == [[0, 2, -1, -1, -1]]
    plan = branch_plan(batch, sampled, walk(batch, sampled, 5))
    assert plan.path.tolist() == [[0, 1, 4, 5, -1]]
    assert plan.moves.tolist() == [True]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), policy=st.sampled_from(["branch", "flat"]))
def test_hidden_states_and_logits_are_taken_by_path_not_by_prefix(seed, policy):
    trees, samples, tree, sampled, walk_ = walked(seed, 15)
    plan = plan_for(policy, tree, sampled, walk_)
    rows = torch.arange(16.0)[None, :, None] + torch.tensor([100.0, 200, 300, 400])[:, None, None]
    hidden, logits = rows.expand(4, 16, 3), rows.expand(4, 16, VOCAB)
    for r in range(4):
        path = expected_plan(policy, trees[r], samples[r]).path
        expected = [100.0 * (r + 1) + row for row in path] + [100.0 * (r + 1)] * (P - len(path))
        assert gather_rows(hidden, plan)[r, :, 0].tolist() == expected
        assert path_logits(logits, plan)[r, :, VOCAB - 1].tolist() == expected


def test_inactive_requests_commit_nothing():
    _, _, tree, sampled, walk_ = walked(1, 15)
    plan = branch_plan(tree, sampled, walk_)
    active = torch.tensor([True, False, True, False])
    assert plan.path_len(active).tolist() == [int(n) if a else 0 for n, a in zip(plan.num_emitted, active)]


def test_unknown_policy_is_refused():
    _, _, tree, sampled, walk_ = walked(1, 4)
    with pytest.raises(ValueError, match="expected one of branch, flat"):
        plan_for("full", tree, sampled, walk_)
