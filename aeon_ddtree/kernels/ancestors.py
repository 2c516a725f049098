# SPDX-License-Identifier: Apache-2.0
"""Who is above whom in a window: masks and depths from parent pointers, by pointer doubling (no loop over rows)."""

from __future__ import annotations

import torch
from torch import Tensor

from aeon_ddtree.kernels.checks import Shapes, check_layout, check_parents, check_width
from aeon_ddtree.kernels.dispatch import takes_triton


def safe_parent(parent: Tensor) -> Tensor:
    """`row -> parent row` int64, with whatever is not an earlier row replaced by −1 (bad pointers become padding)."""
    row = torch.arange(parent.shape[1], device=parent.device)
    parent = parent.long()
    return torch.where((parent >= 0) & (parent < row), parent, -1)


def real_rows(parent: Tensor) -> Tensor:
    """bool [R, W]: row 0 and every row that has a parent; the others are padding. Expects `safe_parent` output."""
    real = parent >= 0
    real[:, 0] = True
    return real


def _levels(width: int) -> int:
    """Doubling steps that reach the deepest possible ancestor, width − 1 links away."""
    return max(width - 1, 0).bit_length()


def ancestor_mask(parent: Tensor) -> Tensor:
    """Ancestors-or-self mask of each window.

    parent: int [R, W], `row -> parent row`, −1 for row 0 and padding. Returns bool [R, W, W]: [r, i, j] is True iff
    j is i or an ancestor of i. A padding row sees itself alone. Lower triangular, since parents come first.
    """
    Shapes()("parent", parent, "R W", "int")
    check_width("parent", parent.shape[1])
    check_parents(parent)
    if takes_triton(parent):
        from aeon_ddtree.kernels import ancestors_triton

        check_layout("parent", parent, 1)
        return ancestors_triton.ancestors(parent)
    return mask_from_safe(safe_parent(parent))


def mask_from_safe(parent: Tensor) -> Tensor:
    """`ancestor_mask` without checks; expects `safe_parent` output."""
    requests, width = parent.shape
    mask = torch.eye(width, dtype=torch.bool, device=parent.device).expand(requests, width, width)
    if width == 1:
        return mask
    # Row W stands for "above the root": it sees nothing and points to itself.
    mask = torch.cat([mask, mask.new_zeros(requests, 1, width)], dim=1)
    hop = torch.where(parent < 0, width, parent)
    hop = torch.cat([hop, hop.new_full((requests, 1), width)], dim=1)
    for _ in range(_levels(width)):
        mask = mask | mask.gather(1, hop[..., None].expand(-1, -1, width))
        hop = hop.gather(1, hop)
    return mask[:, :width]


def depth_of(parent: Tensor) -> Tensor:
    """Links between each row and the root: parent int [R, W] -> int64 [R, W], 0 for the root and for padding."""
    Shapes()("parent", parent, "R W", "int")
    check_width("parent", parent.shape[1])
    check_parents(parent)
    parent = safe_parent(parent)
    requests, width = parent.shape
    hop = torch.where(parent < 0, width, parent)
    depth = (parent >= 0).long()
    hop = torch.cat([hop, hop.new_full((requests, 1), width)], dim=1)
    depth = torch.cat([depth, depth.new_zeros(requests, 1)], dim=1)
    for _ in range(_levels(width)):
        depth = depth + depth.gather(1, hop)
        hop = hop.gather(1, hop)
    return depth[:, :width]
