# SPDX-License-Identifier: Apache-2.0
"""build_tree and build_root_leaves against a heap over all prefixes, one request at a time."""

import heapq
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import num_rows

from aeon_ddtree.kernels.build_tree import build_root_leaves, build_tree

DEAD = -math.inf


def options_of(token, logp, carried):
    """Candidates by depth with carried tokens in front: lists of (token, logp), rank = place in the list."""
    depths = []
    for d in range(len(token)):
        real = [(t, w) for t, w in zip(token[d], logp[d]) if w > DEAD]
        if d < len(carried):
            real = [(carried[d], 0.0), *((t, w) for t, w in real if t != carried[d])]
        depths.append(real)
    return depths


def heap_tree(depths, root, limit, first, chain_only):
    """Rows as (token, parent row, depth), in the row order of the contract."""
    horizon = len(depths)
    nodes = [(root, -1, 0, 0.0, 0, True)]  # token, parent, depth, score, rank, on the rank-0 path
    heap: list[tuple] = []

    def offer(parent, rank):
        depth = nodes[parent][2] + 1
        if depth <= horizon and rank < len(depths[depth - 1]):
            token, weight = depths[depth - 1][rank]
            heapq.heappush(heap, (-(nodes[parent][3] + weight), rank, parent, token, depth))

    def add(entry):
        cost, rank, parent, token, depth = entry
        nodes.append((token, parent, depth, -cost, rank, rank == 0 and nodes[parent][5]))
        offer(len(nodes) - 1, 0)
        if not chain_only:
            offer(parent, rank + 1)

    offer(0, 0)
    for step in range(limit):
        if step < first:  # the newest node's first child comes next, whatever it scores
            entry = next((e for e in heap if e[1] == 0 and e[2] == len(nodes) - 1), None)
            if entry is None:
                first = 0
            else:
                heap.remove(entry)
                heapq.heapify(heap)
                add(entry)
                continue
        if not heap:
            break
        add(heapq.heappop(heap))
    order = sorted(range(len(nodes)), key=lambda n: (not nodes[n][5], n))
    place = {node: row for row, node in enumerate(order)}
    return [(nodes[n][0], place.get(nodes[n][1], -1), nodes[n][2]) for n in order]


def assert_rows(built, r, rows, width):
    token, parent, depth, num_nodes = built
    pad = width - len(rows)
    assert token[r].tolist() == [row[0] for row in rows] + [0] * pad
    assert parent[r].tolist() == [row[1] for row in rows] + [-1] * pad
    assert depth[r].tolist() == [row[2] for row in rows] + [0] * pad
    assert num_nodes[r] == len(rows) - 1


def distributions(requests, horizon, ranks, seed, vocab=40, steps=None):
    """Descending log-probabilities with distinct tokens per depth; `steps` rounds them so that ties are common."""
    gen = torch.Generator().manual_seed(seed)
    logp = (torch.randn(requests, horizon, vocab, generator=gen) * 2).log_softmax(-1)
    if steps:
        logp = logp.mul(steps).round().div(steps)
    value, token = logp.sort(dim=-1, descending=True, stable=True)
    return token[..., :ranks].contiguous(), value[..., :ranks].contiguous()


cases = st.tuples(
    st.integers(1, 6), st.integers(1, 5), st.integers(1, 24), st.integers(0, 10**6), st.sampled_from([None, 1, 2])
)


