# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch tree building, batched over requests; one pass per selected node, none per candidate."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from aeon_ddtree.kernels import checks

Built = tuple[Tensor, Tensor, Tensor, Tensor]


class _Plan(NamedTuple):
    """token int64, logp fp64 [R, k, K] with carried tokens merged in, and per request: limit, chain, forced [R].

    limit: most nodes; chain: length of the rank-0 path of real candidates; forced: carried nodes; only: chain_only.
    """

    token: Tensor
    logp: Tensor
    limit: Tensor
    chain: Tensor
    forced: Tensor
    only: Tensor


def _plan(
    token: Tensor, logp: Tensor, budget: int, carried: Tensor | None, num_carried: Tensor | None,
    max_nodes: Tensor | None, chain_only: Tensor | None,
) -> _Plan:  # fmt: skip
    requests = token.shape[0]
    # fp64 sums: the order of selection does not hang on rounding.
    token, logp = token.long(), logp.double().nan_to_num(nan=-torch.inf, posinf=0.0, neginf=-torch.inf)
    limit = token.new_full((requests,), budget)
    forced = torch.zeros_like(limit)
    if max_nodes is not None:
        limit = torch.minimum(limit, max_nodes.long().clamp(min=0))
    if carried is not None and num_carried is not None:
        token, logp, forced = _merge(token, logp, carried.long(), num_carried.long())
    chain = (logp[:, :, 0] > -torch.inf).long().cumprod(1).sum(1)
    only = torch.zeros_like(limit, dtype=torch.bool) if chain_only is None else chain_only
    return _Plan(token, logp, limit, chain, forced, only)


