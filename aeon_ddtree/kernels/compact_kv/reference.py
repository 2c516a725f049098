# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch KV compaction: gather from every cache first, then scatter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aeon_ddtree.kernels import checks


def compact(
    caches: Sequence[tuple[Tensor, Tensor]], block_table: Tensor, context_len: Tensor, path: Tensor, path_len: Tensor
) -> None:
    """See `compact_kv`."""
    requests, steps = path.shape
    if not caches or requests == 0 or steps == 0:
        return
    block = caches[0][0].shape[1]
    context_len, path, path_len = context_len.long(), path.long(), path_len.long()
    step = torch.arange(steps, device=path.device)
    moves = (step < path_len[:, None]) & (path != step) & (path >= 0)
    request = torch.arange(requests, device=path.device)[:, None].expand(requests, steps)
    if checks.reads_are_free(path):
        request, moved_step = moves.nonzero(as_tuple=True)
        if request.numel() == 0:
            return
        source, target = path[request, moved_step], moved_step
    else:
        # Entries that stay copy the first request's root onto itself (in place already, so nobody else writes it), or
        # request 0's first entry when no request commits: same bytes to the same place, and no host synchronisation.
        first = (path_len > 0).int().argmax()
        request = torch.where(moves, request, first)
        source, target = torch.where(moves, path, 0), torch.where(moves, step, 0)

    def places(row: Tensor) -> tuple[Tensor, Tensor]:
        position = context_len[request] + row
        number = (position // block).clamp(0, block_table.shape[1] - 1)
        return block_table[request, number].long().clamp(0, caches[0][0].shape[0] - 1), position % block

    come_from, go_to = places(source), places(target)
    tensors = [cache for pair in caches for cache in pair]
    snapshot = [cache[come_from] for cache in tensors]
    for cache, entries in zip(tensors, snapshot, strict=True):
        cache[go_to] = entries
