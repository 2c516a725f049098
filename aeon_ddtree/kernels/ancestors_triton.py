# SPDX-License-Identifier: Apache-2.0
"""The ancestor mask on the device, in one launch: every row walks up to its root."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16


@triton.jit(do_not_specialize=["width", "stride_parent"])
def ancestor_kernel(parent, seen, width, stride_parent, ROWS: tl.constexpr, COLS: tl.constexpr):
    """One program per (block of rows, request); as many steps as its deepest row has links."""
    req = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    place = tl.where(row < width, row, -1)
    mask = tl.zeros([ROWS, COLS], dtype=tl.int1)
    while tl.max(place, 0) >= 0:
        mask = mask | (col[None, :] == place[:, None])
        above = tl.load(parent + req * stride_parent + place, mask=place >= 0, other=-1).to(tl.int32)
        # A pointer that is not to an earlier row ends the walk, which also bounds it.
        place = tl.where((above >= 0) & (above < place), above, -1)
    inside = (row < width)[:, None] & (col < width)[None, :]
    tl.store(seen + (req * width + row[:, None]) * width + col[None, :], mask.to(tl.int8), mask=inside)


def ancestors(parent: Tensor) -> Tensor:
    """See `ancestors.ancestor_mask`: parent int [R, W] with contiguous rows -> bool [R, W, W]."""
    requests, width = parent.shape
    seen = torch.empty(requests, width, width, dtype=torch.bool, device=parent.device)
    if requests:
        ancestor_kernel[(triton.cdiv(width, _ROWS), requests)](
            parent, seen.view(torch.int8), width, parent.stride(0), ROWS=_ROWS, COLS=triton.next_power_of_2(width)
        )
    return seen
