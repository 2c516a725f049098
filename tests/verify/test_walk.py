# SPDX-License-Identifier: Apache-2.0
"""The walk against brute force, and the edges that broke others."""

import random

import torch
import tree_oracles as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from aeon_ddtree.tree import DraftTree, root_tree
from aeon_ddtree.verify import walk


def biased_samples(rng: random.Random, tree: oracle.OracleTree, width: int, vocab: int) -> list[int]:
    """Samples that often name a child of the row, so that walks get deep."""
    sampled = [rng.randrange(vocab) for _ in range(width)]
    for row in range(tree.num_nodes + 1):
        children = [i for i in range(1, tree.num_nodes + 1) if tree.parent[i] == row]
        if children and rng.random() < 0.85:
            sampled[row] = tree.token[rng.choice(children)]
    return sampled


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 4, 15, 31, 64]))
def test_walk_equals_brute_force(seed, budget):
    rng = random.Random(seed)
    vocab, horizon, requests = 5, 9, 4
    trees = [oracle.random_tree(rng, rng.randint(0, budget), vocab, horizon) for _ in range(requests)]
    sampled = [biased_samples(rng, tree, budget + 1, vocab) for tree in trees]
    got = walk(oracle.batch(trees, budget + 1), torch.tensor(sampled), horizon + 1)
    assert got.path.shape == (requests, horizon + 1)
    for r in range(requests):
        path, bonus = oracle.walk(trees[r], sampled[r])
        assert got.path_len[r] == len(path)
        assert got.path[r].tolist() == path + [-1] * (horizon + 1 - len(path))
        assert got.bonus[r] == bonus


def test_padding_is_never_accepted_when_the_target_says_token_0():
    # One node of token 3, two padding rows of token 0; the target says 0 everywhere.
    tree = DraftTree(
        torch.tensor([[7, 3, 0, 0]]), torch.tensor([[-1, 0, -1, -1]]), torch.tensor([[0, 1, 0, 0]]), torch.tensor([1])
    )
    got = walk(tree, torch.zeros(1, 4, dtype=torch.int64), 3)
    assert (got.path_len.tolist(), got.bonus.tolist()) == ([1], [0])
    # Nor when what stands in the padding looks like a child of the root.
    stale = DraftTree(
        torch.tensor([[7, 3, 0, 0]]), torch.tensor([[-1, 0, 0, 0]]), torch.tensor([[0, 1, 1, 1]]), torch.tensor([1])
    )
    got = walk(stale, torch.zeros(1, 4, dtype=torch.int64), 3)
    assert (got.path_len.tolist(), got.bonus.tolist()) == ([1], [0])


def test_of_two_equal_children_the_lower_row_is_taken():
    tree = DraftTree(
        torch.tensor([[7, 3, 3, 4]]), torch.tensor([[-1, 0, 0, 1]]), torch.tensor([[0, 1, 1, 2]]), torch.tensor([3])
    )
    got = walk(tree, torch.tensor([[3, 4, 9, 1]]), 4)
    assert got.path[0].tolist() == [0, 1, 3, -1]
    assert got.bonus.tolist() == [1]


def test_same_size_different_shape_in_one_batch():
    chain = [[7, 1, 2, 3], [-1, 0, 1, 2], [0, 1, 2, 3]]
    bush = [[7, 1, 2, 3], [-1, 0, 0, 0], [0, 1, 1, 1]]
    tree = DraftTree(*(torch.tensor([chain[i], bush[i]]) for i in range(3)), torch.tensor([3, 3]))
    got = walk(tree, torch.tensor([[1, 2, 3, 9]] * 2), 4)
    assert got.path.tolist() == [[0, 1, 2, 3], [0, 1, -1, -1]]
    assert got.bonus.tolist() == [9, 2]


def test_root_alone():
    got = walk(root_tree(torch.tensor([5, 6])), torch.tensor([[1], [2]]), 1)
    assert (got.path.tolist(), got.path_len.tolist(), got.bonus.tolist()) == ([[0], [0]], [1, 1], [1, 2])
