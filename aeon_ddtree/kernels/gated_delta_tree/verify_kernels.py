# SPDX-License-Identifier: Apache-2.0
"""The verify kernels of the gated delta rule over a tree.

The window is cut into blocks of 16 rows, and (I + A) U = R is a forward substitution over blocks: with the inverse of
I + A_bb at hand, U_b = (I + A_bb)^-1 R_b is final, and leaves R_i − A_ib U_b to the rows i below it.

Up to 16 rows `small_kernel` does everything, one program per (part of Dv, value head, request). For wider windows
`prepare_kernel` first computes what does not involve the state, once per head and with every block in its own program,
and leaves it in `scratch` [R, Hv, W, 2·BW + 32] fp32: per row A_i [BW], the weights of o_i on u [BW], the row of the
block's inverse [16], and 3 factors. `apply_kernel` then reads the state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aeon_ddtree.kernels.gated_delta_tree.window import (
    decays,
    exp,
    gate_input,
    gates,
    inverse_norm,
    product,
    real_rows,
    sees_of,
    sigmoid,
    times_state,
    unit_inverse,
)

# One compiled kernel per number of blocks, whatever the width.
_ANY_WIDTH = ["width", "parent_req", "seen_req"]


@triton.jit
def _store_factors(
    c_out, k_out, k, k_row, req, row, real, head, width, heads, c_hi, c_lo, row_norm,
    GROUP: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    inside = row < width
    tl.store(c_out + (req * width + row) * heads + head, c_hi.to(tl.float64) + c_lo.to(tl.float64), mask=inside)
    if head % GROUP == 0:
        dk = tl.arange(0, BK)
        in_k = (dk < DK) if DK < BK else tl.full([BK], 1, tl.int1)
        key = tl.load(k + row[:, None] * k_row + dk[None, :], mask=real[:, None] & in_k[None, :], other=0.0)
        at = ((req * width + row) * (heads // GROUP) + head // GROUP)[:, None] * DK + dk[None, :]
        tl.store(k_out + at, key.to(tl.float32) * row_norm[:, None], mask=inside[:, None] & in_k[None, :])


@triton.jit(do_not_specialize=_ANY_WIDTH)
def small_kernel(
    q, k, v, a, b, a_log, dt_bias, state, slots, has_state, parent, seen, out, u_out, k_out, c_out,
    scale, width, heads,
    q_req, q_row, q_head, k_req, k_row, k_head, v_req, v_row, v_head, a_req, a_row, a_head, b_req, b_row, b_head,
    state_slot, state_head, parent_req, seen_req,
    GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr, COLS: tl.constexpr,
    PARTS: tl.constexpr, FLAGS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Windows of up to 16 rows. A program owns SPAN columns of a head: one solve, then the state in tiles of COLS.

    The first tile is under way during the solve, each later one during the work on the tile before it.
    """
    head = tl.program_id(1)
    req = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + req).to(tl.int64)
    live = slot >= 0
    known = live
    if FLAGS:
        known = live & (tl.load(has_state + req) != 0)
    # Nothing that is loaded here waits for another load but the slot's.
    row = tl.arange(0, 16)
    inside = row < width
    dk = tl.arange(0, BK)
    in_k = (dk < DK) if DK < BK else tl.full([BK], 1, tl.int1)
    k += req * k_req + head // GROUP * k_head
    q += req * q_req + head // GROUP * q_head
    key = tl.load(k + row[:, None] * k_row + dk[None, :], mask=inside[:, None] & in_k[None, :], other=0.0)
    query = tl.load(q + row[:, None] * q_row + dk[None, :], mask=inside[:, None] & in_k[None, :], other=0.0)
    sees = sees_of(seen + req * seen_req, row, row, inside, width)
    raw = gate_input(a + req * a_req + head * a_head, a_row, dt_bias + head, row, inside)
    beta = tl.load(b + req * b_req + head * b_head + row * b_row, mask=inside, other=0.0).to(tl.float32)
    real = real_rows(parent + req * parent_req, row, width) & live
    dv = tl.program_id(0) * SPAN + tl.arange(0, COLS)
    in_v = (dv < DV) if DV % COLS else tl.full([COLS], 1, tl.int1)
    state += tl.maximum(slot, 0) * state_slot + head * state_head
    place = state + dv[:, None] * DK + dk[None, :]
    coming = tl.load(place, mask=(in_v[:, None] & in_k[None, :]) & known, other=0.0)

    # What padding rows hold is put out here.
    key = tl.where(real[:, None], key, 0.0)
    query = tl.where(real[:, None], query, 0.0)
    if PARTS == 0:
        key = key.to(tl.float32)
        query = query.to(tl.float32)
    sees = sees & real[:, None]
    beta = tl.where(real, sigmoid(beta), 0.0)
    g_hi, g_lo = gates(raw, a_log + head, real)
    c_hi = tl.sum(tl.where(sees, g_hi[None, :], 0.0), 1)
    c_lo = tl.sum(tl.where(sees, g_lo[None, :], 0.0), 1)
    row_norm = inverse_norm(key.to(tl.float32) * key.to(tl.float32))
    query_scale = scale * inverse_norm(query.to(tl.float32) * query.to(tl.float32))
    from_root = exp(c_hi + c_lo)
    decay = decays(sees, c_hi, c_lo, c_hi, c_lo) * row_norm[None, :]
    nothing = tl.zeros([16, 16], dtype=tl.float32)
    overlap = product(key, tl.trans(key), nothing)
    coupling = tl.where(row[None, :] < row[:, None], overlap * decay * (beta * row_norm)[:, None], 0.0)
    inverse = unit_inverse(coupling)
    attend = product(query, tl.trans(key), nothing) * decay * query_scale[:, None]
    key_scale = from_root * row_norm
    query_scale *= from_root

    if tl.program_id(0) == 0:
        tl.store(c_out + (req * width + row) * heads + head, c_hi.to(tl.float64) + c_lo.to(tl.float64), mask=inside)
        if head % GROUP == 0:
            at = ((req * width + row) * (heads // GROUP) + head // GROUP)[:, None] * DK + dk[None, :]
            tl.store(k_out + at, key.to(tl.float32) * row_norm[:, None], mask=inside[:, None] & in_k[None, :])

    v += req * v_req + head * v_head + row[:, None] * v_row
    at = ((req * width + row) * heads + head)[:, None] * DV
    for start in range(0, SPAN, COLS):
        s = coming
        there = dv + start
        in_v = (there < DV) if DV % COLS else tl.full([COLS], 1, tl.int1)
        use = real[:, None] & in_v[None, :]
        value = tl.load(v + there[None, :], mask=use, other=0.0).to(tl.float32)
        place += COLS * DK
        more = known & (start + COLS < SPAN)
        next_v = (there + COLS < DV) if DV % SPAN else tl.full([COLS], 1, tl.int1)
        coming = tl.load(place, mask=(next_v[:, None] & in_k[None, :]) & more, other=0.0)
        from_state = tl.zeros([16, COLS], dtype=tl.float32)
        o = tl.zeros([16, COLS], dtype=tl.float32)
        from_state, o = times_state(key, query, s, from_state, o, PARTS)
        rest = beta[:, None] * (value - key_scale[:, None] * from_state)
        u = tl.dot(inverse, rest, input_precision=WINDOW)
        o = query_scale[:, None] * o + tl.dot(attend, u, input_precision=WINDOW)
        use = inside[:, None] & in_v[None, :]
        tl.store(out + at + there[None, :], o.to(out.dtype.element_ty), mask=use)
        tl.store(u_out + at + there[None, :], u, mask=use)


@triton.jit(do_not_specialize=_ANY_WIDTH)
def prepare_kernel(
    q, k, a, b, a_log, dt_bias, slots, parent, seen, k_out, c_out, scratch,
    scale, width, heads,
    q_req, q_row, q_head, k_req, k_row, k_head, a_req, a_row, a_head, b_req, b_row, b_head, parent_req, seen_req,
    GROUP: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr, STEP: tl.constexpr, BLOCKS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """One program per (block of 16 rows, value head, request). EXACT: q and k are not bf16, products in fp32."""
    BW: tl.constexpr = 16 * BLOCKS
    PITCH: tl.constexpr = 2 * BW + 32
    mine = tl.program_id(0)
    head = tl.program_id(1)
    req = tl.program_id(2).to(tl.int64)
    live = tl.load(slots + req) >= 0
    parent += req * parent_req
    seen += req * seen_req
    k += req * k_req + head // GROUP * k_head
    q += req * q_req + head // GROUP * q_head
    col = tl.arange(0, BW)
    col_real = real_rows(parent, col, width) & live
    row = mine * 16 + tl.arange(0, 16)
    inside = row < width
    real = real_rows(parent, row, width) & live

    overlap = tl.zeros([16, BW], dtype=tl.float32)
    attend = tl.zeros([16, BW], dtype=tl.float32)
    all_squares = tl.zeros([BW, STEP], dtype=tl.float32)
    key_squares = tl.zeros([16, STEP], dtype=tl.float32)
    query_squares = tl.zeros([16, STEP], dtype=tl.float32)
    for start in range(0, DK, STEP):
        dk = start + tl.arange(0, STEP)
        in_k = (dk < DK) if DK % STEP else tl.full([STEP], 1, tl.int1)
        keys = tl.load(k + col[:, None] * k_row + dk[None, :], mask=col_real[:, None] & in_k[None, :], other=0.0)
        key = tl.load(k + row[:, None] * k_row + dk[None, :], mask=real[:, None] & in_k[None, :], other=0.0)
        query = tl.load(q + row[:, None] * q_row + dk[None, :], mask=real[:, None] & in_k[None, :], other=0.0)
        if EXACT:
            keys = keys.to(tl.float32)
            key = key.to(tl.float32)
            query = query.to(tl.float32)
        all_squares += keys.to(tl.float32) * keys.to(tl.float32)
        key_squares += key.to(tl.float32) * key.to(tl.float32)
        query_squares += query.to(tl.float32) * query.to(tl.float32)
        overlap = product(key, tl.trans(keys), overlap)
        attend = product(query, tl.trans(keys), attend)

    beta = sigmoid(tl.load(b + req * b_req + head * b_head + row * b_row, mask=real, other=0.0).to(tl.float32))
    raw = gate_input(a + req * a_req + head * a_head, a_row, dt_bias + head, col, col_real)
    g_hi, g_lo = gates(raw, a_log + head, col_real)
    block_of = tl.arange(0, BLOCKS)
    c_hi = tl.zeros([16], dtype=tl.float32)
    c_lo = tl.zeros([16], dtype=tl.float32)
    c_hi_all = tl.zeros([BW], dtype=tl.float32)
    c_lo_all = tl.zeros([BW], dtype=tl.float32)
    for block in range(mine + 1):
        at = block * 16 + tl.arange(0, 16)
        above = sees_of(seen, at, col, real_rows(parent, at, width) & live, width)
        c_hi = tl.sum(tl.where(above, g_hi[None, :], 0.0), 1)
        c_lo = tl.sum(tl.where(above, g_lo[None, :], 0.0), 1)
        here = block_of[:, None] == block
        c_hi_all = tl.where(here, c_hi[None, :], c_hi_all.reshape(BLOCKS, 16)).reshape(BW)
        c_lo_all = tl.where(here, c_lo[None, :], c_lo_all.reshape(BLOCKS, 16)).reshape(BW)
    # The last turn was this program's own block.
    sees = sees_of(seen, row, col, real, width)
    row_norm = inverse_norm(key_squares)
    decay = decays(sees, c_hi, c_lo, c_hi_all, c_lo_all) * inverse_norm(all_squares)[None, :]
    query_scale = scale * inverse_norm(query_squares)
    attend = attend * decay * query_scale[:, None]
    coupling = tl.where(col[None, :] < row[:, None], overlap * decay * (beta * row_norm)[:, None], 0.0)
    own = tl.where(block_of[None, :, None] == mine, coupling.reshape(16, BLOCKS, 16), 0.0)
    inverse = unit_inverse(tl.sum(own, 1))
    from_root = exp(c_hi + c_lo)

    line = scratch + ((req * heads + head) * width + row) * PITCH
    tl.store(line[:, None] + col[None, :], coupling, mask=inside[:, None])
    tl.store(line[:, None] + BW + col[None, :], attend, mask=inside[:, None])
    tl.store(line[:, None] + 2 * BW + tl.arange(0, 16)[None, :], inverse, mask=inside[:, None])
    tl.store(line + 2 * BW + 16, beta, mask=inside)
    tl.store(line + 2 * BW + 17, from_root * row_norm, mask=inside)
    tl.store(line + 2 * BW + 18, from_root * query_scale, mask=inside)
    _store_factors(c_out, k_out, k, k_row, req, row, real, head, width, heads, c_hi, c_lo, row_norm, GROUP, DK, BK)


@triton.jit(do_not_specialize=["width", "parent_req"])
def apply_kernel(
    q, k, v, state, slots, has_state, parent, out, u_out, scratch,
    width, heads, q_req, q_row, q_head, k_req, k_row, k_head, v_req, v_row, v_head, state_slot, state_head, parent_req,
    GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, STEP: tl.constexpr, COLS: tl.constexpr,
    BLOCKS: tl.constexpr, PARTS: tl.constexpr, FLAGS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One program per (part of Dv, value head, request); `scratch` as left by `prepare_kernel`."""
    BW: tl.constexpr = 16 * BLOCKS
    PITCH: tl.constexpr = 2 * BW + 32
    head = tl.program_id(1)
    req = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + req).to(tl.int64)
    live = slot >= 0
    known = live
    if FLAGS:
        known = live & (tl.load(has_state + req) != 0)
    dv = tl.program_id(0) * COLS + tl.arange(0, COLS)
    in_v = (dv < DV) if DV % COLS else tl.full([COLS], 1, tl.int1)
    row = tl.arange(0, BW)
    inside = row < width
    real = real_rows(parent + req * parent_req, row, width) & live
    state += tl.maximum(slot, 0) * state_slot + head * state_head
    k += req * k_req + head // GROUP * k_head
    q += req * q_req + head // GROUP * q_head

    from_state = tl.zeros([BW, COLS], dtype=tl.float32)
    o = tl.zeros([BW, COLS], dtype=tl.float32)
    for start in range(0, DK, STEP):
        dk = start + tl.arange(0, STEP)
        in_k = (dk < DK) if DK % STEP else tl.full([STEP], 1, tl.int1)
        s = tl.load(state + dv[:, None] * DK + dk[None, :], mask=(in_v[:, None] & in_k[None, :]) & known, other=0.0)
        key = tl.load(k + row[:, None] * k_row + dk[None, :], mask=real[:, None] & in_k[None, :], other=0.0)
        query = tl.load(q + row[:, None] * q_row + dk[None, :], mask=real[:, None] & in_k[None, :], other=0.0)
        if PARTS == 0:
            key = key.to(tl.float32)
            query = query.to(tl.float32)
        from_state, o = times_state(key, query, s, from_state, o, PARTS)

    value_at = v + req * v_req + head * v_head + row[:, None] * v_row + dv[None, :]
    value = tl.load(value_at, mask=real[:, None] & in_v[None, :], other=0.0).to(tl.float32)
    scratch += (req * heads + head) * width * PITCH
    line = scratch + row * PITCH
    beta = tl.load(line + 2 * BW + 16, mask=inside, other=0.0)
    key_scale = tl.load(line + 2 * BW + 17, mask=inside, other=0.0)
    o *= tl.load(line + 2 * BW + 18, mask=inside, other=0.0)[:, None]
    rest = beta[:, None] * (value - key_scale[:, None] * from_state)
    block_of = tl.arange(0, BLOCKS)
    sixteen = tl.arange(0, 16)
    for block in range(tl.cdiv(width, 16)):
        at = block * 16 + sixteen
        in_block = at < width
        inverse_at = scratch + at[:, None] * PITCH + 2 * BW + sixteen[None, :]
        inverse = tl.load(inverse_at, mask=in_block[:, None], other=0.0)
        coupling = tl.load(line[:, None] + at[None, :], mask=inside[:, None], other=0.0)
        # Final rows take no more updates; within the block the inverse has done them.
        coupling = tl.where(row[:, None] >= block * 16 + 16, coupling, 0.0)
        attend = tl.load(line[:, None] + BW + at[None, :], mask=inside[:, None], other=0.0)
        own = tl.where(block_of[:, None, None] == block, rest.reshape(BLOCKS, 16, COLS), 0.0)
        u = tl.dot(inverse, tl.sum(own, 0), input_precision=WINDOW)
        rest -= tl.dot(coupling, u, input_precision=WINDOW)
        o += tl.dot(attend, u, input_precision=WINDOW)
        u_at = u_out + ((req * width + at) * heads + head)[:, None] * DV + dv[None, :]
        tl.store(u_at, u, mask=in_block[:, None] & in_v[None, :])
    out_at = out + ((req * width + row) * heads + head)[:, None] * DV + dv[None, :]
    tl.store(out_at, o.to(out.dtype.element_ty), mask=inside[:, None] & in_v[None, :])
