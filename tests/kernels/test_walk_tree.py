# SPDX-License-Identifier: Apache-2.0
"""walk_tree against walking row by row."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import WIDTHS, forest, num_rows

from aeon_ddtree.kernels.checks import enable_checks
from aeon_ddtree.kernels.walk_tree import walk_tree


def walk(token, parent, nodes, sampled, max_len):
    """The walk in plain Python: (rows, bonus)."""
    rows = [0]
    while len(rows) < max_len:
        here = rows[-1]
        hits = [i for i in range(1, nodes + 1) if parent[i] == here and token[i] == sampled[here]]
        if not hits:
            break
        rows.append(hits[0])
    return rows, sampled[rows[-1]]


def assert_right(token, parent, nodes, sampled, max_len):
    path, path_len, bonus = walk_tree(token, parent, nodes, sampled, max_len=max_len)
    assert path.dtype == path_len.dtype == bonus.dtype == torch.int64 and path.shape == (len(token), max_len)
    for r in range(len(token)):
        rows, last = walk(*(x[r].tolist() for x in (token, parent)), int(nodes[r]), sampled[r].tolist(), max_len)
        assert path[r].tolist() == rows + [-1] * (max_len - len(rows))
        assert path_len[r] == len(rows) and bonus[r] == last
    return path, path_len, bonus


def nodes_of(parent):
    return torch.tensor([num_rows(p) - 1 for p in parent])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("vocab", [1, 2, 5])
def test_every_shape_and_width(width, vocab):
    """Small vocabularies: long walks, duplicate children; vocab 1 accepts all of a chain."""
    gen = torch.Generator().manual_seed(width)
    parent = forest(width, seed=width)
    for max_len in {1, 2, min(width, 16), width}:
        token = torch.randint(0, vocab, (6, width), generator=gen)
        sampled = torch.randint(0, vocab, (6, width), generator=gen)
        assert_right(token, parent, nodes_of(parent), sampled, max_len)


@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(1, 4), st.integers(1, 8))
@settings(deadline=None, max_examples=80)
def test_random(seed, width, vocab, max_len):
    rng = random.Random(seed)
    parent = forest(width, seed=seed)
    token, sampled = (torch.tensor([[rng.randrange(vocab) for _ in range(width)] for _ in range(6)]) for _ in "ab")
    nodes = torch.tensor([rng.randint(0, int(n)) for n in nodes_of(parent)])
    assert_right(token, parent, nodes, sampled, max_len)


def test_padding_is_never_accepted():
    """Pitfall, tree: the target samples token 0, which is what padding rows carry. With stale parents too."""
    token = torch.zeros(3, 6, dtype=torch.int64)
    sampled = torch.zeros(3, 6, dtype=torch.int64)
    parent = torch.tensor([[-1] * 6, [-1, 0, 0, 1, 2, 3], [-1, 0, 1, -1, 0, 1]])
    path, path_len, bonus = assert_right(token, parent, torch.tensor([0, 0, 2]), sampled, 5)
    assert path_len.tolist() == [1, 1, 3] and bonus.tolist() == [0, 0, 0]
    assert path.tolist()[2] == [0, 1, 2, -1, -1]


def test_all_rejected_and_all_accepted():
    """Pitfall, recurrence: nothing accepted is a path of one row, the root; depth 11 and more is accepted whole."""
    parent = forest(33, shapes=("chain", "chain"))
    token = torch.arange(33).repeat(2, 1)
    sampled = torch.stack([token[0] + 100, token[0] + 1])
    _, path_len, bonus = assert_right(token, parent, torch.tensor([32, 32]), sampled, 33)
    assert path_len.tolist() == [1, 33] and bonus.tolist() == [100, 33]


def test_off_spine_and_duplicates():
    """The child that matches may be a branch; of two equal children the lower row counts, and only its subtree."""
    token = torch.tensor([[9, 1, 2, 3, 1, 4, 5]])
    parent = torch.tensor([[-1, 0, 1, 0, 0, 4, 3]])
    for root_sample, rows in ((3, [0, 3, 6]), (1, [0, 1]), (8, [0])):
        sampled = torch.tensor([[root_sample, 4, 0, 5, 4, 7, 6]])
        path, path_len, _ = assert_right(token, parent, torch.tensor([6]), sampled, 5)
        assert path[0, : int(path_len[0])].tolist() == rows


def test_requests_do_not_mix():
    """Pitfall, mask: trees of equal size and different shape, alone and side by side, give the same."""
    parent, token = forest(17, seed=1), torch.randint(0, 2, (6, 17), generator=torch.Generator().manual_seed(0))
    sampled = token.roll(1, 1)
    together = walk_tree(token, parent, nodes_of(parent), sampled, max_len=9)
    for r in range(6):
        part = slice(r, r + 1)
        alone = walk_tree(token[part], parent[part], nodes_of(parent)[part], sampled[part], max_len=9)
        assert all(torch.equal(a[0], b[r]) for a, b in zip(alone, together))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token", torch.zeros(2, 5)),
        ("parent", torch.zeros(2, 4, dtype=torch.int64)),
        ("num_nodes", torch.zeros(3, dtype=torch.int64)),
        ("sampled", torch.zeros(2, 5)),
        ("max_len", 0),
    ],
)
def test_bad_input_is_named(name, value):
    window = torch.zeros(2, 5, dtype=torch.int64)
    parent = forest(5, shapes=("chain", "star"))
    arguments = {"token": window, "parent": parent, "num_nodes": window[:, 0], "sampled": window, "max_len": 4}
    walk_tree(**arguments)
    with pytest.raises(ValueError, match=name):
        walk_tree(**{**arguments, name: value})
    enable_checks(True)
    try:
        with pytest.raises(ValueError, match="parent"):
            walk_tree(**{**arguments, "parent": parent + 3})
    finally:
        enable_checks(None)
