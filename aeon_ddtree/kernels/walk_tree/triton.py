# SPDX-License-Identifier: Apache-2.0
"""The walk in Triton: one warp per request goes from row to row, each step one search over the window."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["W", "max_len"])
def _walk_kernel(
    token, parent, num_nodes, sampled, path, path_len, bonus, W, max_len,
    token_r, token_w, parent_r, parent_w, nodes_r, sampled_r, sampled_w,
    BLOCK_W: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Program r: request r."""
    r = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK_W)
    nodes = tl.load(num_nodes + r * nodes_r)
    tokens = tl.load(token + r * token_r + row * token_w, mask=row < W, other=0)
    parents = tl.load(parent + r * parent_r + row * parent_w, mask=row < W, other=-1).to(tl.int32)
    # Only an earlier row can be a parent: whatever else stands there makes its row padding.
    parents = tl.where((parents < row) & (row <= nodes), parents, -1)

    place = tl.arange(0, BLOCK_P)
    rows = tl.where(place == 0, 0, -1)
    here = nodes.to(tl.int32) * 0
    count = here + 1
    last = tl.load(sampled + r * sampled_r).to(tl.int64)
    going = max_len > 1
    while going:
        child = tl.min(tl.where((parents == here) & (tokens == last), row, BLOCK_W), 0)
        if child < BLOCK_W:
            rows = tl.where(place == count, child, rows)
            here = child
            count += 1
            last = tl.load(sampled + r * sampled_r + child.to(tl.int64) * sampled_w).to(tl.int64)
        going = (child < BLOCK_W) & (count < max_len)
    tl.store(path + r * max_len + place, rows.to(tl.int64), mask=place < max_len)
    tl.store(path_len + r, count.to(tl.int64))
    tl.store(bonus + r, last)


def walk(
    token: Tensor, parent: Tensor, num_nodes: Tensor, sampled: Tensor, max_len: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `walk_tree`."""
    requests, width = token.shape
    path = torch.empty(requests, max_len, dtype=torch.int64, device=token.device)
    path_len, bonus = torch.empty(2, requests, dtype=torch.int64, device=token.device)
    if requests:
        _walk_kernel[(requests,)](
            token, parent, num_nodes, sampled, path, path_len, bonus, width, max_len,
            *token.stride(), *parent.stride(), num_nodes.stride(0), *sampled.stride(),
            triton.next_power_of_2(width), triton.next_power_of_2(max_len), num_warps=1,
        )  # fmt: skip
    return path, path_len, bonus
