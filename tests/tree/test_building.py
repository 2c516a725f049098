# SPDX-License-Identifier: Apache-2.0
"""Building against a brute-force heap, and the edges that broke others."""

import random

import pytest
import torch
import tree_oracles as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from aeon_ddtree.tree import Candidates, TreePolicy, build_tree_from, draft_candidates

BUDGETS = st.sampled_from([1, 2, 4, 7, 15, 16, 31])


def random_candidates(rng: random.Random, requests: int, horizon: int, top_k: int, vocab: int, grain: int = 1024):
    """Distinct tokens per position; log-probabilities on a grid, so that sums are exact in fp32."""
    token = [[rng.sample(range(vocab), top_k) for _ in range(horizon)] for _ in range(requests)]
    logp = [
        [sorted((-rng.randint(0, 3 * grain) / grain for _ in range(top_k)), reverse=True) for _ in range(horizon)]
        for _ in range(requests)
    ]
    return token, logp


def check_same(tree, oracles, vocab, horizon):
    tree.validate(vocab_size=vocab, horizon=horizon)
    for r, expected in enumerate(oracles):
        token, parent, depth = expected.padded(tree.width)
        assert tree.num_nodes[r] == expected.num_nodes
        assert tree.token[r].tolist() == token
        assert tree.parent[r].tolist() == parent
        assert tree.depth[r].tolist() == depth


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    budget=BUDGETS,
    horizon=st.integers(1, 9),
    top_k=st.integers(1, 5),
    spine=st.integers(0, 9),
    tied=st.booleans(),
    carry=st.booleans(),
    limits=st.booleans(),
)
def test_best_first_equals_a_heap(seed, budget, horizon, top_k, spine, tied, carry, limits):
    rng = random.Random(seed)
    requests, vocab = 4, 8
    token, logp = random_candidates(rng, requests, horizon, top_k, vocab, grain=1 if tied else 1024)
    root = [rng.randrange(vocab) for _ in range(requests)]
    spine = min(spine, horizon, budget)
    if top_k == 1:
        budget = min(budget, horizon)
        spine = min(spine, budget)
    carried = [[rng.randrange(vocab) for _ in range(rng.randint(0, horizon))] if carry else [] for _ in range(requests)]
    max_nodes = [rng.randint(0, budget + 2) if limits else None for _ in range(requests)]
    chain_only = [limits and rng.random() < 0.3 for _ in range(requests)]
    policy = TreePolicy(horizon=horizon, budget=budget, top_k=top_k, spine=spine)
    tree = build_tree_from(
        Candidates(torch.tensor(token), torch.tensor(logp)),
        torch.tensor(root),
        policy,
        carried=torch.tensor([c + [-1] * (horizon - len(c)) for c in carried]) if carry else None,
        num_carried=torch.tensor([len(c) for c in carried]) if carry else None,
        max_nodes=torch.tensor(max_nodes) if limits else None,
        chain_only=torch.tensor(chain_only) if limits else None,
    )
    expected = [
        oracle.best_first(
            token[r], logp[r], root[r], budget, spine, carried[r], max_nodes=max_nodes[r], chain_only=chain_only[r]
        )
        for r in range(requests)
    ]
    check_same(tree, expected, vocab, horizon)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    budget=st.sampled_from([2, 4, 7, 15]),
    horizon=st.integers(1, 15),
    leaves=st.integers(1, 4),
    carry=st.booleans(),
)
def test_root_leaves_equals_brute_force(seed, budget, horizon, leaves, carry):
    leaves = min(leaves, budget - 1)
    if budget - leaves > horizon:
        return
    rng = random.Random(seed)
    requests, vocab, top_k = 3, 9, 6
    token, logp = random_candidates(rng, requests, horizon, top_k, vocab)
    root = [rng.randrange(vocab) for _ in range(requests)]
    carried = [[rng.randrange(vocab) for _ in range(rng.randint(0, horizon))] if carry else [] for _ in range(requests)]
    policy = TreePolicy(horizon=horizon, budget=budget, top_k=top_k, topology="root_leaves", root_leaves=leaves)
    tree = build_tree_from(
        Candidates(torch.tensor(token), torch.tensor(logp)),
        torch.tensor(root),
        policy,
        carried=torch.tensor([c + [-1] * (horizon - len(c)) for c in carried]) if carry else None,
        num_carried=torch.tensor([len(c) for c in carried]) if carry else None,
    )
    expected = [oracle.root_leaves(token[r], logp[r], root[r], budget, leaves, carried[r]) for r in range(requests)]
    check_same(tree, expected, vocab, horizon)