def _merge(token: Tensor, logp: Tensor, carried: Tensor, num_carried: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Carried tokens become rank 0 of their depths, in a new rank; their duplicates move to the end as −inf."""
    horizon = token.shape[1]
    forced = num_carried.clamp(0, min(horizon, carried.shape[1]))
    head = torch.nn.functional.pad(carried[:, :horizon], (0, max(0, horizon - carried.shape[1])))
    has = (torch.arange(horizon, device=token.device) < forced[:, None])[..., None]
    drop = has & (token == head[..., None])
    rest = logp.masked_fill(drop, -torch.inf)
    merged = torch.cat([torch.where(has, head[..., None], token[..., :1]), token], dim=-1)
    weight = torch.cat([torch.where(has, 0.0, logp[..., :1]), rest], dim=-1)
    # Without a carried token the new first rank repeats rank 0: the repetition goes to the end too.
    gone = torch.cat([torch.zeros_like(has), drop], dim=-1)
    gone[..., 1:2] |= ~has
    order = gone.int().argsort(dim=-1, stable=True)
    weight = weight.masked_fill(gone, -torch.inf)
    return merged.gather(-1, order), weight.gather(-1, order), forced


def _finish(token: Tensor, parent: Tensor, depth: Tensor, num_nodes: Tensor, root: Tensor) -> Built:
    """Blank the padding rows and put the root in row 0."""
    row = torch.arange(token.shape[1], device=token.device)
    node = (row > 0) & (row <= num_nodes[:, None])
    token = torch.where(node, token, 0)
    token[:, 0] = root.long()
    return token, torch.where(node, parent, -1), torch.where(node, depth, 0), num_nodes


def best_first(
    token: Tensor, logp: Tensor, root: Tensor, budget: int, spine: int, carried: Tensor | None,
    num_carried: Tensor | None, max_nodes: Tensor | None, chain_only: Tensor | None,
) -> Built:  # fmt: skip
    """See `build_tree`."""
    plan = _plan(token, logp, budget, carried, num_carried, max_nodes, chain_only)
    requests, horizon, ranks = plan.token.shape
    width, device = budget + 1, token.device
    forced = torch.maximum(plan.forced, plan.forced.new_full((), spine))
    forced = torch.minimum(torch.where(plan.only, horizon, forced), torch.minimum(plan.limit, plan.chain))
    limit = torch.where(plan.only, forced, plan.limit)

    # A further depth of −inf stands for "no children", a further rank for "no more siblings"; one depth beyond that is
    # read, and dropped, for a request that has nothing left to offer.
    table = torch.nn.functional.pad(plan.logp, (0, 1, 0, 2), value=-torch.inf).flatten(1)
    names = torch.nn.functional.pad(plan.token, (0, 1, 0, 2)).flatten(1)
    stride = ranks + 1

    # The forced nodes are rows 1 …: row i is rank 0 of depth i under row i − 1. A cell is parent's depth · stride +
    # rank. `cell` is each row's own candidate, `pos` the child that it offers next (rank 0, then one rank on), `offer`
    # what that would score, `key` its place in a tie. One spare column takes the writes of requests that are complete.
    row = torch.arange(width + 1, device=device)
    placed = (row <= forced[:, None]) & (row < width)
    cell = torch.where(placed, (row - 1).clamp(min=0) * stride, 0)
    parent = torch.where(placed, row - 1, -1)
    steps = min(horizon, budget)
    score = torch.nn.functional.pad(plan.logp[:, :steps, 0], (1, width - steps))
    score = score.masked_fill_(~placed, 0).cumsum(1)
    followed = row < forced[:, None]
    pos = torch.where(placed, row * stride + followed, 0)
    key = torch.where(followed, width + row, row)
    reach = table.shape[1] - 1
    offer = torch.where(placed, score + table.gather(1, pos.clamp(max=reach)), -torch.inf)
    count, limit = forced[:, None].clone(), limit[:, None]

    # Forced nodes need no search; only on the CPU is it known for free how many all requests have.
    free = checks.reads_are_free(token)
    for _ in range(int(forced.min()) if free and requests else 0, budget):
        best = offer[:, :width].amax(1, keepdim=True)
        pick = key[:, :width].masked_fill(offer[:, :width] < best, stride * width).amin(1, keepdim=True)
        mother = pick % width
        grows = (best > -torch.inf) & (count < limit)
        if free and not grows.any():
            break
        count += grows
        place, source = torch.where(grows, count, width), torch.where(grows, mother, width)
        taken, above = pos.gather(1, mother), score.gather(1, mother)
        below = (taken // stride + 1) * stride
        parent.scatter_(1, place, mother)
        cell.scatter_(1, place, taken)
        score.scatter_(1, place, best)
        key.scatter_(1, place, count)
        pos.scatter_(1, place, below)
        offer.scatter_(1, place, best + table.gather(1, below))
        key.scatter_(1, source, pick + width)
        pos.scatter_(1, source, taken + 1)
        offer.scatter_(1, source, above + table.gather(1, taken + 1))

    cell, parent, row = cell[:, :width], parent[:, :width], row[:width]
    node = (row > 0) & (row <= count)
    order = _row_order(parent, node, cell % stride == 0)
    place_of = torch.empty_like(order).scatter_(1, order, row.expand(requests, width))
    parent = place_of.gather(1, parent.clamp(min=0)).gather(1, order)
    depth = (cell // stride + 1).gather(1, order)
    return _finish(names.gather(1, cell).gather(1, order), parent, depth, count[:, 0], root)


def _row_order(parent: Tensor, node: Tensor, first: Tensor) -> Tensor:
    """Selection order -> row order: the root, the rank-0 path, then branches, then padding. All [R, W].

    A row is on the rank-0 path iff it and all its ancestors are first choices, found by pointer doubling.
    """
    spine = first & node
    spine[:, 0] = True
    hop = parent.clamp(min=0)
    for _ in range((parent.shape[1] - 1).bit_length()):
        spine = spine & spine.gather(1, hop)
        hop = hop.gather(1, hop)
    return torch.where(spine, 0, 2 - node.long()).argsort(dim=1, stable=True)


def root_leaves(
    token: Tensor, logp: Tensor, root: Tensor, budget: int, leaves: int, carried: Tensor | None,
    num_carried: Tensor | None, max_nodes: Tensor | None, chain_only: Tensor | None,
) -> Built:  # fmt: skip
    """See `build_root_leaves`."""
    plan = _plan(token, logp, budget, carried, num_carried, max_nodes, chain_only)
    requests, horizon, ranks = plan.token.shape
    row = torch.arange(budget + 1, device=token.device).expand(requests, budget + 1)
    wanted = torch.maximum(plan.forced, plan.forced.new_full((), budget - leaves))
    wanted = torch.where(plan.only, horizon, wanted)
    length = torch.minimum(wanted, torch.minimum(plan.limit, plan.chain))
    alternatives = (plan.logp[:, 0, 1:] > -torch.inf).long().cumprod(1).sum(1).clamp(max=leaves)
    extra = torch.minimum(alternatives, plan.limit - length).masked_fill(plan.only, 0)

    on_spine = row <= length[:, None]
    spine_cell = (row - 1).clamp(0, horizon - 1) * ranks
    leaf_cell = (row - length[:, None]).clamp(0, ranks - 1)
    names = plan.token.flatten(1).gather(1, torch.where(on_spine, spine_cell, leaf_cell))
    parent = torch.where(on_spine, row - 1, 0)
    depth = torch.where(on_spine, row, 1)
    return _finish(names, parent, depth, length + extra, root)
