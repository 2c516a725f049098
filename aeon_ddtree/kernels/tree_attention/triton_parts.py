# SPDX-License-Identifier: Apache-2.0
"""What the attention kernels share: how the line of tiles is counted and how unfinished sums are merged; bit sets."""

from __future__ import annotations

import triton
import triton.language as tl

# Numbers that differ from step to step: one compiled kernel serves them all.
COUNTS = ["R", "W", "heads", "N", "table_len", "splits", "m_tiles", "least"]
STRIDES = ["table_r", "bits_r", "bits_w", "depth_r", "depth_w"]
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)  # below any score, and finite: differences of it are never NaN


@triton.jit
def count_tiles(
    context_len, num_rows, row0, R, W, capacity,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, BY_PAGE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, R_BLOCK: tl.constexpr,
):  # fmt: skip
    """Per request: committed keys, rows in use, tiles that are all committed, tiles with any committed, all tiles.

    BY_PAGE: the tiles of `hopper_kernel`, committed keys and rows in one run; of these only all tiles are counted.
    """
    r = tl.arange(0, R_BLOCK)
    inside = r < R
    committed = tl.load(context_len + r, mask=inside, other=0).to(tl.int64)
    committed = tl.minimum(tl.maximum(committed, 0), capacity).to(tl.int32)
    rows = tl.load(num_rows + r, mask=inside, other=0).to(tl.int64)
    rows = tl.minimum(tl.maximum(rows, 0), W).to(tl.int32)
    idle = row0 >= rows * GROUP
    if BY_PAGE:
        keys = tl.where(idle, 0, tl.minimum(committed + rows, capacity))
        pages = keys // BLOCK_SIZE
        rest = keys - pages * BLOCK_SIZE
        all_tiles = pages * ((BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N) + (rest + BLOCK_N - 1) // BLOCK_N
        full, some, tiles = committed, committed, tl.maximum(all_tiles, 1)
    else:
        reach = committed
        if WINDOW > 0:
            reach = tl.minimum(committed, WINDOW - 1)
        full = tl.where(idle, 0, reach // BLOCK_N)
        some = tl.where(idle, 0, (reach + BLOCK_N - 1) // BLOCK_N)
        tiles = tl.where(idle, 1, some + (rows + BLOCK_N - 1) // BLOCK_N)
    return committed, rows, full, some, tl.where(inside, tiles, 0)


@triton.jit
def element(values, r, R_BLOCK: tl.constexpr):
    """values[r] of a vector in registers."""
    return tl.sum(tl.where(tl.arange(0, R_BLOCK) == r, values, 0), 0)


@triton.jit
def _merge(
    part, stat, slot0, first, last, chunk, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Rows chunk · ROWS … of one request, from the parts of programs first … last; slot0 is the slot of the first."""
    m = chunk * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    top = tl.full([ROWS], LOWEST, tl.float32)
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
def store_rows(
    out, value, r, rows, head0, m, W, heads,
    GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """value [·, BLOCK_DV] of packed rows m to out [R, W, heads, DV], contiguous; 0 for rows not in use."""
    d = tl.arange(0, BLOCK_DV)
    place = (r.to(tl.int64) * W + m // GROUP) * heads + head0 + m % GROUP
    inside = (m < W * GROUP)[:, None] & (d < DV)[None, :]
    value = tl.where((m // GROUP < rows)[:, None], value, 0.0)
    tl.store(out + place[:, None] * DV + d[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def merge_kernel(
    context_len, num_rows, out, part, stat, R, W, heads, table_len, splits, m_tiles, least,
    GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, BY_PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DV: tl.constexpr, R_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (lane, request, chunk of rows): the parts that the attention kernel left, into `out`."""
    lane, r, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head = lane // m_tiles
    row0 = lane % m_tiles * BLOCK_M
    _, rows_of, _, _, tiles_of = count_tiles(
        context_len, num_rows, row0, R, W, table_len * BLOCK_SIZE, GROUP, WINDOW, BY_PAGE, BLOCK_SIZE, BLOCK_N, R_BLOCK
    )
    all_tiles = tl.sum(tiles_of, 0)
    tiles = element(tiles_of, r, R_BLOCK)
    begin = element(tl.cumsum(tiles_of, 0), r, R_BLOCK) - tiles
    stretch = tl.maximum((all_tiles + splits - 1) // splits, least)
    split0, split1 = begin // stretch, (begin + tiles - 1) // stretch
    m = row0 + chunk * ROWS + tl.arange(0, ROWS)
    if (split1 > split0) & (row0 + chunk * ROWS < W * GROUP):
        if PDL:  # launched while the attention kernel still runs: waits here for its end
            tl.extra.cuda.gdc_wait()
        slot0 = (lane * splits + split0) * 2 + (begin != split0 * stretch)
        value = _merge(part, stat, slot0, split0, split1, chunk, BLOCK_M, BLOCK_DV, ROWS)
        store_rows(out, value, r, element(rows_of, r, R_BLOCK), kv_head * GROUP, m, W, heads, GROUP, DV, BLOCK_DV)


@triton.jit(do_not_specialize=["W", "words"])
def pack_kernel(visible, bits, W, words, v_r, v_i, v_j, BLOCK: tl.constexpr):
    """Program (request · row, BLOCK words): visible bool [R, W, W] -> bits int32 [R, W, words]."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 32)
    j = word[:, None] * 32 + bit[None, :]
    seen = tl.load(visible + row // W * v_r + row % W * v_i + j * v_j, mask=j < W, other=0).to(tl.int32)
    tl.store(bits + row * words + word, tl.sum(seen << bit[None, :], 1), mask=word < words)
