# SPDX-License-Identifier: Apache-2.0
"""Tree building in Triton: one program per request; a selected node costs a few reductions over the window.

Works as the reference does: every row in the tree offers its next child, and the best offer becomes a row. A cell names
a candidate as (depth − 1) · stride + rank in the request's table, where a further rank of −inf stands for "no more
siblings" and a further depth of −inf for "no children". Carried tokens are merged into the table first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aeon_ddtree.kernels.build_tree.reference import Built

_LAST: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _fill_table(
    token_ptr, logp_ptr, carried_ptr, carried_max, table, names, forced, horizon, ranks, stride,
    CARRIES: tl.constexpr, DEPTHS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """table fp64, names int64 [(k + 2) · stride]. Returns the length of the rank-0 path of real candidates."""
    depth, rank = tl.arange(0, DEPTHS)[:, None], tl.arange(0, RANKS)[None, :]
    real = (rank < ranks) & (depth < horizon)
    logp = tl.load(logp_ptr + depth * ranks + rank, mask=real, other=-float("inf")).to(tl.float64)
    logp = tl.where(logp == logp, logp, -float("inf"))
    logp = tl.where(logp == float("inf"), 0.0, logp)
    token = tl.load(token_ptr + depth * ranks + rank, mask=real, other=0).to(tl.int64)
    place = rank + tl.zeros_like(depth)
    alive = tl.max(tl.where((rank == 0) & (logp > -float("inf")), 1, 0), axis=1)
    if CARRIES:
        has = depth < forced
        head = tl.load(carried_ptr + depth, mask=has & (depth < carried_max), other=0).to(tl.int64)
        # The candidate equal to the carried token is dropped; those before it move one rank on to make room.
        double = real & has & (token == head)
        logp = tl.where(double, -float("inf"), logp)
        moved = rank + 1 - tl.cumsum(double.to(tl.int32), axis=1)
        place = tl.where(has, tl.where(double, stride - 1, moved), rank)
        at_head = table + depth * stride
        tl.store(at_head, tl.zeros_like(depth).to(tl.float64), mask=has)
        tl.store(names + depth * stride, head, mask=has)
        alive = tl.maximum(alive, (tl.arange(0, DEPTHS) < forced).to(tl.int32))
    inside = (place < stride) & (depth < horizon + 2)
    tl.store(table + depth * stride + place, logp, mask=inside)
    tl.store(names + depth * stride + place, token, mask=inside)
    tl.debug_barrier()  # other lanes read what this one wrote
    dead = (alive == 0) | (tl.arange(0, DEPTHS) >= horizon)
    return tl.min(tl.where(dead, tl.arange(0, DEPTHS), _LAST))


@triton.jit
def _build(
    token_ptr, logp_ptr, root_ptr, carried_ptr, num_carried_ptr, max_nodes_ptr, chain_only_ptr, table_ptr, names_ptr,
    place_ptr, out_token, out_parent, out_depth, out_nodes, budget, spine, leaves, horizon, ranks, stride, carried_max,
    CARRIES: tl.constexpr, CAPPED: tl.constexpr, CHAINS: tl.constexpr, ROOT_LEAVES: tl.constexpr, DEPTHS: tl.constexpr,
    RANKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    width = budget + 1
    table, names = table_ptr + request * (horizon + 2) * stride, names_ptr + request * (horizon + 2) * stride
    num_carried = tl.full((), 0, tl.int32)
    if CARRIES:
        num_carried = tl.load(num_carried_ptr + request).to(tl.int32)
        num_carried = tl.maximum(tl.minimum(num_carried, tl.minimum(horizon, carried_max)), 0)
    candidates = request * horizon * ranks
    chain = _fill_table(
        token_ptr + candidates, logp_ptr + candidates, carried_ptr + request * carried_max, carried_max, table, names,
        num_carried, horizon, ranks, stride, CARRIES, DEPTHS, RANKS,
    )  # fmt: skip
    limit = tl.full((), 0, tl.int32) + budget
    if CAPPED:
        limit = tl.minimum(limit, tl.maximum(tl.load(max_nodes_ptr + request), 0).to(tl.int32))
    only = tl.full((), 0, tl.int32)
    if CHAINS:
        only = tl.load(chain_only_ptr + request).to(tl.int32)
    first = tl.maximum(num_carried, spine)
    first = tl.minimum(tl.where(only != 0, horizon, first), tl.minimum(limit, chain))

    row = tl.arange(0, ROWS)
    placed = row <= first
    cell = tl.where(placed & (row > 0), (row - 1) * stride, 0)
    parent = tl.where(placed, row - 1, -1)
    on_spine = placed.to(tl.int32)
    count = first
    if ROOT_LEAVES:
        alternative = tl.load(table + row, mask=(row > 0) & (row < stride), other=-float("inf"))
        none = (alternative == -float("inf")) & (row > 0)
        offered = tl.minimum(tl.min(tl.where(none, row, ROWS)) - 1, leaves)
        count = first + tl.where(only != 0, 0, tl.minimum(offered, limit - first))
        leaf = (row > first) & (row <= count)
        cell = tl.where(leaf, row - first, cell)
        parent = tl.where(leaf, 0, parent)
    else:
        limit = tl.where(only != 0, first, limit)
        score = tl.load(table + cell, mask=placed & (row > 0), other=0.0)
        score = tl.cumsum(score)
        # pos: the child that a row offers next; key: its place in a tie, by rank and then by the parent's entry.
        followed = (row < first).to(tl.int32)
        pos = tl.where(placed, row * stride + followed, 0)
        key = followed * ROWS + row
        offer = tl.where(placed, score + tl.load(table + pos, mask=placed, other=0.0), -float("inf"))
        best = tl.max(offer)
        while (count < limit) & (best > -float("inf")):
            pick = tl.min(tl.where(offer == best, key, _LAST))
            mother = pick % ROWS
            chosen = row == mother
            taken = tl.sum(tl.where(chosen, pos, 0))
            above = tl.sum(tl.where(chosen, score, 0.0))
            heir = tl.sum(tl.where(chosen, on_spine, 0))
            below = (taken // stride + 1) * stride
            child, sibling = tl.load(table + below), tl.load(table + taken + 1)
            count += 1
            new = row == count
            parent = tl.where(new, mother, parent)
            cell = tl.where(new, taken, cell)
            on_spine = tl.where(new & (taken % stride == 0), heir, on_spine)
            score = tl.where(new, best, score)
            pos = tl.where(new, below, tl.where(chosen, taken + 1, pos))
            key = tl.where(new, count, tl.where(chosen, pick + ROWS, key))
            offer = tl.where(new, best + child, tl.where(chosen, above + sibling, offer))
            best = tl.max(offer)

    # Selection order -> row order: the rank-0 path, then branches, then padding.
    used = row <= count
    branch = (used & (on_spine == 0)).to(tl.int32)
    place = tl.where(on_spine != 0, tl.cumsum(on_spine), tl.sum(on_spine) + tl.cumsum(branch)) - 1
    place = tl.where(used, place, row)
    tl.store(place_ptr + request * ROWS + row, place)
    tl.debug_barrier()
    node = used & (row > 0)
    above_place = tl.load(place_ptr + request * ROWS + parent, mask=node, other=-1)
    token = tl.load(names + cell, mask=node, other=0)
    token = tl.where(row == 0, tl.load(root_ptr + request).to(tl.int64), token)
    out = request * width + place
    inside = row < width
    tl.store(out_token + out, token, mask=inside)
    tl.store(out_parent + out, above_place.to(tl.int64), mask=inside)
    tl.store(out_depth + out, tl.where(node, cell // stride + 1, 0).to(tl.int64), mask=inside)
    tl.store(out_nodes + request, count.to(tl.int64))


def build(
    token: Tensor, logp: Tensor, root: Tensor, budget: int, spine: int, leaves: int | None, carried: Tensor | None,
    num_carried: Tensor | None, max_nodes: Tensor | None, chain_only: Tensor | None,
) -> Built:  # fmt: skip
    """See `build_tree`, and with leaves `build_root_leaves`."""
    requests, horizon, ranks = token.shape
    device, width = token.device, budget + 1
    carries = carried is not None
    stride = ranks + (2 if carries else 1)
    rows = triton.next_power_of_2(max(width, 2))
    depths, padded = triton.next_power_of_2(horizon + 2), triton.next_power_of_2(stride)
    out = torch.empty(3, requests, width, dtype=torch.int64, device=device)
    num_nodes = torch.empty(requests, dtype=torch.int64, device=device)
    if requests:
        table = torch.empty(requests, horizon + 2, stride, dtype=torch.float64, device=device)
        names = torch.empty(requests, horizon + 2, stride, dtype=torch.int64, device=device)
        place = torch.empty(requests, rows, dtype=torch.int32, device=device)
        optional = (carried, num_carried, max_nodes, chain_only)
        # An argument that is not there is never read: any pointer will do.
        pointers = [root if x is None else x.contiguous() for x in optional]
        _build[(requests,)](
            token.contiguous(), logp.contiguous(), root.contiguous(), *pointers, table, names, place, *out, num_nodes,
            budget, budget - leaves if leaves is not None else spine, leaves or 0, horizon, ranks, stride,
            carried.shape[1] if carried is not None else 0, carries, max_nodes is not None, chain_only is not None,
            leaves is not None, depths, padded, rows, num_warps=1 if depths * padded <= 1024 else 4,
        )  # fmt: skip
    return *out, num_nodes
