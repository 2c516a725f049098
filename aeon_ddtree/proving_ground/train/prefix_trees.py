# SPDX-License-Identifier: Apache-2.0
"""Tokens per step by prefix: what a chain or a tree would have accepted of the target's own continuation.

The tree that a step would build from the drafter's distributions is compared with the continuation that the target
wrote: what it accepts is the longest prefix of that continuation among the tree's paths. No engine is needed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Draft:
    """The drafter's top candidates at one root: ids and log-probabilities, both [15, K], best first."""

    ids: np.ndarray
    logp: np.ndarray


def chain_accepts(draft: Draft, continuation: np.ndarray) -> int:
    """Length of the common prefix of the rank-0 path and `continuation`."""
    depth = min(len(draft.ids), len(continuation))
    wrong = np.flatnonzero(draft.ids[:depth, 0] != continuation[:depth])
    return int(wrong[0]) if len(wrong) else depth


def tree_accepts(draft: Draft, continuation: np.ndarray, budget: int, spine: int) -> int:
    """Longest prefix of `continuation` inside the best-first tree of `budget` nodes, the first `spine` of rank 0.

    A node at depth d with rank r scores its parent's score plus logp[d, r]. Ties: lower rank, then older parent.
    """
    horizon, width = draft.ids.shape
    spine = min(spine, budget, horizon)
    # node -> (depth, score); node 0 is the root.
    nodes = [(0, 0.0)]
    heap: list[tuple[float, int, int]] = []

    def offer(parent: int, rank: int) -> None:
        depth, score = nodes[parent]
        if depth < horizon and rank < width:
            heapq.heappush(heap, (-(score + float(draft.logp[depth, rank])), rank, parent))

    where: dict[tuple[int, int], int] = {}
    for i in range(spine):
        nodes.append((i + 1, nodes[i][1] + float(draft.logp[i, 0])))
        where[i, 0] = i + 1
    for i in range(spine + 1):
        offer(i, 1 if (i, 0) in where else 0)
    while len(nodes) - 1 < budget and heap:
        score, rank, parent = heapq.heappop(heap)
        where[parent, rank] = len(nodes)
        nodes.append((nodes[parent][0] + 1, -score))
        offer(parent, rank + 1)
        offer(len(nodes) - 1, 0)
    at, accepted = 0, 0
    for token in continuation[:horizon]:
        ranks = np.flatnonzero(draft.ids[accepted] == token)
        if not len(ranks) or (at, int(ranks[0])) not in where:
            break
        at = where[at, int(ranks[0])]
        accepted += 1
    return accepted


@dataclass
class Walk:
    """Steps and emitted tokens of one simulated decode; `miss_ranks`: the first misses (−1: not among the top)."""

    steps: int = 0
    tokens: int = 0
    miss_ranks: list[int] = field(default_factory=list)

    def add(self, other: Walk) -> None:
        """Pool with another walk."""
        self.steps += other.steps
        self.tokens += other.tokens
        self.miss_ranks += other.miss_ranks

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per verify step."""
        return self.tokens / max(1, self.steps)


def simulate(tokens: np.ndarray, drafts: list[Draft], accepts: Callable[[Draft, np.ndarray], int]) -> Walk:
    """Decode `tokens` (the continuation; token 0 is the first root, given by prefill) with drafts[i] made at root i."""
    walk, at, last = Walk(), 0, len(tokens) - 1
    while at < last:
        rest = tokens[at + 1 :]
        taken = accepts(drafts[at], rest)
        if taken < min(len(rest), len(drafts[at].ids)):
            ranks = np.flatnonzero(drafts[at].ids[taken] == rest[taken])
            walk.miss_ranks.append(int(ranks[0]) if len(ranks) else -1)
        step = min(taken + 1, len(rest))
        walk.steps += 1
        walk.tokens += step
        at += step
    return walk
