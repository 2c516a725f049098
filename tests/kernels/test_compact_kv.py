# SPDX-License-Identifier: Apache-2.0
"""compact_kv against a copy of the whole cache, cell by cell."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import forest, num_rows, pack_paths, path_to, poison_int

from aeon_ddtree.kernels.compact_kv import compact_kv

BLOCK = 4


def group(layers, blocks, dtype=torch.float32, seed=0):
    """Caches of a group; layers differ in head size, every value is unique."""
    gen = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(blocks, BLOCK, 2, 3 + n, generator=gen).to(dtype),
            torch.randn(blocks, BLOCK, 2, 5, generator=gen).to(dtype),
        )
        for n in range(layers)
    ]


def expected(caches, table, context, paths):
    """The truth: copies entry by entry from an untouched snapshot."""
    before = [tuple(c.clone() for c in pair) for pair in caches]
    after = [tuple(c.clone() for c in pair) for pair in caches]
    for r, rows in enumerate(paths):
        for i, row in enumerate(rows):
            source, target = context[r] + row, context[r] + i
            for old, new in zip(before, after):
                for x, y in zip(old, new):
                    y[table[r][target // BLOCK], target % BLOCK] = x[table[r][source // BLOCK], source % BLOCK]
    return after


def assert_same(caches, truth):
    for pair, wanted in zip(caches, truth):
        for cache, cells in zip(pair, wanted):
            assert torch.equal(cache.view(torch.int32), cells.view(torch.int32))


paths_of_rows = st.lists(st.integers(1, 30), max_size=12, unique=True).map(lambda rows: [0, *sorted(rows)])


@given(st.lists(st.tuples(st.one_of(st.just([]), paths_of_rows), st.integers(0, 20)), min_size=1, max_size=4))
@settings(deadline=None, max_examples=60)
def test_random_paths(requests):
    """Pitfall, commit: read all, then write all; every layer of the group; nothing else changes, not one cell."""
    paths, context = [p for p, _ in requests], [c for _, c in requests]
    table = torch.randperm(len(requests) * 13 + 2)[: len(requests) * 13].reshape(-1, 13)
    caches = group(2, len(requests) * 13 + 2)
    truth = expected(caches, table.tolist(), context, paths)
    compact_kv(caches, table, torch.tensor(context), *pack_paths(paths, 13))
    assert_same(caches, truth)


def test_overlapping_moves_keep_their_order():
    """Pitfall, commit: [0, 2, 3, 5] writes row 2's old place while row 3's move still needs its own."""
    caches, table = group(3, 5), torch.tensor([[3, 0, 4]])
    truth = expected(caches, table.tolist(), [2], [[0, 2, 3, 5]])
    compact_kv(caches, table, torch.tensor([2]), *pack_paths([[0, 2, 3, 5]], 6))
    assert_same(caches, truth)


@pytest.mark.parametrize("paths", [[[], []], [[0], [0]], [[0, 1, 2, 3], [0, 1]], [[], [0, 1, 2]]])
def test_consecutive_paths_touch_nothing(paths):
    """Even with block tables that hold nothing valid: nothing is read or written for them."""
    caches = [(poison_int((4, BLOCK, 2, 3)), poison_int((4, BLOCK, 2, 5)))]
    before = [tuple(c.clone() for c in pair) for pair in caches]
    compact_kv(caches, torch.full((2, 2), 10**6), torch.tensor([1, 3]), *pack_paths(paths, 5))
    assert_same(caches, before)


def test_aliased_and_strided_caches():
    """Pitfall, commit: layers that share storage, and K and V as views of one tensor, are moved once, not twice."""
    store = torch.randn(6, 2, 2, BLOCK, 3)
    k_cache, v_cache = store[:, 0].transpose(1, 2), store[:, 1].transpose(1, 2)
    table = torch.tensor([[5, 1, 2]])
    truth = expected([(k_cache, v_cache)], table.tolist(), [1], [[0, 2, 4, 6]])
    compact_kv([(k_cache, v_cache), (k_cache, v_cache)], table, torch.tensor([1]), *pack_paths([[0, 2, 4, 6]], 4))
    assert_same([(k_cache.contiguous(), v_cache.contiguous())], truth)


def test_many_steps_keep_the_accepted_sequence():
    """60 steps in a cache of NaN: what lies before the context is always the accepted tokens, in order."""
    rng = random.Random(3)
    table = torch.randperm(200)[:180].reshape(2, 90)
    cache = torch.full((200, BLOCK, 1, 1), torch.nan)
    context, kept, token = [0, 0], ([], []), 0.0
    for step in range(60):
        parent = forest(9, seed=step, shapes=("random", "padded"))
        paths = []
        for r in range(2):
            names = []
            for row in range(num_rows(parent[r])):
                token += 1
                position = context[r] + row
                cache[table[r, position // BLOCK], position % BLOCK] = token
                names.append(token)
            paths.append(path_to(parent[r], rng.randrange(len(names))))
            kept[r].extend(names[row] for row in paths[r])
        compact_kv([(cache, cache)], table, torch.tensor(context), *pack_paths(paths, 9))
        context = [c + len(rows) for c, rows in zip(context, paths)]
    for r in range(2):
        assert cache[table[r]].flatten()[: context[r]].tolist() == kept[r]


def test_bad_input_is_named():
    caches, table, context = group(2, 5), torch.zeros(1, 3, dtype=torch.int64), torch.tensor([0])
    path, path_len = pack_paths([[0, 2]], 3)
    with pytest.raises(ValueError, match=r"caches\[1\]\[0\]"):
        compact_kv([caches[0], (caches[1][0][:, :2], caches[1][1])], table, context, path, path_len)
    with pytest.raises(ValueError, match="block_table"):
        compact_kv(caches, table.float(), context, path, path_len)
    with pytest.raises(ValueError, match="context_len"):
        compact_kv(caches, table, torch.tensor([0, 1]), path, path_len)
    with pytest.raises(ValueError, match="path_len"):
        compact_kv(caches, table, context, path, path_len[:0])