@given(cases, st.data())
@settings(deadline=None, max_examples=80)
def test_equals_the_heap(case, data):
    horizon, ranks, budget, seed, steps = case
    requests = 3
    token, logp = distributions(requests, horizon, ranks, seed, steps=steps)
    logp[0, -1, ranks // 2 :] = DEAD
    spine = data.draw(st.integers(0, horizon))
    carried = torch.randint(0, 40, (requests, horizon + 2), generator=torch.Generator().manual_seed(seed))
    carried[1, : horizon // 2] = token[1, : horizon // 2, -1]  # often one of the drafter's own candidates
    num_carried = torch.tensor([data.draw(st.integers(0, horizon + 2)) for _ in range(requests)])
    max_nodes = torch.tensor([data.draw(st.integers(0, budget + 2)) for _ in range(requests)])
    chain_only = torch.tensor([data.draw(st.booleans()) for _ in range(requests)])
    use = {name: data.draw(st.booleans()) for name in ("carried", "max_nodes", "chain_only")}
    built = build_tree(
        token, logp, torch.tensor([5, 6, 7]), budget, spine=spine,
        carried=carried if use["carried"] else None, num_carried=num_carried if use["carried"] else None,
        max_nodes=max_nodes if use["max_nodes"] else None, chain_only=chain_only if use["chain_only"] else None,
    )  # fmt: skip
    for r in range(requests):
        count = min(int(num_carried[r]), horizon) if use["carried"] else 0
        limit = min(budget, int(max_nodes[r])) if use["max_nodes"] else budget
        alone = bool(chain_only[r]) and use["chain_only"]
        depths = options_of(token[r].tolist(), logp[r].tolist(), carried[r, :count].tolist())
        rows = heap_tree(depths, 5 + r, limit, horizon if alone else max(spine, count), alone)
        assert_rows(built, r, rows, budget + 1)


@pytest.mark.parametrize("budget", [1, 8, 16, 32, 64, 126])
@pytest.mark.parametrize("spine", [0, 4, 15])
def test_served_sizes(budget, spine):
    """Horizon 15, top-k 8, every window width, batch of 8; each request as if it were alone."""
    token, logp = distributions(8, 15, 8, budget)
    root = torch.arange(8)
    built = build_tree(token, logp, root, budget, spine=spine)
    for r in range(8):
        rows = heap_tree(options_of(token[r].tolist(), logp[r].tolist(), []), r, budget, spine, False)
        assert_rows(built, r, rows, budget + 1)


def test_full_spine_contains_the_chain():
    """Pitfall, tree: pure best-first may drop the drafter's chain; a full spine holds it, in rows 1 … k."""
    flat = torch.full((1, 15, 4), math.log(0.25))
    token = torch.arange(60).reshape(1, 15, 4)
    root = torch.tensor([99])
    pure = build_tree(token, flat, root, 15, spine=0)
    full = build_tree(token, flat, root, 31, spine=15)
    assert int(pure[2].max()) < 15
    assert full[0][0, :16].tolist() == [99, *token[0, :, 0].tolist()]
    assert full[1][0, :16].tolist() == list(range(-1, 15)) and full[2][0, :16].tolist() == list(range(16))


def test_budget_does_not_change_the_horizon():
    """Pitfall, tree: budget and horizon are separate; more nodes never reach deeper than the drafter's positions."""
    token, logp = distributions(2, 3, 4, 1)
    for budget in (2, 3, 50, 127):
        out = build_tree(token, logp, torch.tensor([1, 2]), budget, spine=0)
        assert int(out[2].max()) <= 3 and out[0].shape == (2, budget + 1)
    assert out[3].tolist() == [84, 84], "4 + 16 + 64 nodes exist, then the tree is complete"


def test_children_come_from_their_own_position():
    """Pitfall, build: siblings under the root are candidates of depth 1, never of later positions."""
    token, logp = distributions(1, 4, 6, 2)
    token = token + 1000 * torch.arange(1, 5)[None, :, None]
    built_token, _, depth, num_nodes = build_tree(token, logp, torch.tensor([0]), 40, spine=4)
    assert (built_token[0, 1:] // 1000 == depth[0, 1:]).all() and num_nodes[0] == 40


def test_padding_is_nobodys_child():
    """Pitfall, tree: fewer nodes than the budget leave padding with parent −1, not children of the root."""
    token, logp = distributions(2, 2, 2, 3)
    out = build_tree(token, logp, torch.tensor([1, 2]), 20, spine=1, max_nodes=torch.tensor([0, 4]))
    assert out[3].tolist() == [0, 4]
    assert (out[1][0] == -1).all() and num_rows(out[1][1]) == 5


def test_carried_tokens_lead():
    """Depth 1's carried token is new, depth 2's is the drafter's rank 2: it leads, its duplicate is gone."""
    token = torch.tensor([[[10, 11, 12], [20, 21, 22], [30, 31, 32]]])
    logp = torch.tensor([[[-0.1, -3.0, -4.0], [-0.2, -3.0, -4.0], [-0.3, -3.0, -4.0]]])
    built = build_tree(
        token, logp, torch.tensor([1]), 7, spine=0, carried=torch.tensor([[77, 22, 0]]), num_carried=torch.tensor([2])
    )
    assert built[0][0, :4].tolist() == [1, 77, 22, 30] and built[1][0, :4].tolist() == [-1, 0, 1, 2]
    depths = [
        [(77, 0.0), (10, -0.1), (11, -3.0), (12, -4.0)],
        [(22, 0.0), (20, -0.2), (21, -3.0)],
        [(30, -0.3), (31, -3.0), (32, -4.0)],
    ]
    assert_rows(built, 0, heap_tree(depths, 1, 7, 2, False), 8)
    children = [int(t) for t, p in zip(built[0][0], built[1][0]) if p == 1]
    assert children == [22, 20], "rank 2's token leads and does not come again; the drafter's first choice follows"


def root_leaf_rows(depths, root, limit, spine, leaves, chain_only):
    rows = [(root, -1, 0)]
    for d in range(min(spine if not chain_only else len(depths), limit)):
        if not depths[d]:
            break
        rows.append((depths[d][0][0], d, d + 1))
    if not chain_only:
        for token, _ in depths[0][1:][:leaves]:
            if len(rows) <= limit:
                rows.append((token, 0, 1))
    return rows


@given(cases, st.data())
@settings(deadline=None, max_examples=50)
def test_root_leaves(case, data):
    horizon, ranks, budget, seed, _ = case
    token, logp = distributions(2, horizon, ranks, seed)
    leaves = data.draw(st.integers(0, budget))
    carried = torch.randint(0, 40, (2, horizon), generator=torch.Generator().manual_seed(seed))
    num_carried = torch.tensor([data.draw(st.integers(0, horizon)) for _ in range(2)])
    max_nodes = torch.tensor([data.draw(st.integers(0, budget)) for _ in range(2)])
    chain_only = torch.tensor([data.draw(st.booleans()) for _ in range(2)])
    built = build_root_leaves(
        token, logp, torch.tensor([3, 4]), budget, leaves, carried=carried, num_carried=num_carried,
        max_nodes=max_nodes, chain_only=chain_only,
    )  # fmt: skip
    for r in range(2):
        count = int(num_carried[r])
        depths = options_of(token[r].tolist(), logp[r].tolist(), carried[r, :count].tolist())
        spine = max(count, min(budget - leaves, horizon))
        rows = root_leaf_rows(depths, 3 + r, int(max_nodes[r]), spine, leaves, bool(chain_only[r]))
        assert_rows(built, r, rows, budget + 1)


def test_seed_image_topology():
    """Budget 15 = a spine of 11 and 4 leaves of the root."""
    token, logp = distributions(1, 15, 8, 4)
    out = build_root_leaves(token, logp, torch.tensor([0]), 15, 4)
    assert out[1][0].tolist() == [*range(-1, 11), 0, 0, 0, 0]
    assert out[0][0, 12:].tolist() == token[0, 0, 1:5].tolist() and out[3].tolist() == [15]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token", torch.zeros(2, 3, 4)),
        ("logp", torch.zeros(2, 3, 5)),
        ("root", torch.zeros(3, dtype=torch.int64)),
        ("budget", 0),
        ("budget", 128),
        ("spine", 4),
        ("spine", -1),
        ("carried", torch.zeros(2, 3, dtype=torch.int64)),
        ("num_carried", torch.zeros(2, dtype=torch.int64)),
        ("max_nodes", torch.zeros(2)),
        ("chain_only", torch.zeros(2, dtype=torch.int64)),
    ],
)
def test_bad_input_is_named(name, value):
    token, logp = distributions(2, 3, 4, 0)
    arguments = {"token": token, "logp": logp, "root": torch.zeros(2, dtype=torch.int64), "budget": 8, "spine": 3}
    build_tree(**arguments)
    with pytest.raises(ValueError, match=name):
        build_tree(**{**arguments, name: value})
    with pytest.raises(ValueError, match="leaves"):
        build_root_leaves(token, logp, arguments["root"], 8, 9)
