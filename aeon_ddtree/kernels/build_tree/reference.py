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

    # The forced nodes are rows 1 …: row i is rank 0 of depth i under row i − 1.
    row = torch.arange(width, device=device)
    placed = row <= forced[:, None]
    level = row.clamp(max=horizon).expand(requests, width)
    depth = torch.where(placed, level, 0)
    parent = torch.where(placed, row - 1, -1)
    chosen = torch.where(placed, (level - 1).clamp(min=0) * stride, 0)
    on_spine = placed.clone()
    gains = torch.nn.functional.pad(plan.logp[:, :, 0], (1, 0))[:, :width].masked_fill(~placed[:, : horizon + 1], 0)
    score = torch.nn.functional.pad(gains.cumsum(1), (0, max(0, width - gains.shape[1])))
    # Candidate of each row: its next child, first rank 0, after each selection one rank on.
    next_rank = (row < forced[:, None]).long()
    offer = torch.where(placed, score + table.gather(1, depth * stride + next_rank), -torch.inf)
    count = forced.clone()
    request = torch.arange(requests, device=device)
    far = stride * width

    # Forced nodes need no search; only on the CPU is it known for free how many all requests have.
    free = checks.reads_are_free(token)
    least = int(forced.min()) if free and requests else 0
    for _ in range(least, budget):
        best = offer.amax(1)
        tied = offer == best[:, None]
        mother = torch.where(tied, next_rank * width + row, far).amin(1) % width
        grows = (best > -torch.inf) & (count < limit)
        if free and not grows.any():
            break
        count = count + grows
        # A request that does not grow writes its last row again, with what is there.
        place = count
        rank = next_rank[request, mother]
        mother_depth = depth[request, mother]
        cell = mother_depth * stride + rank

        def put(target: Tensor, value: Tensor, place: Tensor = place, grows: Tensor = grows) -> None:
            target[request, place] = torch.where(grows, value, target[request, place])

        put(depth, mother_depth + 1)
        put(parent, mother)
        put(chosen, cell)
        put(score, best)
        put(on_spine, on_spine[request, mother] & (rank == 0))
        put(offer, best + table.gather(1, ((mother_depth + 1) * stride)[:, None])[:, 0])
        following = score[request, mother] + table.gather(1, cell[:, None] + 1)[:, 0]
        offer[request, mother] = torch.where(grows, following, offer[request, mother])
        next_rank[request, mother] = torch.where(grows, rank + 1, rank)

    # selection order -> row order: the rank-0 path, then branches, then padding.
    used = row <= count[:, None]
    order = torch.where(used, (~on_spine).long(), 2).argsort(dim=1, stable=True)
    place_of = torch.empty_like(order).scatter_(1, order, row.expand(requests, width))
    parent = place_of.gather(1, parent.clamp(min=0)).gather(1, order)
    return _finish(names.gather(1, chosen).gather(1, order), parent, depth.gather(1, order), count, root)


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
