# SPDX-License-Identifier: Apache-2.0
"""DraftTree: invariants, truncation, positions, ancestors, drawing."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_oracles import batch, path_to, random_tree

from aeon_ddtree.tree import DraftTree, chain_tree, root_tree

BUDGETS = st.sampled_from([1, 4, 15, 31, 64])


def trees_of(seed: int, budget: int, requests: int = 3, vocab: int = 6, horizon: int = 7):
    rng = random.Random(seed)
    trees = [random_tree(rng, rng.randint(0, budget), vocab, horizon) for _ in range(requests)]
    return trees, batch(trees, budget + 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), BUDGETS)
def test_random_trees_are_valid_and_ancestors_are_paths(seed, budget):
    trees, tree = trees_of(seed, budget)
    tree.validate(vocab_size=6, horizon=7)
    seen = tree.ancestors()
    for r, oracle in enumerate(trees):
        for row in range(oracle.num_nodes + 1):
            expected = {0, *path_to(oracle, row)}
            assert set(seen[r, row].nonzero().flatten().tolist()) == expected
        for row in range(oracle.num_nodes + 1, tree.width):  # padding is nobody's ancestor
            assert not seen[r, : oracle.num_nodes + 1, row].any()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), BUDGETS, st.lists(st.integers(-1, 70), min_size=3, max_size=3))
def test_truncated_windows_keep_depths(seed, budget, rows):
    trees, tree = trees_of(seed, budget)
    cut = tree.truncate(torch.tensor(rows))
    cut.validate(vocab_size=6, horizon=7)
    for r, oracle in enumerate(trees):
        kept = min(max(rows[r], 1), oracle.num_nodes + 1)
        assert cut.num_rows[r] == kept
        assert cut.token[r, :kept].tolist() == oracle.token[:kept]
        assert cut.parent[r, :kept].tolist() == oracle.parent[:kept]
        assert cut.depth[r, :kept].tolist() == oracle.depth[:kept]


def test_positions_follow_depth_not_row():
    trees, tree = trees_of(5, 15)
    base = torch.tensor([100, 7, 0])
    positions = tree.positions(base)
    for r, oracle in enumerate(trees):
        for row in range(oracle.num_nodes + 1):
            assert positions[r, row] == base[r] + len(path_to(oracle, row))


def test_is_node_leaves_out_root_and_padding():
    _, tree = trees_of(11, 15)
    assert torch.equal(tree.is_node.sum(1), tree.num_nodes)
    assert not tree.is_node[:, 0].any()


def test_select_and_narrow():
    trees, tree = trees_of(3, 15)
    picked = tree.select(torch.tensor([2, 0]))
    assert picked.token.tolist() == [tree.token[2].tolist(), tree.token[0].tolist()]
    narrow = tree.narrow(4)
    narrow.validate(vocab_size=6)
    assert narrow.num_nodes.tolist() == [min(t.num_nodes, 3) for t in trees]
    with pytest.raises(ValueError, match=r"1 \.\. 16 rows"):
        tree.narrow(17)


def test_root_tree_is_a_valid_tree_of_one_row():
    tree = root_tree(torch.tensor([4, 9], dtype=torch.int32))
    tree.validate(vocab_size=10)
    assert (tree.width, tree.budget, tree.num_nodes.tolist()) == (1, 0, [0, 0])
    assert tree.token.dtype == torch.int64


def test_chain_tree_lengths():
    tree = chain_tree(torch.tensor([4, 9, 1]), torch.tensor([[1, 2, 3]] * 3), torch.tensor([3, 0, 9]))
    tree.validate(vocab_size=10, horizon=3)
    assert tree.num_nodes.tolist() == [3, 0, 3]
    assert tree.parent.tolist() == [[-1, 0, 1, 2], [-1, -1, -1, -1], [-1, 0, 1, 2]]
    assert tree.token[0].tolist() == [4, 1, 2, 3]


BROKEN = {
    "parent after child": {"parent": [[-1, 2, 0, -1]]},
    "padding with a parent": {"parent": [[-1, 0, 0, 0]]},
    "wrong depth": {"depth": [[0, 1, 2, 0]]},
    "padding with a token": {"token": [[5, 1, 2, 3]]},
    "twins": {"token": [[5, 1, 1, 0]]},
    "token beyond the vocabulary": {"token": [[5, 1, 10, 0]]},
    "negative token": {"token": [[5, -1, 2, 0]]},
    "too many nodes": {"num_nodes": [4]},
    "root with a parent": {"parent": [[0, 0, 0, -1]]},
}


@pytest.mark.parametrize("name", BROKEN)
def test_validate_sees(name):
    good = {"token": [[5, 1, 2, 0]], "parent": [[-1, 0, 0, -1]], "depth": [[0, 1, 1, 0]], "num_nodes": [2]}
    DraftTree(**{k: torch.tensor(v) for k, v in good.items()}).validate(vocab_size=10, horizon=1)
    bad = DraftTree(**{k: torch.tensor(v) for k, v in (good | BROKEN[name]).items()})
    with pytest.raises(ValueError):
        bad.validate(vocab_size=10, horizon=1)


def test_render_draws_every_row_once_below_its_parent():
    trees, tree = trees_of(21, 15)
    text = tree.render(1, decode=lambda t: f"t{t}", accepted=[0])
    lines = text.splitlines()
    assert len(lines) == trees[1].num_nodes + 1
    assert lines[0] == f"*[0] 't{trees[1].token[0]}'"
    for row in range(1, trees[1].num_nodes + 1):
        (line,) = [x for x in lines if f"[{row}]" in x]
        (above,) = [x for x in lines if f"[{trees[1].parent[row]}]" in x]
        assert lines.index(above) < lines.index(line)
        assert line.index("[") > above.index("[") and line.endswith(f"'t{trees[1].token[row]}'")
