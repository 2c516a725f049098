# SPDX-License-Identifier: Apache-2.0
"""The fold kernel: a path into the recurrent state of every layer, in place."""

from __future__ import annotations

import triton
import triton.language as tl

from aeon_ddtree.kernels.gated_delta_tree.window import exp


@triton.jit(do_not_specialize=["steps", "width", "path_req"])
def fold_kernel(
    table, slots, has_state, path, path_len, steps, width, heads, state_slot, state_head, path_req,
    GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
    FLAGS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One program per (part of Dv, head) × request × layer. table [L, 4]: addresses of state, u, k, c.

    The sum over the path is formed first and meets the old state in one operation: one rounding at its size.
    """
    PIECES: tl.constexpr = (DV + ROWS - 1) // ROWS
    head = tl.program_id(0) // PIECES
    req = tl.program_id(1).to(tl.int64)
    table += tl.program_id(2) * 4
    length = tl.minimum(tl.load(path_len + req).to(tl.int32), steps)
    slot = tl.load(slots + req).to(tl.int64)
    if (length <= 0) | (slot < 0):
        return
    dk = tl.arange(0, BK)
    dv = (tl.program_id(0) % PIECES) * ROWS + tl.arange(0, ROWS)
    in_k = (dk < DK) if DK < BK else tl.full([BK], 1, tl.int1)
    in_v = (dv < DV) if DV % ROWS else tl.full([ROWS], 1, tl.int1)
    # Addresses come as integers: the compiler must be told that vector loads are aligned (checked by the launcher).
    state = tl.multiple_of(tl.load(table).to(tl.pointer_type(DTYPE)), 16)
    u = tl.multiple_of(tl.load(table + 1).to(tl.pointer_type(tl.float32)), 16)
    k = tl.multiple_of(tl.load(table + 2).to(tl.pointer_type(tl.float32)), 16)
    c = tl.load(table + 3).to(tl.pointer_type(tl.float64))
    place = state + slot * state_slot + head * state_head + dv[:, None] * DK + dk[None, :]
    inside = in_v[:, None] & in_k[None, :]
    known = True
    if FLAGS:
        known = tl.load(has_state + req) != 0
    s0 = tl.load(place, mask=inside & known, other=0.0).to(tl.float32)

    path += req * path_req
    first = req * width
    last = tl.load(path + length - 1).to(tl.int32)
    c_end = tl.load(c + (first + last) * heads + head, mask=(last >= 0) & (last < width), other=0.0)
    added = tl.zeros([ROWS, BK], dtype=tl.float32)
    for step in range(0, length, 16):
        at = step + tl.arange(0, 16)
        row = tl.load(path + at, mask=at < length, other=-1).to(tl.int32)
        ok = (row >= 0) & (row < width)
        line = (first + row) * heads + head
        weight = exp((c_end - tl.load(c + line, mask=ok, other=0.0)).to(tl.float32))
        u_rows = tl.load(u + line[:, None] * DV + dv[None, :], mask=ok[:, None] & in_v[None, :], other=0.0)
        line = (first + row) * (heads // GROUP) + head // GROUP
        k_rows = tl.load(k + line[:, None] * DK + dk[None, :], mask=ok[:, None] & in_k[None, :], other=0.0)
        added = tl.dot(tl.trans(u_rows * weight[:, None]), k_rows, added, input_precision="ieee")
    new = s0 * exp(c_end.to(tl.float32)) + added
    tl.store(place, new.to(DTYPE), mask=inside)
