# SPDX-License-Identifier: Apache-2.0
"""Counters of verification, kept on the device and read now and then, never to decide anything."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aeon_ddtree.commit.plan import CommitPlan
from aeon_ddtree.tree.draft_tree import DraftTree
from aeon_ddtree.verify.walk import Walk

FALLBACKS = ("grammar", "token_budget", "model_length")
"""Why a step may verify a chain-shaped or shortened tree."""


class Stats:
    """Sums over request-steps (one request in one step).

    steps            request-steps that emitted tokens; the one that ends a prompt is left out, it verifies nothing
    emitted          tokens they emitted; steps + accepted = emitted
    nodes            drafted nodes verified
    off_spine        walked nodes that are not on the rank-0 path (under `flat` their tokens are carried, not committed)
    after_off_spine  right tokens found after the first such node of a step, the walk's own bonus included
    length[n]        steps that accepted n nodes; n = 0 .. k
    offered[d]       steps whose tree reached depth d + 1
    fallbacks        request-steps by reason
    """

    def __init__(self, horizon: int, device: torch.device) -> None:
        self.horizon = horizon
        size = 5 + 2 * (horizon + 1)
        self._counts = torch.zeros(size, dtype=torch.int64, device=device)
        self._fallbacks = dict.fromkeys(FALLBACKS, 0)

    def fallback(self, reason: str, count: int = 1) -> None:
        self._fallbacks[reason] += count

    def add(self, tree: DraftTree, walk: Walk, plan: CommitPlan, counted: Tensor) -> None:
        """Count a step. counted [R] bool: requests past their prompt."""
        on = counted.to(torch.int64)
        # The rank-0 path is the prefix of rows whose parent is the row before: a node off it has another parent.
        rows = torch.arange(tree.width, device=tree.device)
        spine = ((tree.parent == rows - 1) & (rows > 0)).to(torch.int64)
        spine[:, 0] = 1
        spine = spine.cumprod(dim=1).bool()
        off = (walk.path > 0) & ~spine.gather(1, walk.path.clamp(min=0))
        after = torch.where(off.any(dim=1), walk.path_len - off.to(torch.int64).argmax(dim=1), 0)
        depth = tree.depth.amax(dim=1)
        length = torch.zeros(self.horizon + 1, dtype=torch.int64, device=on.device)
        length.scatter_add_(0, plan.num_accepted.clamp(max=self.horizon), on)
        offered = ((depth[:, None] > torch.arange(self.horizon, device=on.device)) * on[:, None]).sum(dim=0)
        head = torch.stack(
            (
                on.sum(),
                (plan.num_emitted * on).sum(),
                (tree.num_nodes * on).sum(),
                (off.sum(dim=1) * on).sum(),
                (after * on).sum(),
            )
        )
        self._counts += torch.cat((head, length, offered, head.new_zeros(1)))

    def read(self, reset: bool = False) -> dict[str, Any]:
        """The counters as plain numbers; synchronises with the device."""
        values = self._counts.tolist()
        k = self.horizon
        result = {
            "steps": values[0],
            "emitted": values[1],
            "nodes": values[2],
            "off_spine": values[3],
            "after_off_spine": values[4],
            "length": values[5 : 6 + k],
            "offered": values[6 + k : 6 + 2 * k],
            "fallbacks": dict(self._fallbacks),
        }
        if reset:
            self._counts.zero_()
            self._fallbacks = dict.fromkeys(FALLBACKS, 0)
        return result
