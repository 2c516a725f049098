# SPDX-License-Identifier: Apache-2.0
"""The multiplying warpgroup of `hopper_kernel`, and the order of tiles that it shares with the fetching warp."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def sizes(committed, rows, row0, W, capacity, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Lengths as read, scalars or vectors -> committed keys, rows in use, keys, tiles (at least 1; 0 keys if idle)."""
    committed = gl.minimum(gl.maximum(committed.to(gl.int64), 0), capacity).to(gl.int32)
    rows = gl.minimum(gl.maximum(rows.to(gl.int64), 0), W).to(gl.int32)
    keys = gl.where(row0 < rows * GROUP, gl.minimum(committed + rows, capacity), 0)
    pages = keys // BLOCK_SIZE
    PER_PAGE: gl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    tiles = pages * PER_PAGE + (keys - pages * BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    return committed, rows, keys, gl.maximum(tiles, 1)


@gluon.jit
def _fresh(zero):
    """0, but the compiler cannot know: what is computed from it stays inside its loop instead of filling registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [zero], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    stage += 1
    turn = stage == STAGES
    return gl.where(turn, 0, stage), phase ^ turn.to(gl.int32)


@gluon.jit
def place_of(i, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Tile of a request -> (page number, place in the page, position) of its first key."""
    PER_PAGE: gl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    number = i // PER_PAGE
    inner = (i - number * PER_PAGE) * BLOCK_N
    return number, inner, number * BLOCK_SIZE + inner


@gluon.jit
def _word(line, word, words, used):
    """Word of each row's bits; what lies before the rows is committed, hence seen; what lies behind is not."""
    value = gl.load(line + word, mask=used & (word >= 0) & (word < words), other=0)
    return gl.where(word < 0, -1, value).to(gl.int64)


@gluon.jit
def _masked(
    s, i, line, used, words, committed, keys,
    BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of tile i with those of unseen keys at −inf. line: each row's bits; three words of it cover a tile."""
    _, inner, position = place_of(i, BLOCK_SIZE, BLOCK_N)
    limit = gl.minimum(keys - position, BLOCK_SIZE - inner)
    if (limit < BLOCK_N) | (committed < position + BLOCK_N):
        n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))
        j = position - committed
        word, shift = j >> 5, (j & 31).to(gl.int64)
        one, two, three = (
            _word(line, word, words, used), _word(line, word + 1, words, used), _word(line, word + 2, words, used)
        )  # fmt: skip
        low = (((two << 32) | (one & 0xFFFFFFFF)) >> shift).to(gl.int32)
        high = (((three << 32) | (two & 0xFFFFFFFF)) >> shift).to(gl.int32)
        bits = gl.where((n < 32)[None, :], low[:, None], high[:, None])
        seen = ((bits >> (n & 31)[None, :]) & 1 != 0) & (n < limit)[None, :]
        s = gl.where(seen, s, float("-inf"))
    return s


