# SPDX-License-Identifier: Apache-2.0
"""Stores a step's keys and values into the paged cache."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _copy(source, target, s_h, s_d, t_h, t_d, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """One token's [HEADS, D] from source to target, converted to the target's dtype."""
    for start in tl.static_range(0, HEADS * D, BLOCK):
        i = start + tl.arange(0, BLOCK)
        head, d = (i // D).to(tl.int64), (i % D).to(tl.int64)
        value = tl.load(source + head * s_h + d * s_d, mask=i < HEADS * D)
        tl.store(target + head * t_h + d * t_d, value.to(target.dtype.element_ty), mask=i < HEADS * D)


@triton.jit(do_not_specialize=["N", "slot_stride"])
def write_kernel(
    k, v, k_cache, v_cache, slot_mapping, N, slot_stride,
    k_t, k_h, k_d, v_t, v_h, v_d, kc_n, kc_t, kc_h, kc_d, vc_n, vc_t, vc_h, vc_d,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program t: token t goes to slot_mapping[t] = page · BLOCK_SIZE + place; slots outside the cache are skipped."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + t * slot_stride).to(tl.int64)
    if (slot >= 0) & (slot < N * tl.full([], BLOCK_SIZE, tl.int64)):
        page = slot // BLOCK_SIZE
        place = slot - page * BLOCK_SIZE
        _copy(k + t * k_t, k_cache + page * kc_n + place * kc_t, k_h, k_d, kc_h, kc_d, HEADS, D, BLOCK)
        _copy(v + t * v_t, v_cache + page * vc_n + place * vc_t, v_h, v_d, vc_h, vc_d, HEADS, DV, BLOCK)
