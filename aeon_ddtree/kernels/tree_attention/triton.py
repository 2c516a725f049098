# SPDX-License-Identifier: Apache-2.0
"""Launches the attention kernels: which tile sizes, how many programs share a lane, and where unfinished sums go.

Nothing here reads a length: grids and buffers follow from shapes and from the number of multiprocessors, so a launch
can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

from aeon_ddtree.kernels.dispatch import device_traits
from aeon_ddtree.kernels.tree_attention.triton_attend import attend_kernel
from aeon_ddtree.kernels.tree_attention.triton_parts import merge_kernel, pack_kernel
from aeon_ddtree.kernels.tree_attention.triton_write import write_kernel

_MERGED_ROWS = 4  # rows of a request that one program of the second launch merges
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Config:
    """Tile of packed query rows and of keys; per_sm programs a multiprocessor; at least `least` tiles a program.

    hopper: `hopper_kernel` instead of `attend_kernel`, for block_m 64 or 128 and block_n 64; warps and stages then
    follow from block_m. pdl: the second launch, which merges, starts while the first runs and waits for its end.
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


def choose(
    rows: int, dtype: torch.dtype, capability: int, described: bool, kv_heads: int, requests: int, capacity: int,
    processors: int,
) -> Config:  # fmt: skip
    """The measured choice for `rows` packed query rows per KV head; `described` as `_described`; capacity: positions
    that a line of the block table holds, since the context itself is on the device.

    The rule: on sm_90 `hopper_kernel` takes all it can, and a failure to import or compile it is an error; every other
    device, and on sm_90 fp32, windows, own_kv and caches that descriptors cannot address, take `attend_kernel`.
    """
    if dtype == torch.float32:
        return Config(32, 32, warps=4, stages=1)
    if capability == 90 and described:
        return _choose_hopper(rows, kv_heads, requests, capacity, processors)
    if capability == 90:
        if rows <= 64:
            return Config(64, 64, warps=4, stages=2)
        return Config(128, 64, warps=8, stages=2)
    # 99 KiB of shared memory a program: the query tile takes up to 32 of them, each tile of keys or values 16. Four
    # warps would spill.
    return Config(64 if rows > 32 else 32, 32, warps=8, stages=2)


def _choose_hopper(rows: int, kv_heads: int, requests: int, capacity: int, processors: int) -> Config:
    """Tile of 64 or 128 rows, and whether the second launch overlaps, by key tiles a program if all tables were full.

    Measured on an H200, 4 KV heads of 256, groups of 6, blocks of 864, bf16; µs a layer by context.
    Tiles of 128 / 64 rows:        512          2,048        8,192         131,072
        W = 16 (96 rows),  R = 1   13.5 / 11.2  19.8 / 15.9  36.8 / 29.5   166 / 186
                           R = 16  36.3 / 23.4  58.0 / 54.0  164.7 / 174.7 1,989 / 2,944
        W = 32 (192 rows), R = 1   14.6 / 11.9  24.0 / 21.7  44.5 / 35.0   265 / 264
                           R = 16  33.8 / 43.7  77.7 / 89.1  248 / 264     4,136 / 4,155
    Two 64-row tiles use more multiprocessors at once but read every key twice, which pays up to about 24 key tiles a
    program. Of 192 rows, 128-row tiles leave a quarter idle: there three 64-row tiles pay for a lone request.
    Second launch overlapping / not, 128-row tiles (64 rows at W = 8), R = 1:
        W = 8   10.4 / 11.5  15.4 / 16.0  27.5 / 26.7      W = 16  13.5 / 14.3  19.8 / 20.3  36.8 / 31.4
        W = 64  17.4 / 17.5  30.2 / 23.9  48.2 / 42.9      at 512, 2,048, 8,192; at R = 16 within 1 µs of one another
    so a lone request overlaps only while no program has more than the least number of tiles. 64-row tiles of more
    than 64 rows were measured with the overlap alone, and keep it. Not measured: 1 < R < 16, other head sizes.
    """
    least = Config.least
    lanes = kv_heads * triton.cdiv(rows, 128)
    programs = max(1, processors // lanes)
    tiles = triton.cdiv(requests * triton.cdiv(capacity, 64), programs)
    small = rows > 64 and (tiles <= 24 if rows <= 128 else requests == 1 and rows <= 192)
    if small:
        return Config(64, 64, hopper=True, pdl=True)
    return Config(64 if rows <= 64 else 128, 64, hopper=True, pdl=requests > 1 or tiles <= least)


@lru_cache(maxsize=1)
def _hopper() -> ModuleType:
    """The module of `hopper_kernel`, imported where a device runs it; RuntimeError where this Triton lacks Gluon."""
    try:
        from aeon_ddtree.kernels.tree_attention import hopper
    except ImportError as error:
        raise RuntimeError(
            f"triton {triton.__version__} cannot import the Hopper attention ({error}), expected 3.6 with Gluon: "
            "install the Triton of requirements/, or set DDTREE_KERNELS=reference"
        ) from error
    return hopper


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
    table_len = block_table.shape[1]
    config = config or choose(
        width * group, q.dtype, capability, _described(q, k_cache, v_cache, own_kv, window), kv_heads, requests,
        table_len * block_size, processors,
    )  # fmt: skip
    block_d, block_dv = (max(16, triton.next_power_of_2(x)) for x in (dim, value_dim))
    m_tiles = triton.cdiv(width * group, config.block_m)
    lanes = kv_heads * m_tiles
    splits = max(1, processors * config.per_sm // lanes)
    # More programs than tiles would find nothing to do.
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
        stages, hopper = 2 if config.block_m == 128 else 3, _hopper()
        hopper.hopper_kernel[(lanes, splits)](
            q, hopper.descriptor(k_cache, config.block_n), hopper.descriptor(v_cache, config.block_n), block_table,
            context_len, bits, num_rows, out, part, stat, requests, width, heads, pages, table_len, splits, m_tiles,
            config.least, bits.shape[2], log2_scale, *q.stride()[:3], block_table.stride(0), bits.stride(0),
            bits.stride(1), D=dim, K_STAGES=3, V_STAGES=stages, PDL=config.pdl, **shape, num_warps=4,
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
