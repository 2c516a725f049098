# SPDX-License-Identifier: Apache-2.0
"""Attention for Hopper (sm_90), 16-bit caches, whole context: one warpgroup fetches, one or two multiply.

The work is cut as in `triton_attend`: a lane is one KV head and one tile of query rows, the key tiles of all requests
stand in one line, and every program takes an equal stretch of it. Here a request's keys are its committed positions
and its rows in one run, [0, context_len + num_rows), cut page by page: only tiles that reach the rows or leave a page
need a mask. The fetching warps run ahead through the whole stretch, across requests. Each warpgroup owns 64 query rows;
its scores of the next tile are computed while it weights the values of the present one, so that softmax and products
overlap.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from aeon_ddtree.kernels.tree_attention.hopper_multiply import advance, multiply, place_of, sizes
from aeon_ddtree.kernels.tree_attention.triton_parts import COUNTS


def descriptor(cache: Tensor, block_n: int) -> TensorDescriptor:
    """[N, Hkv, block, D] in tiles of block_n places of one page and head; places past a page's end read as 0."""
    pages, block, kv_heads, dim = cache.shape
    page_stride, place_stride, head_stride, _ = cache.stride()
    return TensorDescriptor(
        cache, [pages, kv_heads, block, dim], [page_stride, head_stride, place_stride, 1], [1, 1, block_n, dim],
        gl.NVMMASharedLayout(128, 16, rank=4),
    )  # fmt: skip


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _page(line, i, N, table_len, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Tile of a request -> (page, place in the page); ids are clamped, so that junk is never followed."""
    number, inner, _ = place_of(i, BLOCK_SIZE, BLOCK_N)
    page = gl.load(line + gl.minimum(number, table_len - 1)).to(gl.int64)
    return gl.minimum(gl.maximum(page, 0), N - 1).to(gl.int32), inner


@gluon.jit
def _fetch(
    k_desc, v_desc, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, table, context_len, num_rows,
    kv_head, row0, r, begin, start, end, W, N, table_len, table_r,
    GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The fetching warps: K and V tiles start … end - 1 of the lane, in order, as buffers become free."""
    K_STAGES: gl.constexpr = k_tiles.shape[0]
    V_STAGES: gl.constexpr = v_tiles.shape[0]
    k_stage, k_phase, v_stage, v_phase = start * 0, start * 0, start * 0, start * 0
    at = start
    while at < end:
        _, _, keys, tiles = sizes(
            gl.load(context_len + r), gl.load(num_rows + r), row0, W, table_len * BLOCK_SIZE, GROUP, BLOCK_SIZE, BLOCK_N
        )
        last = gl.minimum(end - begin, tiles)
        if keys > 0:
            # In the order of use: the keys of the next tile before the values of this one.
            line = table + r.to(gl.int64) * table_r
            page, inner = _page(line, at - begin, N, table_len, BLOCK_SIZE, BLOCK_N)
            mbarrier.wait(k_free.index(k_stage), k_phase ^ 1)
            mbarrier.expect(k_ready.index(k_stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                k_desc, [page, kv_head, inner, 0], k_ready.index(k_stage), k_tiles.index(k_stage)
            )
            k_stage, k_phase = advance(k_stage, k_phase, K_STAGES)
            for i in range(at - begin + 1, last):
                next_page, next_inner = _page(line, i, N, table_len, BLOCK_SIZE, BLOCK_N)
                mbarrier.wait(k_free.index(k_stage), k_phase ^ 1)
                mbarrier.expect(k_ready.index(k_stage), k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    k_desc, [next_page, kv_head, next_inner, 0], k_ready.index(k_stage), k_tiles.index(k_stage)
                )
                k_stage, k_phase = advance(k_stage, k_phase, K_STAGES)
                mbarrier.wait(v_free.index(v_stage), v_phase ^ 1)
                mbarrier.expect(v_ready.index(v_stage), v_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    v_desc, [page, kv_head, inner, 0], v_ready.index(v_stage), v_tiles.index(v_stage)
                )
                v_stage, v_phase = advance(v_stage, v_phase, V_STAGES)
                page, inner = next_page, next_inner
            mbarrier.wait(v_free.index(v_stage), v_phase ^ 1)
            mbarrier.expect(v_ready.index(v_stage), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                v_desc, [page, kv_head, inner, 0], v_ready.index(v_stage), v_tiles.index(v_stage)
            )
            v_stage, v_phase = advance(v_stage, v_phase, V_STAGES)
        at = begin + last
        begin += tiles
        r += 1


@gluon.jit(do_not_specialize=[*COUNTS, "words", "table_r", "bits_r", "bits_w"])
def hopper_kernel(
    q, k_desc, v_desc, table, context_len, bits, num_rows, out, part, stat,
    R, W, heads, N, table_len, splits, m_tiles, least, words, scale,
    q_r, q_w, q_h, table_r, bits_r, bits_w,
    GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, R_BLOCK: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Program (lane, i): stretch i of that lane's tiles; four warps. k_desc, v_desc: tiles of BLOCK_N places of a page
    and head; the rest as in `attend_kernel`. BLOCK_M is 64 or 128; D and DV are 64, 128 or 256."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    GROUPS: gl.constexpr = BLOCK_M // 64
    lane, split = gl.program_id(0), gl.program_id(1)
    kv_head = lane // m_tiles
    row0 = lane % m_tiles * BLOCK_M
    r = gl.arange(0, R_BLOCK, layout=gl.BlockedLayout([1], [32], [4], [0]))
    _, _, _, tiles = sizes(
        gl.load(context_len + r, mask=r < R, other=0), gl.load(num_rows + r, mask=r < R, other=0), row0, W,
        table_len * BLOCK_SIZE, GROUP, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    tiles = gl.where(r < R, tiles, 0)
    all_tiles = gl.sum(tiles, 0)
    stretch = gl.maximum((all_tiles + splits - 1) // splits, least)
    start = split * stretch
    end = gl.minimum(start + stretch, all_tiles)
    before = gl.associative_scan(tiles, 0, _plus) <= start
    r0 = gl.sum(before.to(gl.int32), 0)
    begin = gl.sum(gl.where(before, tiles, 0), 0)
    slot0 = (lane * splits + split).to(gl.int64) * 2

    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    q_tile = gl.allocate_shared_memory(q.dtype.element_ty, [GROUPS, 64, D], gl.NVMMASharedLayout(128, 16, rank=2))
    k_tiles = gl.allocate_shared_memory(q.dtype.element_ty, [K_STAGES, 1, 1, BLOCK_N, D], TILE)
    v_tiles = gl.allocate_shared_memory(q.dtype.element_ty, [V_STAGES, 1, 1, BLOCK_N, DV], TILE)
    k_ready = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(K_STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=GROUPS)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_free.index(i), count=GROUPS)

    # Spelled out, since a tuple that is given a name first loses its constants.
    if GROUPS == 2:
        gl.warp_specialize([
            (multiply, (
                0, q_tile, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, q, bits, context_len, num_rows, out,
                part, stat, kv_head, row0, slot0, r0, begin, start, end, W, heads, table_len, words, scale, q_r, q_w,
                q_h, bits_r, bits_w, GROUP, BLOCK_SIZE, BLOCK_M, BLOCK_N, D, DV,
            )),
            (multiply, (
                1, q_tile, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, q, bits, context_len, num_rows, out,
                part, stat, kv_head, row0, slot0, r0, begin, start, end, W, heads, table_len, words, scale, q_r, q_w,
                q_h, bits_r, bits_w, GROUP, BLOCK_SIZE, BLOCK_M, BLOCK_N, D, DV,
            )),
            (_fetch, (
                k_desc, v_desc, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, table, context_len, num_rows,
                kv_head, row0, r0, begin, start, end, W, N, table_len, table_r, GROUP, BLOCK_SIZE, BLOCK_N,
            )),
        ], [4, 4], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (multiply, (
                0, q_tile, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, q, bits, context_len, num_rows, out,
                part, stat, kv_head, row0, slot0, r0, begin, start, end, W, heads, table_len, words, scale, q_r, q_w,
                q_h, bits_r, bits_w, GROUP, BLOCK_SIZE, BLOCK_M, BLOCK_N, D, DV,
            )),
            (_fetch, (
                k_desc, v_desc, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, table, context_len, num_rows,
                kv_head, row0, r0, begin, start, end, W, N, table_len, table_r, GROUP, BLOCK_SIZE, BLOCK_N,
            )),
        ], [4], [24])  # fmt: skip
