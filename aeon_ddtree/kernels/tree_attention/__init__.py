# SPDX-License-Identifier: Apache-2.0
"""Attention of a tree of rows over a paged KV cache, and writing into that cache.

out_i = softmax(scale · q_i K_i^T) V_i,   keys i = committed positions [0, context_len) + the rows visible to i
"""

from __future__ import annotations

import torch
from torch import Tensor

from aeon_ddtree.kernels.checks import Shapes, require
from aeon_ddtree.kernels.dispatch import takes_triton
from aeon_ddtree.kernels.tree_attention import reference

__all__ = ["pack_visible", "tree_attention", "unpack_visible", "write_kv"]


def pack_visible(visible: Tensor) -> Tensor:
    """visible bool [R, W, W] -> int32 [R, W, ceil(W / 32)], bit j % 32 of word j // 32 for row j.

    `tree_attention` takes either form; packed once, the mask serves all layers of a step.
    """
    shapes = Shapes()
    shapes("visible", visible, "R W W", "bool")
    if takes_triton(visible):
        from aeon_ddtree.kernels.tree_attention import triton

        return triton.pack_visible(visible)
    return reference.pack(visible)


def unpack_visible(bits: Tensor) -> Tensor:
    """The inverse of `pack_visible`: int32 [R, W, words] -> bool [R, W, W]."""
    shapes = Shapes()
    shapes("bits", bits, "R W words", "int")
    return reference.unpack(bits)


def tree_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, context_len: Tensor, visible: Tensor,
    num_rows: Tensor, *, scale: float, window: int | None = None, depth: Tensor | None = None,
    own_kv: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Every row attends to the committed prefix and to the rows that it may see.

    q [R, W, Hq, D]; k_cache [N, block, Hkv, D], v_cache [N, block, Hkv, Dv], strided views welcome, any block size;
    block_table int [R, max_blocks], `request, block number -> cache block` (entries beyond the rows in use may hold
    anything); context_len int [R], committed positions; the rows' own K/V already stand in the cache at positions
    context_len + row; visible bool [R, W, W] or what `pack_visible` makes of it; num_rows int [R], rows in use (others
    give 0, and are seen by nobody).
    window: keep a key iff query position − key position < window, where a row's position is context_len + depth
    (depth int [R, W], needed with a window: windows go by depth, not by row). Head h of q uses head h // (Hq // Hkv).
    own_kv: the rows' own k [R, W, Hkv, D] and v [R, W, Hkv, Dv] where they are not in the cache (a drafter's block).
    W of any size, so that a prompt is the same call with a lower-triangular `visible`. Sums in fp32 (fp64 for fp64 q).
    Returns out [R, W, Hq, Dv] in q.dtype. ValueError names the argument at fault.
    """
    shapes = Shapes()
    shapes("q", q, "R W Hq D", "float")
    shapes("k_cache", k_cache, "N block Hkv D", "float")
    shapes("v_cache", v_cache, "N block Hkv Dv", "float")
    shapes("block_table", block_table, "R max_blocks", "int")
    shapes("context_len", context_len, "R", "int")
    packed = isinstance(visible, Tensor) and visible.dtype == torch.int32
    shapes.bind("W'", -(-shapes["W"] // 32) if packed else shapes["W"], "q")
    shapes("visible", visible, "R W W'", "int" if packed else "bool")
    shapes("num_rows", num_rows, "R", "int")
    shapes("depth", depth, "R W", "int", optional=True)
    heads, kv_heads = shapes["Hq"], shapes["Hkv"]
    require(heads % kv_heads == 0, f"q has {heads} heads, expected a multiple of the {kv_heads} heads of k_cache")
    require(window is None or window >= 1, f"window is {window}, expected at least 1, or None for full attention")
    require(window is None or depth is not None, "depth is None, expected [R, W] since window is given")
    if own_kv is not None:
        shapes("own_kv[0]", own_kv[0], "R W Hkv D", "float")
        shapes("own_kv[1]", own_kv[1], "R W Hkv Dv", "float")
    if takes_triton(q):
        from aeon_ddtree.kernels.tree_attention import triton

        if triton.takes(q, k_cache, v_cache, own_kv, scale):
            bits = visible if packed else triton.pack_visible(visible)
            return triton.attention(
                q, k_cache, v_cache, block_table, context_len, bits, num_rows, scale, window, depth, own_kv
            )
    if packed:
        visible = reference.unpack(visible)
    return reference.attention(
        q, k_cache, v_cache, block_table, context_len, visible, num_rows, scale, window, depth, own_kv
    )


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store T keys and values in place: token t goes to slot_mapping[t] = block · block size + offset; < 0 is skipped.

    k [T, Hkv, D], v [T, Hkv, Dv] (converted to the caches' dtype), caches as in `tree_attention`, slot_mapping int [T].
    """
    shapes = Shapes()
    shapes("k", k, "T Hkv D", "float")
    shapes("v", v, "T Hkv Dv", "float")
    shapes("k_cache", k_cache, "N block Hkv D", "float")
    shapes("v_cache", v_cache, "N block Hkv Dv", "float")
    shapes("slot_mapping", slot_mapping, "T", "int")
    if takes_triton(k):
        from aeon_ddtree.kernels.tree_attention import triton

        return triton.write(k, v, k_cache, v_cache, slot_mapping)
    return reference.write(k, v, k_cache, v_cache, slot_mapping)
