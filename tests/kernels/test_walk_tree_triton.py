# SPDX-License-Identifier: Apache-2.0
"""The Triton walk_tree: bitwise what walking row by row gives."""

import random

import pytest
import torch
from kernel_cases import WIDTHS, forest
from test_walk_tree import nodes_of, walk

from aeon_ddtree.kernels.checks import enable_checks
from aeon_ddtree.kernels.walk_tree import reference, walk_tree


def check(device, token, parent, nodes, sampled, max_len, dtype=torch.int64):
    given = [x.to(device).to(dtype) for x in (token, parent, nodes, sampled)]
    path, path_len, bonus = walk_tree(*given, max_len=max_len)
    assert path.dtype == path_len.dtype == bonus.dtype == torch.int64 and path.shape == (len(token), max_len)
    for r in range(len(token)):
        rows, last = walk(*(x[r].tolist() for x in (token, parent)), int(nodes[r]), sampled[r].tolist(), max_len)
        assert path[r].tolist() == rows + [-1] * (max_len - len(rows))
        assert path_len[r] == len(rows) and bonus[r] == last
    return path_len


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("vocab", [1, 2, 5])
def test_every_shape_and_width(device, width, vocab):
    """Small vocabularies: long walks, duplicate children; vocab 1 accepts all of a chain."""
    gen = torch.Generator().manual_seed(width)
    parent = forest(width, seed=width)
    for max_len, dtype in ((1, torch.int32), (min(width, 16), torch.int64), (width, torch.int32)):
        token = torch.randint(0, vocab, (6, width), generator=gen)
        sampled = torch.randint(0, vocab, (6, width), generator=gen)
        check(device, token, parent, nodes_of(parent), sampled, max_len, dtype)


@pytest.mark.parametrize("seed", range(8))
def test_random(device, seed):
    """Any number of nodes, fewer than have parents too; tokens beyond 32 bits."""
    rng = random.Random(seed)
    width, vocab = rng.randrange(1, 40), rng.randrange(1, 4)
    parent = forest(width, seed=seed)
    token, sampled = (
        torch.tensor([[rng.randrange(vocab) + 2**40 for _ in range(width)] for _ in range(6)]) for _ in "ab"
    )
    nodes = torch.tensor([rng.randint(0, int(n)) for n in nodes_of(parent)])
    check(device, token, parent, nodes, sampled, rng.randint(1, 12))


def test_padding_is_never_accepted(device):
    """The target samples token 0, which is what padding rows carry. With stale parents too."""
    token = sampled = torch.zeros(3, 6, dtype=torch.int64)
    parent = torch.tensor([[-1] * 6, [-1, 0, 0, 1, 2, 3], [-1, 0, 1, -1, 0, 1]])
    path_len = check(device, token, parent, torch.tensor([0, 0, 2]), sampled, 5)
    assert path_len.tolist() == [1, 1, 3]


def test_all_rejected_and_all_accepted(device):
    parent = forest(127, shapes=("chain", "chain"))
    token = torch.arange(127).repeat(2, 1)
    sampled = torch.stack([token[0] + 200, token[0] + 1])
    path_len = check(device, token, parent, torch.tensor([126, 126]), sampled, 127)
    assert path_len.tolist() == [1, 127]


def test_bad_parents_are_padding(device):
    """Rows whose parent is not an earlier row are padding, as in the reference; with checks on they are an error."""
    gen = torch.Generator().manual_seed(0)
    parent = torch.randint(-9, 40, (6, 17), generator=gen)
    parent[0], parent[1] = 10**6, torch.arange(17)
    token, sampled = torch.zeros(6, 17, dtype=torch.int64), torch.zeros(6, 17, dtype=torch.int64)
    nodes = torch.full((6,), 99)
    given = [x.to(device) for x in (token, parent, nodes, sampled)]
    truth = reference.walk(token, parent, nodes, sampled, 9)
    for got, wanted in zip(walk_tree(*given, max_len=9), truth):
        assert torch.equal(got.cpu(), wanted)
    enable_checks(True)
    try:
        with pytest.raises(ValueError, match="parent"):
            walk_tree(*given, max_len=9)
    finally:
        enable_checks(None)


def test_strided_arguments(device):
    parent = forest(17, seed=1)
    token = torch.randint(0, 2, (6, 17), generator=torch.Generator().manual_seed(0))
    sampled = token.roll(1, 1)
    apart = [torch.stack([x, x + 5], -1).to(device)[..., 0] for x in (token, parent, sampled)]
    whole = [x.to(device) for x in (token, parent, sampled)]
    nodes = nodes_of(parent).to(device)
    got = walk_tree(apart[0], apart[1], nodes, apart[2], max_len=9)
    wanted = walk_tree(whole[0], whole[1], nodes, whole[2], max_len=9)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted))
