# SPDX-License-Identifier: Apache-2.0
"""The two commit policies, one contract: `branch` commits the whole walked path, `flat` its consecutive prefix."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aeon_ddtree.commit.plan import CommitPlan
from aeon_ddtree.tree.draft_tree import DraftTree
from aeon_ddtree.verify.walk import Walk


def branch_plan(tree: DraftTree, sampled: Tensor, walk: Walk) -> CommitPlan:
    """Commit every walked row. `sampled` [R, W] is the target's token after each row. Nothing is carried."""
    return _plan(tree, sampled, walk, walk.path_len)


def flat_plan(tree: DraftTree, sampled: Tensor, walk: Walk) -> CommitPlan:
    """Commit rows 0 … j, the consecutive prefix of the walk, and emit the token sampled at row j after them.

    Where the walk went on from there into a branch, the bonus is the branch's first node; the tokens after it, the
    walk's own bonus last, are carried: they head the next tree's spine and are verified again. No row is moved and no
    state of a branch is used.
    """
    steps = torch.arange(walk.path.shape[1], device=walk.path.device)
    consecutive = (walk.path == steps) & (steps < walk.path_len[:, None])
    return _plan(tree, sampled, walk, consecutive.to(torch.int64).cumprod(dim=1).sum(dim=1))


Policy = Callable[[DraftTree, Tensor, Walk], CommitPlan]

POLICIES: dict[str, Policy] = {"branch": branch_plan, "flat": flat_plan}


def plan_for(policy: str, tree: DraftTree, sampled: Tensor, walk: Walk) -> CommitPlan:
    """The plan of the policy called `policy` ("branch" or "flat")."""
    if policy not in POLICIES:
        raise ValueError(f"commit policy {policy!r}: expected one of {', '.join(sorted(POLICIES))}")
    return POLICIES[policy](tree, sampled, walk)


def _plan(tree: DraftTree, sampled: Tensor, walk: Walk, length: Tensor) -> CommitPlan:
    """Commit the first length[r] >= 1 walked rows; of what was walked beyond them, all but the bonus is carried."""
    width = walk.path.shape[1]
    steps = torch.arange(width, device=walk.path.device)
    committed = steps < length[:, None]
    row = walk.path.clamp(min=0)
    # drawn[r, i] is the target's token after walked row i, for i < path_len: also the token of walked row i + 1.
    drawn = sampled.gather(1, row)
    later = length[:, None] + steps  # position in `drawn` of carried token 0, 1, …
    is_carried = later < walk.path_len[:, None]
    path = torch.where(committed, walk.path, -1)
    return CommitPlan(
        path=path,
        parent_rows=torch.where(committed, tree.parent.gather(1, row), -1),
        num_accepted=length - 1,
        num_emitted=length,
        bonus=drawn.gather(1, length[:, None] - 1).squeeze(1),
        emitted=torch.where(committed, drawn, -1),
        moves=((path != steps) & committed).any(dim=1),
        carried=torch.where(is_carried, drawn.gather(1, later.clamp(max=width - 1)), -1),
        num_carried=walk.path_len - length,
    )