def test_full_spine_keeps_the_chain_where_best_first_drops_it():
    # Two near-even candidates at every position: pure best-first fans out early and leaves the chain.
    horizon = budget = 8
    logp = torch.tensor([[[-0.69, -0.70]] * horizon])
    token = torch.arange(2 * horizon).view(1, horizon, 2)
    candidates, root = Candidates(token, logp), torch.tensor([0])
    full = build_tree_from(candidates, root, TreePolicy(horizon=horizon, budget=budget, top_k=2))
    pure = build_tree_from(candidates, root, TreePolicy(horizon=horizon, budget=budget, top_k=2, spine=0))
    assert full.token[0, 1:].tolist() == token[0, :, 0].tolist()
    assert full.parent[0].tolist() == list(range(-1, horizon))
    assert int(pure.depth.max()) < horizon


def test_children_of_depth_d_come_from_position_d_only():
    rng = random.Random(0)
    horizon, top_k = 6, 4
    # Disjoint vocabularies per position: a token tells which position it came from.
    token = torch.arange(horizon * top_k).view(1, horizon, top_k)
    logp = torch.tensor(random_candidates(rng, 1, horizon, top_k, 24)[1])
    tree = build_tree_from(
        Candidates(token, logp), torch.tensor([0]), TreePolicy(horizon=horizon, budget=31, top_k=top_k, spine=0)
    )
    nodes = tree.is_node[0]
    assert torch.equal(tree.token[0][nodes] // top_k + 1, tree.depth[0][nodes])


@pytest.mark.parametrize("budget", [7, 15, 16, 31])
def test_budget_does_not_touch_the_draft(budget):
    logits = torch.randn(2, 15, 50, generator=torch.Generator().manual_seed(0))
    args = {
        "temperature": torch.zeros(2),
        "seed": torch.zeros(2, dtype=torch.int64),
        "index": torch.zeros(2, dtype=torch.int64),
    }
    narrow = draft_candidates(logits, TreePolicy(horizon=15, budget=budget), **args)
    wide = draft_candidates(logits, TreePolicy(horizon=15, budget=63), **args)
    assert torch.equal(narrow.token, wide.token)
    assert torch.equal(narrow.logp, wide.logp)


def test_drafter_of_another_horizon_is_refused():
    with pytest.raises(ValueError, match="15 positions, the policy's horizon is 7"):
        draft_candidates(
            torch.randn(1, 15, 20),
            TreePolicy(horizon=7, budget=15),
            temperature=torch.zeros(1),
            seed=torch.zeros(1, dtype=torch.int64),
            index=torch.zeros(1, dtype=torch.int64),
        )


def test_small_vocabulary_caps_the_candidates():
    candidates = draft_candidates(
        torch.randn(1, 3, 5),
        TreePolicy(horizon=3, budget=7, top_k=8),
        temperature=torch.zeros(1),
        seed=torch.zeros(1, dtype=torch.int64),
        index=torch.zeros(1, dtype=torch.int64),
    )
    assert candidates.token.shape == (1, 3, 5)


def test_requests_of_a_batch_do_not_mix():
    rng = random.Random(4)
    token, logp = random_candidates(rng, 2, 5, 3, 12)
    policy = TreePolicy(horizon=5, budget=9, top_k=3)
    root = torch.tensor([1, 2])
    both = build_tree_from(Candidates(torch.tensor(token), torch.tensor(logp)), root, policy)
    assert not torch.equal(both.parent[0], both.parent[1])  # same size, different shape
    assert both.num_nodes.tolist() == [9, 9]
    for r in range(2):
        alone = build_tree_from(
            Candidates(torch.tensor(token[r : r + 1]), torch.tensor(logp[r : r + 1])), root[r : r + 1], policy
        )
        assert torch.equal(alone.token[0], both.token[r])
        assert torch.equal(alone.parent[0], both.parent[r])