@gluon.jit
def _weights(s, top, total, scale):
    """Online softmax of one tile -> weights, maxima, sums, and what earlier sums shrink by."""
    new_top = gl.maximum(top, gl.max(s, 1) * scale)
    shrink = gl.exp2(top - new_top)
    weights = gl.exp2(s * scale - new_top[:, None])
    return weights, new_top, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _clear(v, valid, BLOCK_N: gl.constexpr, DV: gl.constexpr):
    """Values of keys that do not exist may be NaN; their weight is zero and they must be zero too.

    Every warpgroup does this for itself: all of them write the same bytes.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
    for c in gl.static_range(DV // 64):
        piece = v.slice(c * 64, 64, dim=1)
        x = piece.load(LAYOUT)
        piece.store(gl.where((n < valid)[:, None], x, 0.0).to(x.dtype))
    fence_async_shared()


@gluon.jit
def multiply(
    WHICH: gl.constexpr, q_tile, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free,
    q, bits, context_len, num_rows, out, part, stat,
    kv_head, row0, slot0, r, begin, start, end, W, heads, table_len, words, scale,
    q_r, q_w, q_h, bits_r, bits_w,
    GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    """Warpgroup WHICH: rows 64 · WHICH … of the lane's query tile against tiles start … end - 1."""
    K_STAGES: gl.constexpr = k_tiles.shape[0]
    V_STAGES: gl.constexpr = v_tiles.shape[0]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    k_stage, k_phase, v_stage, v_phase = start * 0, start * 0, start * 0, start * 0
    at = start
    while at < end:
        m0 = row0 + 64 * WHICH + _fresh(at * 0)
        committed, rows, keys, tiles = sizes(
            gl.load(context_len + r), gl.load(num_rows + r), row0, W, table_len * BLOCK_SIZE, GROUP, BLOCK_SIZE, BLOCK_N
        )
        first, last = at - begin, gl.minimum(end - begin, tiles)
        acc = gl.zeros([64, DV], gl.float32, layout=O_LAYOUT)
        top = gl.full([64], -1.0e30, gl.float32, layout=S_ROWS)
        total = gl.zeros([64], gl.float32, layout=S_ROWS)
        if keys > 0:
            q_m = m0 + gl.arange(0, 64, layout=gl.SliceLayout(1, Q_LAYOUT))
            q_d = gl.arange(0, D, layout=gl.SliceLayout(0, Q_LAYOUT))
            q_row = q_m // GROUP
            q_line = q + r.to(gl.int64) * q_r + q_row.to(gl.int64) * q_w + (kv_head * GROUP + q_m % GROUP) * q_h
            queries = gl.load(q_line[:, None] + q_d[None, :], mask=(q_row < rows)[:, None], other=0.0)
            q_tile.index(WHICH).store(queries)
            fence_async_shared()
            row = (m0 + gl.arange(0, 64, layout=S_ROWS)) // GROUP
            line = bits + r.to(gl.int64) * bits_r + row * bits_w

            none = gl.zeros([64, BLOCK_N], gl.float32, layout=S_LAYOUT)
            mbarrier.wait(k_ready.index(k_stage), k_phase)
            k = k_tiles.index(k_stage).reshape([BLOCK_N, D])
            s = warpgroup_mma(q_tile.index(WHICH), k.permute([1, 0]), none, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_free.index(k_stage))
            k_stage, k_phase = advance(k_stage, k_phase, K_STAGES)
            s = _masked(s, first, line, row < rows, words, committed, keys, BLOCK_SIZE, BLOCK_N, S_LAYOUT)
            weights, top, total, shrink = _weights(s, top, total, scale)
            p = gl.convert_layout(weights.to(q.dtype.element_ty), P_LAYOUT)

            for i in range(first + 1, last):
                mbarrier.wait(k_ready.index(k_stage), k_phase)
                k = k_tiles.index(k_stage).reshape([BLOCK_N, D])
                s = warpgroup_mma(q_tile.index(WHICH), k.permute([1, 0]), none, use_acc=False, is_async=True)
                mbarrier.wait(v_ready.index(v_stage), v_phase)
                v = v_tiles.index(v_stage).reshape([BLOCK_N, DV])
                acc = warpgroup_mma(p, v, acc, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s])
                mbarrier.arrive(k_free.index(k_stage))
                s = _masked(s, i, line, row < rows, words, committed, keys, BLOCK_SIZE, BLOCK_N, S_LAYOUT)
                weights, top, total, shrink = _weights(s, top, total, scale)
                acc, p = warpgroup_mma_wait(0, deps=[acc, p])
                mbarrier.arrive(v_free.index(v_stage))
                p = gl.convert_layout(weights.to(q.dtype.element_ty), P_LAYOUT)
                acc = acc * gl.convert_layout(shrink, O_ROWS)[:, None]
                k_stage, k_phase = advance(k_stage, k_phase, K_STAGES)
                v_stage, v_phase = advance(v_stage, v_phase, V_STAGES)

            mbarrier.wait(v_ready.index(v_stage), v_phase)
            v = v_tiles.index(v_stage).reshape([BLOCK_N, DV])
            _, _, position = place_of(last - 1, BLOCK_SIZE, BLOCK_N)
            if keys - position < BLOCK_N:
                _clear(v, keys - position, BLOCK_N, DV)
            acc = warpgroup_mma(p, v, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_free.index(v_stage))
            v_stage, v_phase = advance(v_stage, v_phase, V_STAGES)

        m = 64 * WHICH + _fresh(at * 0) + gl.arange(0, 64, layout=O_ROWS)
        d = gl.arange(0, DV, layout=gl.SliceLayout(0, O_LAYOUT))
        row = (row0 + m) // GROUP
        inside = row0 + m < W * GROUP
        if (first == 0) & (last == tiles):
            share = gl.convert_layout(1.0 / gl.where(total == 0, 1.0, total), O_ROWS)
            value = gl.where((row < rows)[:, None], acc * share[:, None], 0.0)
            place = (r.to(gl.int64) * W + row) * heads + kv_head * GROUP + (row0 + m) % GROUP
            gl.store(out + place[:, None] * DV + d[None, :], value.to(out.dtype.element_ty), mask=inside[:, None])
        else:
            slot = slot0 + (at != start).to(gl.int64)
            i_m = 64 * WHICH + gl.arange(0, 64, layout=S_ROWS)
            gl.store(stat + slot * 2 * BLOCK_M + i_m, top)
            gl.store(stat + slot * 2 * BLOCK_M + BLOCK_M + i_m, total)
            gl.store(part + (slot * BLOCK_M + m[:, None]) * DV + d[None, :], acc, mask=inside[:, None])
        at = begin + last
        begin += tiles
        r += 1
