# SPDX-License-Identifier: Apache-2.0
"""Brute force, one request at a time in plain Python: what the batched tree, walk and plans are compared with."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import torch

from aeon_ddtree.tree import DraftTree


@dataclass
class OracleTree:
    """One tree as lists; row 0 is the root."""

    token: list[int]
    parent: list[int] = field(default_factory=lambda: [-1])
    depth: list[int] = field(default_factory=lambda: [0])

    def add(self, token: int, parent: int) -> int:
        self.token.append(token)
        self.parent.append(parent)
        self.depth.append(self.depth[parent] + 1)
        return len(self.token) - 1

    @property
    def num_nodes(self) -> int:
        return len(self.token) - 1

    def padded(self, width: int) -> tuple[list[int], list[int], list[int]]:
        rest = width - len(self.token)
        return self.token + [0] * rest, self.parent + [-1] * rest, self.depth + [0] * rest


def merge_carried(
    token: list[list[int]], logp: list[list[float]], carried: list[int]
) -> tuple[list[list[int]], list[list[float]]]:
    """Candidates per depth, with the carried tokens as rank 0 of the first depths."""
    tokens, logps = [], []
    for position, (names, scores) in enumerate(zip(token, logp)):
        if position < len(carried):
            kept = [(t, s) for t, s in zip(names, scores) if t != carried[position]]
            tokens.append([carried[position]] + [t for t, _ in kept])
            logps.append([0.0] + [s for _, s in kept])
        else:
            tokens.append(list(names))
            logps.append(list(scores))
    return tokens, logps


def best_first(
    token: list[list[int]],
    logp: list[list[float]],
    root: int,
    budget: int,
    spine: int,
    carried: list[int] | None = None,
    max_nodes: int | None = None,
    chain_only: bool = False,
) -> OracleTree:
    """A heap of all selectable nodes after the spine; then rows in order: rank-0 path first, branches as selected."""
    carried = list(carried or [])
    budget = budget if max_nodes is None else max(0, min(budget, max_nodes))
    token, logp = merge_carried(token, logp, carried)
    horizon = len(token)
    first = min(max(spine, len(carried)), horizon, budget)
    if chain_only:
        first = min(horizon, budget)
    # nodes in selection order: (token, parent selection index, depth, score, rank, on the rank-0 path)
    nodes: list[tuple[int, int, int, float, int, bool]] = [(root, -1, 0, 0.0, 0, True)]
    heap: list[tuple[float, int, int, int]] = []  # (-score, rank, parent selection index, depth)

    def push_children(index: int, placed_rank0: bool) -> None:
        depth, score = nodes[index][2], nodes[index][3]
        if depth < horizon:
            for rank in range(1 if placed_rank0 else 0, len(token[depth])):
                heapq.heappush(heap, (-(score + logp[depth][rank]), rank, index, depth))

    for depth in range(first):
        nodes.append((token[depth][0], depth, depth + 1, nodes[depth][3] + logp[depth][0], 0, True))
    if not chain_only:
        for index in range(first + 1):
            push_children(index, placed_rank0=index < first)
        while len(nodes) <= budget and heap:
            negative, rank, parent, depth = heapq.heappop(heap)
            on_path = rank == 0 and nodes[parent][5]
            nodes.append((token[depth][rank], parent, depth + 1, -negative, rank, on_path))
            push_children(len(nodes) - 1, placed_rank0=False)
    order = [i for i, node in enumerate(nodes) if node[5]] + [i for i, node in enumerate(nodes) if not node[5]]
    row_of = {index: row for row, index in enumerate(order)}
    tree = OracleTree([root])
    for index in order[1:]:
        tree.add(nodes[index][0], row_of[nodes[index][1]])
    return tree


def root_leaves(
    token: list[list[int]],
    logp: list[list[float]],
    root: int,
    budget: int,
    leaves: int,
    carried: list[int] | None = None,
) -> OracleTree:
    """A spine of budget - leaves nodes and the next candidates of depth 1."""
    token, logp = merge_carried(token, logp, list(carried or []))
    tree = OracleTree([root])
    row = 0
    for depth in range(min(max(budget - leaves, len(carried or [])), len(token), budget)):
        row = tree.add(token[depth][0], row)
    for rank in range(1, len(token[0])):
        if rank <= leaves and tree.num_nodes < budget:
            tree.add(token[0][rank], 0)
    return tree


def walk(tree: OracleTree, sampled: list[int]) -> tuple[list[int], int]:
    """(path rows, root first; bonus)."""
    path = [0]
    while True:
        hits = [
            i for i in range(1, tree.num_nodes + 1) if tree.parent[i] == path[-1] and tree.token[i] == sampled[path[-1]]
        ]
        if not hits:
            return path, sampled[path[-1]]
        path.append(min(hits))


def path_to(tree: OracleTree, row: int) -> list[int]:
    """Rows from the root to `row`, the root left out."""
    rows = []
    while row > 0:
        rows.append(row)
        row = tree.parent[row]
    return rows[::-1]


def random_tree(rng: random.Random, num_nodes: int, vocab: int, horizon: int) -> OracleTree:
    """Any tree that keeps the invariants: random parents of depth < horizon, no two equal children of one row."""
    tree = OracleTree([rng.randrange(vocab)])
    for _ in range(num_nodes):
        open_rows = [
            row for row in range(len(tree.token)) if tree.depth[row] < horizon and tree.parent.count(row) < vocab
        ]
        if not open_rows:
            break
        # Late rows are favoured, so that deep trees are as common as bushes.
        row = max(rng.choice(open_rows), rng.choice(open_rows)) if rng.random() < 0.7 else rng.choice(open_rows)
        taken = {tree.token[i] for i in range(1, len(tree.token)) if tree.parent[i] == row}
        tree.add(rng.choice([t for t in range(vocab) if t not in taken]), row)
    return tree


def batch(trees: list[OracleTree], width: int) -> DraftTree:
    """Trees of any shapes in one window."""
    padded = [tree.padded(width) for tree in trees]
    columns = [torch.tensor([p[i] for p in padded], dtype=torch.int64) for i in range(3)]
    return DraftTree(*columns, torch.tensor([tree.num_nodes for tree in trees], dtype=torch.int64))
