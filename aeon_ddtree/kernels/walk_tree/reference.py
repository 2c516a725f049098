# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch walk, by pointer doubling: a row is on the path iff it and all its ancestors match."""

from __future__ import annotations

import torch
from torch import Tensor

from aeon_ddtree.kernels.ancestors import safe_parent


def walk(
    token: Tensor, parent: Tensor, num_nodes: Tensor, sampled: Tensor, max_len: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `walk_tree`."""
    requests, width = token.shape
    row = torch.arange(width, device=token.device)
    token, sampled, num_nodes = token.long(), sampled.long(), num_nodes.long()
    parent = safe_parent(parent)
    above = parent.clamp(min=0)
    match = (parent >= 0) & (row <= num_nodes[:, None]) & (token == sampled.gather(1, above))
    # Of several matching children of one parent the first stands: drop a match that has an earlier one beside it.
    twin = match[:, None, :] & (above[:, :, None] == above[:, None, :]) & (row < row[:, None])
    good = match & ~twin.any(-1)
    good[:, 0] = True

    depth = (parent >= 0).long()
    hop = above
    for _ in range((width - 1).bit_length()):
        good = good & good.gather(1, hop)
        depth = depth + depth.gather(1, hop)
        hop = hop.gather(1, hop)

    # Good rows form one chain, so their depths differ; whatever does not fit goes to a spare column.
    place = torch.where(good & (depth < max_len), depth, max_len)
    path = place.new_full((requests, max_len + 1), -1)
    path.scatter_(1, place, row.expand(requests, width))
    path = path[:, :max_len]
    path_len = (path >= 0).sum(1)
    bonus = sampled.gather(1, path.gather(1, path_len[:, None] - 1))[:, 0]
    return path, path_len, bonus
