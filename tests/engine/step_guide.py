# SPDX-License-Identifier: Apache-2.0
"""Trees of the tests' own choosing, verified by the engine instead of the drafter's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from step_probes import Probe


def guide(
    probe: Probe,
    continuations: list[list[int]],
    seed: int = 0,
    reach: int = 4,
    padded: bool = False,
    chains: bool = False,
) -> None:
    """Verify random trees instead of the drafter's. One random path of each carries the request's next tokens, 0 to
    `reach` of them, so that paths through any branch are accepted; the other tokens are drawn at random.

    continuations: every request's output, known beforehand; padded: windows are filled to a random part only;
    chains: a node's parent is always the row before, as deep as the horizon allows.
    """
    runner = probe.runner
    random = np.random.default_rng(seed)

    def put(original: Any) -> Any:
        def wrapped(req_ids: list[str], tree: Any) -> None:
            verdict = runner._verdict
            done = verdict.base_index + verdict.plan.num_emitted
            token, parent, depth, nodes = (x.clone() for x in (tree.token, tree.parent, tree.depth, tree.num_nodes))
            for index, req_id in enumerate(req_ids):
                coming = continuations[probe.request(req_id)][int(done[index]) :][: random.integers(0, reach + 1)]
                count = int(random.integers(1, tree.budget + 1)) if padded else tree.budget
                made = random_tree(
                    random, min(count, runner.horizon) if chains else count, runner.horizon, coming, chains
                )
                count = len(made[0])
                for target, values in ((token, made[0]), (parent, made[1]), (depth, made[2])):
                    target[index, 1:] = -1 if target is parent else 0
                    target[index, 1 : 1 + count] = torch.tensor(values, dtype=torch.int64)
                nodes[index] = count
            original(req_ids, type(tree)(token, parent, depth, nodes))

        return wrapped

    probe.replace(runner.trees, "put", put)


def random_tree(
    random: np.random.Generator, count: int, horizon: int, coming: list[int], chain: bool
) -> tuple[list[int], list[int], list[int]]:
    """(token, parent, depth) of `count` nodes; a random path from the root carries `coming`, as far as it reaches."""
    parent, depth = [-1], [0]
    for row in range(1, count + 1):
        above = row - 1 if chain or random.random() < 0.5 else int(random.integers(0, row))
        while depth[above] >= horizon:
            above = parent[above]
        parent.append(above)
        depth.append(depth[above] + 1)
    path = [int(random.integers(1, count + 1))]
    while parent[path[0]] > 0:
        path.insert(0, parent[path[0]])
    right = {row: coming[i] for i, row in enumerate(path[: len(coming)])}
    taken: dict[int, set[int]] = {}
    for row, token in right.items():
        taken.setdefault(parent[row], set()).add(token)
    tokens = []
    for row in range(1, count + 1):
        token = right.get(row)
        if token is None:
            used = taken.setdefault(parent[row], set())
            token = int(random.integers(0, 256))
            while token in used:
                token = (token + 1) % 256
            used.add(token)
        tokens.append(token)
    return tokens, parent[1:], depth[1:]
