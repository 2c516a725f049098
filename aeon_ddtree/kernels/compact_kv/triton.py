# SPDX-License-Identifier: Apache-2.0
"""KV compaction in Triton: every cache of every group in one launch, its address and layout read from a table.

One program owns a slice of features of one cache and request. It holds all moved entries of its slice in registers
before it writes the first, so moves may overlap; programs never touch one another's cells.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_FIELDS = 16  # per cache: address, layout, and those of its group
_KEPT = 16  # tables kept per process: one for each set of groups in use
_WORD = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_tables: OrderedDict[tuple[object, ...], tuple[Tensor, Tensor]] = OrderedDict()


@triton.jit(do_not_specialize=["steps", "path_r", "path_i", "len_r"])
def _compact_kernel(
    table, word, path, path_len, steps, path_r, path_i, len_r,
    WIDE_TABLE: tl.constexpr, WIDE_CONTEXT: tl.constexpr, FIELDS: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Program (cache, request, slice): word is a null pointer of the caches' word type."""
    cache, r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    step = tl.arange(0, BLOCK_P)
    length = tl.minimum(tl.load(path_len + r * len_r), steps)
    rows = tl.load(path + r * path_r + step * path_i, mask=step < length, other=-1).to(tl.int32)
    moves = (rows >= 0) & (rows != step)
    if tl.max(moves.to(tl.int32), 0) > 0:
        at = table + cache * FIELDS
        base = tl.load(at).to(tl.pointer_type(word.dtype.element_ty))
        pages, block_size, dim, features = tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
        s_page, s_place, s_head, s_dim = tl.load(at + 5), tl.load(at + 6), tl.load(at + 7), tl.load(at + 8)
        WIDE_T: tl.constexpr = tl.int64 if WIDE_TABLE else tl.int32
        WIDE_C: tl.constexpr = tl.int64 if WIDE_CONTEXT else tl.int32
        block_table = tl.load(at + 9).to(tl.pointer_type(WIDE_T)) + r * tl.load(at + 10)
        table_len = tl.load(at + 11)
        contexts = tl.load(at + 12).to(tl.pointer_type(WIDE_C))
        context = tl.maximum(tl.load(contexts + r * tl.load(at + 13)).to(tl.int64), 0)
        f = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)
        inside = moves[:, None] & (f < features)[None, :]
        feature = (f // dim) * s_head + (f % dim) * s_dim

        source = context + rows
        number = tl.minimum(tl.maximum(source // block_size, 0), table_len - 1)
        page = tl.load(block_table + number, mask=moves, other=0).to(tl.int64)
        page = tl.minimum(tl.maximum(page, 0), pages - 1)
        source_ptr = base + page * s_page + source % block_size * s_place
        entries = tl.load(source_ptr[:, None] + feature[None, :], mask=inside, other=0)
        target = context + step
        number = tl.minimum(tl.maximum(target // block_size, 0), table_len - 1)
        page = tl.load(block_table + number, mask=moves, other=0).to(tl.int64)
        page = tl.minimum(tl.maximum(page, 0), pages - 1)
        target_ptr = base + page * s_page + target % block_size * s_place
        tl.debug_barrier()  # all reads of this program come before its first write
        tl.store(target_ptr[:, None] + feature[None, :], entries, mask=inside)


Group = tuple[Sequence[tuple[Tensor, Tensor]], Tensor, Tensor]


def _tensors(group: Group) -> list[Tensor]:
    return [x for pair in group[0] for x in pair]


def _unit(tensors: Sequence[Tensor]) -> int:
    """Bytes of the widest word, up to 8, in which all these caches can be addressed."""
    size = tensors[0].element_size()
    if any(x.stride(3) != 1 for x in tensors):
        return size
    whole = [x.data_ptr() for x in tensors]
    whole += [n * size for x in tensors for n in (x.shape[3], *x.stride()[:3])]
    return max(size, math.gcd(8, *whole))


def _rows(groups: Sequence[Group], unit: int) -> list[list[int]]:
    """One table row for every distinct cache of a group, in words; layers that share a cache share the row, so it is
    moved once. (Groups may share storage: their block tables do not.)"""
    rows: dict[tuple[int, ...], list[int]] = {}
    for number, group in enumerate(groups):
        _, block_table, context_len = group
        tail = [block_table.data_ptr(), block_table.stride(0), block_table.shape[1]]
        tail += [context_len.data_ptr(), context_len.stride(0), 0, 0]
        for x in _tensors(group):
            packed = unit // x.element_size()
            strides = [n // packed for n in x.stride()[:3]] + [x.stride(3)]
            row = [x.data_ptr(), *x.shape[:2], x.shape[3] // packed, x.shape[2] * x.shape[3] // packed, *strides]
            rows.setdefault((number, *row), row + tail)
    return list(rows.values())


def takes(groups: Sequence[Group]) -> bool:
    """The rule: one word size; block tables dense in their last dimension, all of one dtype, as are the contexts; and
    within a group no two different views that start at the same cell. Everything else is the reference's."""
    tensors = [x for group in groups for x in _tensors(group)]
    views = [{(x.data_ptr(), x.shape, x.stride()) for x in _tensors(group)} for group in groups]
    return (
        len({x.element_size() for x in tensors}) == 1
        and len({table.dtype for _, table, _ in groups}) == 1
        and len({context.dtype for _, _, context in groups}) == 1
        and all(table.stride(1) == 1 and table.shape[1] > 0 for _, table, _ in groups)
        and all(x.numel() > 0 for x in tensors)
        and all(len({view[0] for view in group}) == len(group) for group in views)
    )


def _table(groups: Sequence[Group], unit: int, device: torch.device) -> tuple[Tensor, int]:
    """(table int64 [caches, FIELDS] on the device, its number of rows), made once for each set of buffers.

    The copy is asynchronous, from pinned memory that is kept with it. It cannot be made while a CUDA graph is captured
    (RuntimeError: call the same thing once before).
    """
    rows = _rows(groups, unit)
    key = (device, unit, tuple(map(tuple, rows)))
    if key not in _tables:
        host = torch.tensor(rows, dtype=torch.int64)
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("these caches were never seen before this graph capture: run the step once before")
            host = host.pin_memory()
        _tables[key] = (host.to(device, non_blocking=True), host)
        while len(_tables) > _KEPT:
            _tables.popitem(last=False)
    _tables.move_to_end(key)
    return _tables[key][0], len(rows)


def compact(groups: Sequence[Group], path: Tensor, path_len: Tensor) -> None:
    """See `compact_groups`; `takes` must hold."""
    requests, steps = path.shape
    if requests == 0 or steps == 0:
        return
    tensors = [x for group in groups for x in _tensors(group)]
    unit = _unit(tensors)
    table, count = _table(groups, unit, path.device)
    block_p = triton.next_power_of_2(steps)
    features = max(x.shape[2] * x.shape[3] for x in tensors) * tensors[0].element_size() // unit
    block_f = min(triton.next_power_of_2(features), max(16, 2048 // block_p))
    _compact_kernel[(count, requests, triton.cdiv(features, block_f))](
        table, torch.empty(0, dtype=_WORD[unit], device=path.device), path, path_len, steps,
        *path.stride(), path_len.stride(0), WIDE_TABLE=groups[0][1].dtype == torch.int64,
        WIDE_CONTEXT=groups[0][2].dtype == torch.int64, FIELDS=_FIELDS, BLOCK_P=block_p, BLOCK_F=block_f, num_warps=4,
    )  # fmt: skip
