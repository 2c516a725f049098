# SPDX-License-Identifier: Apache-2.0
"""Launches the attention kernels: which tile sizes, how many programs share a lane, and where unfinished sums go.

Nothing here reads a length: grids and buffers follow from shapes and from the number of multiprocessors, so a launch
can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from aeon_ddtree.kernels.dispatch import device_traits
from aeon_ddtree.kernels.tree_attention.triton_attend import attend_kernel
from aeon_ddtree.kernels.tree_attention.triton_parts import merge_kernel, pack_kernel
from aeon_ddtree.kernels.tree_attention.triton_write import write_kernel

_MERGED_ROWS = 4  # rows of a request that one program of the second launch merges
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Config:
    """Tile of packed query rows and of keys; per_sm programs a multiprocessor; at least `least` tiles a program.

    hopper: `hopper_kernel`, for block_m 64 or 128 and block_n 64, where warps and stages follow from the tile.
    pdl: the second launch, which merges, overlaps the end of the first.
    """

    block_m: int
    block_n: int
    warps: int = 8
    stages: int = 2
    per_sm: int = 1
    least: int = 2
    hopper: bool = False
    pdl: bool = False


def takes(q: Tensor, k_cache: Tensor, v_cache: Tensor, own_kv: tuple[Tensor, Tensor] | None, scale: float) -> bool:
    """The rule: all of one dtype, bf16, fp16 or fp32; heads of at most 256; a positive scale; something to compute.

    Everything else (fp64, mixed dtypes, wider heads) is the reference's.
    """
    tensors = (q, k_cache, v_cache, *(own_kv or ()))
    return (
        all(x.dtype == q.dtype for x in tensors)
        and q.dtype in _DTYPES
        and 0 < q.shape[3] <= 256
        and 0 < v_cache.shape[3] <= 256
        and scale > 0
        and all(x.numel() > 0 for x in (q, k_cache, v_cache))
    )


def choose(rows: int, dim: int, dtype: torch.dtype, capability: int, described: bool) -> Config:
    """The measured choice for `rows` packed query rows per KV head and heads of `dim`; `described` as `_described`."""
    if dtype == torch.float32:
        return Config(32, 32, warps=4, stages=1)
    if capability == 90:
        if rows <= 64:
            return Config(64, 64, warps=4, stages=2)
        return Config(128, 64, warps=8, stages=2)
    # 99 KiB of shared memory a program: the query tile takes up to 32 of them, each tile of keys or values 16. Four
    # warps would spill.
    return Config(64 if rows > 32 else 32, 32, warps=8, stages=2)


def pack_visible(visible: Tensor) -> Tensor:
    """See `pack_visible` of the package."""
    requests, width = visible.shape[:2]
    words = -(-width // 32)
    bits = torch.empty(requests, width, words, dtype=torch.int32, device=visible.device)
    block = min(triton.next_power_of_2(words), 16)
    if bits.numel():
        grid = (requests * width, triton.cdiv(words, block))
        pack_kernel[grid](visible, bits, width, words, *visible.stride(), block, num_warps=1)
    return bits


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, context_len: Tensor, bits: Tensor,
    num_rows: Tensor, scale: float, window: int | None, depth: Tensor | None,
    own_kv: tuple[Tensor, Tensor] | None = None, config: Config | None = None,
) -> Tensor:  # fmt: skip
    """See `tree_attention`; bits int32 [R, W, words] as `pack_visible` makes them; `takes` must hold."""
    requests, width, heads, dim = q.shape
    pages, block_size, kv_heads, value_dim = v_cache.shape
    group = heads // kv_heads
    processors, capability = device_traits(q)
    config = config or choose(
        width * group, max(dim, value_dim), q.dtype, capability, _described(q, k_cache, v_cache, own_kv, window)
    )
    block_d, block_dv = (max(16, triton.next_power_of_2(x)) for x in (dim, value_dim))
    m_tiles = triton.cdiv(width * group, config.block_m)
    lanes = kv_heads * m_tiles
    splits = max(1, processors * config.per_sm // lanes)
    # More programs than tiles would find nothing to do.
    table_len = block_table.shape[1]
    splits = min(splits, requests * (triton.cdiv(table_len * block_size, config.block_n) + 2))
    out = torch.empty(requests, width, heads, value_dim, dtype=q.dtype, device=q.device)
    part = stat = out
    if splits > 1:
        part = torch.empty(lanes * 2 * splits * config.block_m * block_dv, dtype=torch.float32, device=q.device)
        stat = torch.empty(lanes * 2 * splits * 2 * config.block_m, dtype=torch.float32, device=q.device)
    shape: dict[str, Any] = {
        "GROUP": group, "DV": value_dim, "BLOCK_SIZE": block_size, "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "R_BLOCK": max(16, triton.next_power_of_2(requests)),
    }  # fmt: skip
    log2_scale = scale * math.log2(math.e)
    if config.hopper:
        stages = 2 if config.block_m == 128 else 3
        from aeon_ddtree.kernels.tree_attention.hopper import hopper_kernel

        hopper_kernel[(lanes, splits)](
            q, _descriptor(k_cache, config.block_n), _descriptor(v_cache, config.block_n), block_table, context_len,
            bits, num_rows, out, part, stat, requests, width, heads, pages, table_len, splits, m_tiles, config.least,
            bits.shape[2], log2_scale, *q.stride()[:3], block_table.stride(0), bits.stride(0), bits.stride(1),
            D=dim, K_STAGES=3, V_STAGES=stages, PDL=config.pdl, **shape, num_warps=4,
        )  # fmt: skip
    else:
        own_k, own_v = own_kv if own_kv is not None else (k_cache, v_cache)
        own_strides = (*own_k.stride(), *own_v.stride()) if own_kv is not None else (0,) * 8
        attend_kernel[(lanes, splits)](
            q, k_cache, v_cache, block_table, context_len, bits, num_rows,
            depth if depth is not None and window is not None else context_len, own_k, own_v, out, part, stat,
            requests, width, heads, pages, table_len, splits, m_tiles, config.least, log2_scale,
            *q.stride(), *k_cache.stride(), *v_cache.stride(), block_table.stride(0), bits.stride(0), bits.stride(1),
            *(depth.stride() if depth is not None else (0, 0)), *own_strides,
            D=dim, BLOCK_D=block_d, BLOCK_DV=block_dv, WINDOW=window or 0, OWN=own_kv is not None, PDL=config.pdl,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", **shape,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
    if splits > 1:
        grid = (lanes, requests, triton.cdiv(min(config.block_m, width * group), _MERGED_ROWS))
        merge_kernel[grid](
            context_len, num_rows, out, part, stat, requests, width, heads, table_len, splits, m_tiles, config.least,
            BLOCK_DV=block_dv, WINDOW=window or 0, BY_PAGE=config.hopper, ROWS=_MERGED_ROWS, PDL=config.pdl, **shape,
            num_warps=4, **({"launch_pdl": True} if config.pdl else {}),
        )  # fmt: skip
    return out


def _described(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, own_kv: tuple[Tensor, Tensor] | None, window: int | None
) -> bool:
    """Whether `hopper_kernel` takes these: 16-bit, the whole context, heads of 64, 128 or 256, blocks that fill a tile,
    and caches that tensor descriptors can address (16-byte strides and base, dense heads)."""
    return (
        own_kv is None
        and window is None
        and q.element_size() == 2
        and q.stride(3) == 1
        and q.shape[3] in (64, 128, 256)
        and v_cache.shape[3] in (64, 128, 256)
        and k_cache.shape[1] >= 64
        and all(
            x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(s * x.element_size() % 16 == 0 for s in x.stride()[:3])
            for x in (k_cache, v_cache)
        )
    )


def _descriptor(cache: Tensor, block_n: int) -> TensorDescriptor:
    """[N, Hkv, block, D] in tiles of block_n places of one page and head; places past a page's end read as 0."""
    pages, block, kv_heads, dim = cache.shape
    page_stride, place_stride, head_stride, _ = cache.stride()
    return TensorDescriptor(
        cache, [pages, kv_heads, block, dim], [page_stride, head_stride, place_stride, 1], [1, 1, block_n, dim],
        NVMMASharedLayout(128, 16, rank=4),
    )  # fmt: skip


def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `write_kv`: one launch, a program per token."""
    tokens, kv_heads, dim = k.shape
    pages, block_size, _, value_dim = v_cache.shape
    if tokens == 0 or kv_heads * max(dim, value_dim) == 0:
        return
    widest = triton.next_power_of_2(kv_heads * max(dim, value_dim))
    write_kernel[(tokens,)](
        k, v, k_cache, v_cache, slot_mapping, pages, slot_mapping.stride(0), *k.stride(), *v.stride(),
        *k_cache.stride(), *v_cache.stride(), BLOCK_SIZE=block_size, HEADS=kv_heads, D=dim, DV=value_dim,
        BLOCK=min(1024, widest), num_warps=4,
    )  # fmt: skip
