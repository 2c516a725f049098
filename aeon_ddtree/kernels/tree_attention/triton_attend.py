# SPDX-License-Identifier: Apache-2.0
"""The attention kernels. One lane is one KV head and one tile of query rows; its work is cut into tiles of keys.

The tiles of all requests stand in one line, request after request, and every program of a lane takes an equal stretch
of it, so that long and short requests share the device evenly whatever their lengths, which the host never sees. A
stretch may end inside a request: then it leaves its sums as a part, and the parts of a request are merged either by the
last program that finishes (`FUSED`) or by `merge_kernel`.
Query rows are packed: row m of a lane is tree row m // GROUP, head m % GROUP, so keys are read once per KV head.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
# Numbers that differ from step to step: one compiled kernel serves them all.
_COUNTS = ["R", "W", "heads", "N", "table_len", "splits", "m_tiles", "least"]
_COUNTS += ["table_r", "bits_r", "bits_w", "depth_r", "depth_w"]
_LOWEST: tl.constexpr = tl.constexpr(-1.0e30)  # below any score, and finite: differences of it are never NaN


@triton.jit
def _count(
    context_len, num_rows, row0, R, W, capacity,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, OWN: tl.constexpr, BY_PAGE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, R_BLOCK: tl.constexpr,
):  # fmt: skip
    """Per request: committed keys, rows in use, tiles that are all committed, tiles with any committed, all tiles."""
    r = tl.arange(0, R_BLOCK)
    inside = r < R
    committed = tl.load(context_len + r, mask=inside, other=0).to(tl.int64)
    committed = tl.minimum(tl.maximum(committed, 0), capacity).to(tl.int32)
    rows = tl.load(num_rows + r, mask=inside, other=0).to(tl.int64)
    rows = tl.minimum(tl.maximum(rows, 0), W).to(tl.int32)
    if BY_PAGE:
        pages = committed // BLOCK_SIZE
        rest = committed - pages * BLOCK_SIZE
        full = pages * ((BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N) + rest // BLOCK_N
        some = full + (rest % BLOCK_N + BLOCK_N - 1) // BLOCK_N
    else:
        reach = committed
        if WINDOW > 0:
            reach = tl.minimum(committed, WINDOW - 1)
        full = reach // BLOCK_N
        some = (reach + BLOCK_N - 1) // BLOCK_N
    idle = row0 >= rows * GROUP
    full = tl.where(idle, 0, full)
    some = tl.where(idle, 0, some)
    tiles = tl.where(idle, 1, some + (rows + BLOCK_N - 1) // BLOCK_N)
    return committed, rows, full, some, tl.where(inside, tiles, 0)


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
def _of(values, r, R_BLOCK: tl.constexpr):
    """values[r] of a vector in registers."""
    return tl.sum(tl.where(tl.arange(0, R_BLOCK) == r, values, 0), 0)


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


@triton.jit
def _merge(
    part, stat, slot0, first, last, chunk, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Rows chunk · ROWS … of one request, from the parts of programs first … last; slot0 is the slot of the first."""
    m = chunk * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    top = tl.full([ROWS], _LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for i in tl.range(0, last - first + 1, loop_unroll_factor=4):
        # The first program's part may stand in its second slot; all others' parts in their first.
        slot = tl.where(i == 0, slot0, slot0 // 2 * 2 + 2 * i).to(tl.int64)
        other_top = tl.load(stat + slot * 2 * BLOCK_M + m, cache_modifier=".cg")
        other_total = tl.load(stat + slot * 2 * BLOCK_M + BLOCK_M + m, cache_modifier=".cg")
        other = tl.load(part + (slot * BLOCK_M + m[:, None]) * BLOCK_DV + d[None, :], cache_modifier=".cg")
        new_top = tl.maximum(top, other_top)
        old_share, new_share = tl.exp2(top - new_top), tl.exp2(other_top - new_top)
        total = total * old_share + other_total * new_share
        acc = acc * old_share[:, None] + other * new_share[:, None]
        top = new_top
    return acc / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit
def _store(
    out, value, r, rows, head0, m, W, heads,
    GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """value [·, BLOCK_DV] of packed rows m to out [R, W, heads, DV], contiguous; 0 for rows not in use."""
    d = tl.arange(0, BLOCK_DV)
    place = (r.to(tl.int64) * W + m // GROUP) * heads + head0 + m % GROUP
    inside = (m < W * GROUP)[:, None] & (d < DV)[None, :]
    value = tl.where((m // GROUP < rows)[:, None], value, 0.0)
    tl.store(out + place[:, None] * DV + d[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_COUNTS)
def attend_kernel(
    q, k_cache, v_cache, k_desc, v_desc, table, context_len, bits, num_rows, depth, own_k, own_v,
    out, part, stat, arrived,
    R, W, heads, N, table_len, splits, m_tiles, least, scale,
    q_r, q_w, q_h, q_d, k_n, k_t, k_h, k_d, v_n, v_t, v_h, v_d, table_r, bits_r, bits_w, depth_r, depth_w,
    ok_r, ok_w, ok_h, ok_d, ov_r, ov_w, ov_h, ov_d,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    OWN: tl.constexpr, TMA: tl.constexpr, FUSED: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, R_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Program (lane, i): stretch i of that lane's tiles. Arguments as in `tree_attention`; bits int32 [R, W, words],
    row -> visible rows; part fp32 [lanes, 2 · splits, BLOCK_M, BLOCK_DV] and stat fp32 [lanes, 2 · splits, 2, BLOCK_M]
    take unfinished sums; arrived int32 [R, lanes], zero before and after; scale > 0, times log2 e."""
    lane, split = tl.program_id(0), tl.program_id(1)
    lanes = tl.num_programs(0)
    kv_head = lane // m_tiles
    row0 = lane % m_tiles * BLOCK_M
    capacity = table_len * BLOCK_SIZE
    PER_PAGE: tl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    ALIGNED: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0
    committed_of, rows_of, full_of, some_of, tiles_of = _count(
        context_len, num_rows, row0, R, W, capacity, GROUP, WINDOW, OWN, TMA, BLOCK_SIZE, BLOCK_N, R_BLOCK
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
        committed, rows = _of(committed_of, r, R_BLOCK), _of(rows_of, r, R_BLOCK)
        full, some, tiles = _of(full_of, r, R_BLOCK), _of(some_of, r, R_BLOCK), _of(tiles_of, r, R_BLOCK)
        begin = _of(ends, r, R_BLOCK) - tiles
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
        top = tl.full([BLOCK_M], _LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)

        for i in tl.range(first, tl.minimum(last, full)):
            if TMA:
                number = i // PER_PAGE
                inner0 = (i - number * PER_PAGE) * BLOCK_N
                page = tl.load(table_row + tl.minimum(number, table_len - 1)).to(tl.int64)
                page = tl.minimum(tl.maximum(page, 0), N - 1).to(tl.int32)
                keys = k_desc.load([page, kv_head, inner0, 0]).reshape(BLOCK_N, BLOCK_D)
                values = v_desc.load([page, kv_head, inner0, 0]).reshape(BLOCK_N, BLOCK_DV)
            else:
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
            if TMA and not ALIGNED:  # past the end of its page a tile holds zeros
                scores = tl.where((inner0 + n < BLOCK_SIZE)[None, :], scores, float("-inf"))
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
            if TMA:
                position = tl.where(own, committed + row_n, i // PER_PAGE * BLOCK_SIZE + i % PER_PAGE * BLOCK_N)
            else:
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
            _store(out, acc / tl.where(total == 0, 1.0, total)[:, None], r, rows, kv_head * GROUP, m, W, heads,
                   GROUP, DV, BLOCK_DV)  # fmt: skip
        else:
            if PDL:
                tl.extra.cuda.gdc_launch_dependents()
            slot = (lane * splits + split).to(tl.int64) * 2 + (at != start)
            i_m = fresh + tl.arange(0, BLOCK_M)
            tl.store(stat + slot * 2 * BLOCK_M + i_m, top)
            tl.store(stat + slot * 2 * BLOCK_M + BLOCK_M + i_m, total)
            tl.store(part + (slot * BLOCK_M + i_m[:, None]) * BLOCK_DV + dv[None, :], acc)
            if FUSED:
                tl.debug_barrier()  # all of this program's part is written before it is announced
                counter = arrived + r * lanes + lane
                split0, split1 = begin // stretch, (begin + tiles - 1) // stretch
                if tl.atomic_add(counter, 1, sem="acq_rel") == split1 - split0:
                    tl.store(counter, 0)
                    slot0 = (lane * splits + split0) * 2 + (begin != split0 * stretch)
                    for chunk in range(tl.cdiv(tl.minimum(W * GROUP - row0, BLOCK_M), ROWS)):
                        value = _merge(part, stat, slot0, split0, split1, chunk, BLOCK_M, BLOCK_DV, ROWS)
                        _store(out, value, r, rows, kv_head * GROUP, row0 + chunk * ROWS + tl.arange(0, ROWS), W,
                               heads, GROUP, DV, BLOCK_DV)  # fmt: skip
        at = begin + last


@triton.jit(do_not_specialize=_COUNTS)
def merge_kernel(
    context_len, num_rows, out, part, stat, R, W, heads, table_len, splits, m_tiles, least,
    GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, OWN: tl.constexpr,
    TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DV: tl.constexpr, R_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (lane, request, chunk of rows): the parts that `attend_kernel` left, into `out`."""
    lane, r, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head = lane // m_tiles
    row0 = lane % m_tiles * BLOCK_M
    _, rows_of, _, _, tiles_of = _count(
        context_len, num_rows, row0, R, W, table_len * BLOCK_SIZE, GROUP, WINDOW, OWN, TMA, BLOCK_SIZE, BLOCK_N, R_BLOCK
    )
    all_tiles = tl.sum(tiles_of, 0)
    tiles = _of(tiles_of, r, R_BLOCK)
    begin = _of(tl.cumsum(tiles_of, 0), r, R_BLOCK) - tiles
    stretch = tl.maximum((all_tiles + splits - 1) // splits, least)
    split0, split1 = begin // stretch, (begin + tiles - 1) // stretch
    m = row0 + chunk * ROWS + tl.arange(0, ROWS)
    if (split1 > split0) & (row0 + chunk * ROWS < W * GROUP):
        if PDL:  # launched while `attend_kernel` still runs: waits here for its end
            tl.extra.cuda.gdc_wait()
        slot0 = (lane * splits + split0) * 2 + (begin != split0 * stretch)
        value = _merge(part, stat, slot0, split0, split1, chunk, BLOCK_M, BLOCK_DV, ROWS)
        _store(out, value, r, _of(rows_of, r, R_BLOCK), kv_head * GROUP, m, W, heads, GROUP, DV, BLOCK_DV)


@triton.jit(do_not_specialize=["W", "words"])
def pack_kernel(visible, bits, W, words, v_r, v_i, v_j, BLOCK: tl.constexpr):
    """Program (request · row, BLOCK words): visible bool [R, W, W] -> bits int32 [R, W, words]."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 32)
    j = word[:, None] * 32 + bit[None, :]
    seen = tl.load(visible + row // W * v_r + row % W * v_i + j * v_j, mask=j < W, other=0).to(tl.int32)
    tl.store(bits + row * words + word, tl.sum(seen << bit[None, :], 1), mask=word < words)
