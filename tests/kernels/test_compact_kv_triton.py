# SPDX-License-Identifier: Apache-2.0
"""The Triton compact_kv: the same cells as copying entry by entry, byte for byte, and no other."""

import random

import pytest
import torch
from kernel_cases import forest, num_rows, pack_paths, path_to, poison_int
from test_compact_kv import BLOCK, expected, group

from aeon_ddtree.kernels.compact_kv import compact_groups, compact_kv, triton


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def check(device, caches, table, context, paths, length):
    """Runs on the device, compares all bytes with the truth made on the CPU."""
    truth = expected(caches, table.tolist(), context, paths)
    moved = [tuple(x.to(device) for x in pair) for pair in caches]
    path, path_len = pack_paths(paths, length)
    compact_kv(moved, table.to(device), torch.tensor(context).to(device), path.to(device), path_len.to(device))
    for pair, wanted in zip(moved, truth):
        for cache, cells in zip(pair, wanted):
            assert torch.equal(bits(cache.cpu()), bits(cells))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("seed", range(4))
def test_random_paths(device, dtype, seed):
    """Layers of different head sizes, overlapping moves, empty paths, requests at any context, shuffled blocks."""
    rng = random.Random(seed)
    paths = [[0, *sorted(rng.sample(range(1, 31), rng.randrange(13)))] for _ in range(4)] + [[]]
    context = [rng.randrange(20) for _ in paths]
    table = torch.randperm(67, generator=torch.Generator().manual_seed(seed))[:65].reshape(5, 13)
    check(device, group(2, 67, dtype, seed), table, context, paths, 13)


@pytest.mark.parametrize("width", [9, 33, 65, 127])
def test_paths_of_every_tree(device, width):
    """The last row of every shape of tree, deepest and widest included, with the caches poisoned beside the rows."""
    parent = forest(width, seed=width)
    paths = [path_to(p, num_rows(p) - 1) for p in parent]
    blocks = -(-width // BLOCK) + 1
    caches = group(1, 6 * blocks + 1, torch.bfloat16)
    caches[0][0][-1] = torch.nan
    table = torch.randperm(6 * blocks, generator=torch.Generator().manual_seed(0)).reshape(6, blocks)
    check(device, caches, table, [0, 1, 2, 3, 1, 2], paths, width)


def test_overlapping_moves_keep_their_order(device):
    check(device, group(3, 5), torch.tensor([[3, 0, 4]]), [2], [[0, 2, 3, 5]], 6)


@pytest.mark.parametrize("paths", [[[], []], [[0], [0]], [[0, 1, 2, 3], [0, 1]], [[], [0, 1, 2]]])
def test_consecutive_paths_touch_nothing(device, paths):
    caches = [(poison_int((4, BLOCK, 2, 3)).to(device), poison_int((4, BLOCK, 2, 5)).to(device))]
    before = [x.clone() for x in caches[0]]
    path, path_len = pack_paths(paths, 5)
    table, context = torch.full((2, 2), 10**6), torch.tensor([1, 3])
    compact_kv(caches, table.to(device), context.to(device), path.to(device), path_len.to(device))
    for x, y in zip(caches[0], before):
        assert torch.equal(bits(x), bits(y))


def test_junk_is_never_followed(device):
    """Block ids, contexts and rows outside everything: nothing outside the caches is touched, wherever it points."""
    store = poison_int((6, BLOCK, 2, 4)).to(device)
    guard = store.clone()
    caches = [(store[2:4, :, :, :2], store[2:4, :, :, 2:])]
    for block, context, row in ((10**9, 0, 3), (-7, 10**6, 5), (0, -50, 2)):
        path, path_len = pack_paths([[0, row]], 2)
        table = torch.full((1, 3), block)
        compact_kv(caches, table.to(device), torch.tensor([context]).to(device), path.to(device), path_len.to(device))
        assert torch.equal(bits(store[:2]), bits(guard[:2])) and torch.equal(bits(store[4:]), bits(guard[4:]))


def test_aliased_and_strided_caches(device):
    """Layers that share storage are moved once; K and V as views of one tensor, heads before places."""
    store = torch.randn(6, 2, 2, BLOCK, 3).to(device)
    k_cache, v_cache = store[:, 0].transpose(1, 2), store[:, 1].transpose(1, 2)
    table = torch.tensor([[5, 1, 3]])
    truth = expected([(k_cache.cpu(), v_cache.cpu())], table.tolist(), [1], [[0, 3, 4, 8]])
    path, path_len = pack_paths([[0, 3, 4, 8]], 4)
    layers = [(k_cache, v_cache), (k_cache, v_cache), (store[:, 0].transpose(1, 2), v_cache)]
    compact_kv(layers, table.to(device), torch.tensor([1]).to(device), path.to(device), path_len.to(device))
    assert torch.equal(k_cache.cpu(), truth[0][0]) and torch.equal(v_cache.cpu(), truth[0][1])


def test_groups_in_one_launch(device, monkeypatch):
    """Two groups with tables and contexts of their own, in the same storage; the same as one after the other."""
    caches = group(2, 12)
    tables, contexts = (torch.tensor([[1, 3, 5]]), torch.tensor([[2, 8, 0]])), ([1], [3])
    paths = [[0, 2, 4, 5]]
    truth = expected(expected(caches, tables[0].tolist(), [1], paths), tables[1].tolist(), [3], paths)
    moved = [tuple(x.to(device) for x in pair) for pair in caches]
    groups = [(moved, table.to(device), torch.tensor(c).to(device)) for table, c in zip(tables, contexts)]
    launches = []
    compact = triton.compact
    monkeypatch.setattr(triton, "compact", lambda *a: launches.append(compact(*a)))
    compact_groups(groups, *(x.to(device) for x in pack_paths(paths, 5)))
    assert len(launches) == 1
    for pair, wanted in zip(moved, truth):
        for cache, cells in zip(pair, wanted):
            assert torch.equal(cache.cpu(), cells)


def test_what_the_kernel_does_not_take_goes_to_the_reference(device):
    """Caches of different word sizes in one call: right all the same."""
    caches = [*group(1, 5), *group(1, 5, torch.bfloat16)]
    assert not triton.takes([(caches, torch.zeros(1, 1), torch.zeros(1))])
    check(device, caches, torch.tensor([[3, 0, 4]]), [2], [[0, 2, 3, 5]], 6)


def test_fifty_steps_keep_the_accepted_sequence(device):
    """In a cache of NaN: what lies before the context is always the accepted tokens, in order."""
    rng = random.Random(3)
    table = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:180].reshape(2, 90)
    cache = torch.full((200, BLOCK, 1, 1), torch.nan).to(device)
    context, kept, token = [0, 0], ([], []), 0.0
    for step in range(50):
        parent = forest(9, seed=step, shapes=("random", "padded"))
        paths = []
        for r in range(2):
            names = [token + 1 + i for i in range(num_rows(parent[r]))]
            token = names[-1]
            position = context[r] + torch.arange(len(names))
            cache[table[r, position // BLOCK].to(device), (position % BLOCK).to(device), 0, 0] = torch.tensor(names).to(
                device
            )
            paths.append(path_to(parent[r], rng.randrange(len(names))))
            kept[r].extend(names[row] for row in paths[r])
        path, path_len = pack_paths(paths, 9)
        compact_kv(
            [(cache, cache)], table.to(device), torch.tensor(context).to(device), path.to(device), path_len.to(device)
        )
        context = [c + len(rows) for c, rows in zip(context, paths)]
    for r in range(2):
        assert cache.cpu()[table[r]].flatten()[: context[r]].tolist() == kept[r]
