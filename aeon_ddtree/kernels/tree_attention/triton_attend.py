# SPDX-License-Identifier: Apache-2.0
"""The attention kernel for every device, dtype, window and cache.

A lane is one KV head and one tile of query rows; its work is cut into tiles of keys. The tiles of all requests stand in
one line, request after request, and every program of a lane takes an equal stretch of it, so that long and short
requests share the device evenly whatever their lengths, which the host never sees. A stretch may end inside a request:
then it leaves its sums as a part, and `merge_kernel` merges the parts of a request.
Query rows are packed: row m of a lane is tree row m // GROUP, head m % GROUP, so keys are read once per KV head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aeon_ddtree.kernels.tree_attention.triton_parts import COUNTS, LOWEST, STRIDES, count_tiles, element, store_rows

_INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _fresh(zero):
    """0, but the compiler cannot know: what is computed from it stays inside its loop instead of filling registers."""
    if _INTERPRETED:
        return zero
    else:
        return tl.multiple_of(
            tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [zero], dtype=tl.int32, is_pure=False, pack=1), 128
        )


@triton.jit
def _page(table_row, position, N, table_len, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr):
    """(page int64, place in the page) of BLOCK_N positions; ids are clamped, so that junk is never followed."""
    n = tl.arange(0, BLOCK_N)
    number = position // BLOCK_SIZE
    if ALIGNED:
        page = tl.load(table_row + tl.minimum(number, table_len - 1)) + tl.zeros_like(n)
        inner = position - number * BLOCK_SIZE + n
    elif BLOCK_SIZE >= BLOCK_N:
        here = tl.load(table_row + tl.minimum(number, table_len - 1))
        there = tl.load(table_row + tl.minimum(number + 1, table_len - 1))
        inner = position - number * BLOCK_SIZE + n
        page = tl.where(inner >= BLOCK_SIZE, there, here)
        inner = tl.where(inner >= BLOCK_SIZE, inner - BLOCK_SIZE, inner)
    else:
        number = (position + n) // BLOCK_SIZE
        inner = position + n - number * BLOCK_SIZE
        page = tl.load(table_row + tl.minimum(number, table_len - 1))
    return tl.minimum(tl.maximum(page.to(tl.int64), 0), N - 1), inner.to(tl.int64)


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    if _INTERPRETED:  # which multiplies the bits of a bf16 as integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=PRECISION)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _add(acc, top, total, scores, v, scale, PRECISION: tl.constexpr):
    """Online softmax: takes one tile of scores (masked ones −inf; scale > 0, base 2) and its values into the sums."""
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    shrink = tl.exp2(top - new_top)
    weights = tl.exp2(scores * scale - new_top[:, None])
    total = total * shrink + tl.sum(weights, 1)
    acc = _dot(weights.to(v.dtype), v, acc * shrink[:, None], PRECISION)
    return acc, new_top, total


@triton.jit(do_not_specialize=COUNTS + STRIDES)
def attend_kernel(
    q, k_cache, v_cache, table, context_len, bits, num_rows, depth, own_k, own_v,
    out, part, stat,
    R, W, heads, N, table_len, splits, m_tiles, least, scale,
    q_r, q_w, q_h, q_d, k_n, k_t, k_h, k_d, v_n, v_t, v_h, v_d, table_r, bits_r, bits_w, depth_r, depth_w,
    ok_r, ok_w, ok_h, ok_d, ov_r, ov_w, ov_h, ov_d,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    OWN: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, R_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (lane, i): stretch i of that lane's tiles. Arguments as in `tree_attention`; bits int32 [R, W, words],
    row -> visible rows; part fp32 [lanes, 2 · splits, BLOCK_M, BLOCK_DV] and stat fp32 [lanes, 2 · splits, 2, BLOCK_M]
    take unfinished sums; scale > 0, times log2 e."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    lane, split = tl.program_id(0), tl.program_id(1)
    kv_head = lane // m_tiles
    row0 = lane % m_tiles * BLOCK_M
    capacity = table_len * BLOCK_SIZE
    ALIGNED: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0
    committed_of, rows_of, full_of, some_of, tiles_of = count_tiles(
        context_len, num_rows, row0, R, W, capacity, GROUP, WINDOW, False, BLOCK_SIZE, BLOCK_N, R_BLOCK
    )
    ends = tl.cumsum(tiles_of, 0)
    all_tiles = tl.sum(tiles_of, 0)
    stretch = tl.maximum((all_tiles + splits - 1) // splits, least)
    start = split * stretch
    at = start
    end = tl.minimum(at + stretch, all_tiles)

    k_head, v_head = k_cache + kv_head.to(tl.int64) * k_h, v_cache + kv_head.to(tl.int64) * v_h
    while at < end:
        fresh = _fresh(at * 0)
        n, d, dv = fresh + tl.arange(0, BLOCK_N), fresh + tl.arange(0, BLOCK_D), fresh + tl.arange(0, BLOCK_DV)
        row = (row0 + fresh + tl.arange(0, BLOCK_M)) // GROUP
        head = kv_head * GROUP + (row0 + fresh + tl.arange(0, BLOCK_M)) % GROUP
        r = tl.sum((ends <= at).to(tl.int32), 0)
        committed, rows = element(committed_of, r, R_BLOCK), element(rows_of, r, R_BLOCK)
        full, some, tiles = element(full_of, r, R_BLOCK), element(some_of, r, R_BLOCK), element(tiles_of, r, R_BLOCK)
        begin = element(ends, r, R_BLOCK) - tiles
        first, last = at - begin, tl.minimum(end - begin, tiles)
        table_row = table + r.to(tl.int64) * table_r
        low = 0  # first committed position that a row at depth 0 sees
        used = row < rows
        if WINDOW > 0:
            low = tl.maximum(committed - (WINDOW - 1), 0)
            row_depth = tl.load(depth + r.to(tl.int64) * depth_r + row * depth_w, mask=used, other=0).to(tl.int32)
            # Keys that no row of this tile reaches may be gone: they are not read.
            lowest = committed + tl.min(tl.where(used, row_depth, 2147483647 - committed), 0) - WINDOW
        q_rows = q + r.to(tl.int64) * q_r + row.to(tl.int64) * q_w + head * q_h
        queries = tl.load(q_rows[:, None] + (d * q_d)[None, :], mask=used[:, None] & (d < D)[None, :], other=0.0)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        top = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)

        for i in tl.range(first, tl.minimum(last, full)):
            position = low + i * BLOCK_N
            page, inner = _page(table_row, position, N, table_len, BLOCK_SIZE, BLOCK_N, ALIGNED and WINDOW == 0)
            k_rows, v_rows = k_head + page * k_n + inner * k_t, v_head + page * v_n + inner * v_t
            k_ptr, v_ptr = k_rows[:, None] + (d * k_d)[None, :], v_rows[:, None] + (dv * v_d)[None, :]
            if WINDOW > 0:
                near = position + n > lowest
                keys = tl.load(k_ptr, mask=near[:, None] & (d < D)[None, :], other=0.0)
                values = tl.load(v_ptr, mask=near[:, None] & (dv < DV)[None, :], other=0.0)
            elif D == BLOCK_D and DV == BLOCK_DV:
                keys, values = tl.load(k_ptr), tl.load(v_ptr)
            else:
                keys = tl.load(k_ptr, mask=(d < D)[None, :], other=0.0)
                values = tl.load(v_ptr, mask=(dv < DV)[None, :], other=0.0)
            scores = _dot(queries, tl.trans(keys), None, PRECISION)
            if WINDOW > 0:
                seen = (committed + row_depth)[:, None] - (position + n)[None, :] < WINDOW
                scores = tl.where(seen, scores, float("-inf"))
            acc, top, total = _add(acc, top, total, scores, values, scale, PRECISION)

        for i in tl.range(tl.maximum(first, full), last, num_stages=1):
            fresh = _fresh(i * 0)
            n, d, dv = fresh + tl.arange(0, BLOCK_N), fresh + tl.arange(0, BLOCK_D), fresh + tl.arange(0, BLOCK_DV)
            row = (row0 + fresh + tl.arange(0, BLOCK_M)) // GROUP
            used = row < rows
            own = i >= some
            row_n = tl.where(own, (i - some) * BLOCK_N, 0)
            position = tl.where(own, committed + row_n, low + i * BLOCK_N)
            limit = tl.where(own, rows - row_n, committed - position)
            if not OWN:
                limit = tl.minimum(limit, capacity - position)
            seen = used[:, None] & (n < limit)[None, :]
            if own:
                word_ptr = bits + r.to(tl.int64) * bits_r + (row * bits_w)[:, None] + ((row_n + n) // 32)[None, :]
                seen = seen & ((tl.load(word_ptr, mask=seen, other=0) >> (n % 32)[None, :]) & 1 != 0)
            if WINDOW > 0:
                j_depth = tl.load(
                    depth + r.to(tl.int64) * depth_r + (row_n + n) * depth_w, mask=own & (row_n + n < rows), other=0
                ).to(tl.int32)
                distance = row_depth[:, None] - tl.where(own, j_depth, position + n - committed)[None, :]
                seen = seen & (distance < WINDOW)
            anyone = tl.max(seen.to(tl.int32), 0) > 0
            if tl.max(anyone.to(tl.int32), 0) > 0:
                page, inner = _page(table_row, position, N, table_len, BLOCK_SIZE, BLOCK_N, False)
                k_rows, v_rows = k_head + page * k_n + inner * k_t, v_head + page * v_n + inner * v_t
                if OWN:
                    j = (row_n + n).to(tl.int64)
                    k_rows = tl.where(own, own_k + r.to(tl.int64) * ok_r + j * ok_w + kv_head * ok_h, k_rows)
                    v_rows = tl.where(own, own_v + r.to(tl.int64) * ov_r + j * ov_w + kv_head * ov_h, v_rows)
                    k_step, v_step = tl.where(own, ok_d, k_d), tl.where(own, ov_d, v_d)
                else:
                    k_step, v_step = k_d, v_d
                # What nobody sees may be NaN: a value of weight zero must be zero itself.
                keys = tl.load(k_rows[:, None] + (d * k_step)[None, :], anyone[:, None] & (d < D)[None, :], 0.0)
                scores = _dot(queries, tl.trans(keys), None, PRECISION)
                scores = tl.where(seen, scores, float("-inf"))
                values = tl.load(v_rows[:, None] + (dv * v_step)[None, :], anyone[:, None] & (dv < DV)[None, :], 0.0)
                acc, top, total = _add(acc, top, total, scores, values, scale, PRECISION)

        fresh = _fresh(at * 0)
        dv = fresh + tl.arange(0, BLOCK_DV)
        if (first == 0) & (last == tiles):
            m = row0 + fresh + tl.arange(0, BLOCK_M)
            store_rows(out, acc / tl.where(total == 0, 1.0, total)[:, None], r, rows, kv_head * GROUP, m, W, heads,
                   GROUP, DV, BLOCK_DV)  # fmt: skip
        else:
            slot = (lane * splits + split).to(tl.int64) * 2 + (at != start)
            i_m = fresh + tl.arange(0, BLOCK_M)
            tl.store(stat + slot * 2 * BLOCK_M + i_m, top)
            tl.store(stat + slot * 2 * BLOCK_M + BLOCK_M + i_m, total)
            tl.store(part + (slot * BLOCK_M + i_m[:, None]) * BLOCK_DV + dv[None, :], acc)
        at = begin + last
