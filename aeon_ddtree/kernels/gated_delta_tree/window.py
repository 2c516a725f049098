# SPDX-License-Identifier: Apache-2.0
"""Device functions of the verify kernels: gates, decays, and the unit-triangular system of 16 rows.

Precision. q and k arrive in bf16 and stay so in the products; their norms are applied to the fp32 results. An fp32
state is cut into three bf16 parts that together hold all its bits, so products with it are exact up to the fp32
accumulation. Log decays are summed as (multiple of a grid on which 128 terms add exactly) + (small rest): differences
c_i − c_j keep fp32 accuracy however large c is. `tl.exp` and `/` are the GPU's estimates, off by some units of the last
place and by more the larger the exponent; gates and decays scale whole rows, so they use `exp` and `tl.div_rn`.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra import libdevice

from aeon_ddtree.kernels.gated_delta_tree.reference import L2_EPS

_EPS: tl.constexpr = tl.constexpr(L2_EPS)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def exp(x):
    """exp of fp32 within one unit of the last place."""
    if _INTERPRETED:  # which has no libdevice, and whose own exp is as good
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(−x)) of fp32, each operation rounded once."""
    return tl.div_rn(1.0, 1.0 + exp(-x))


@triton.jit
def product(x, y, acc):
    """acc + x y with fp32 sums; x and y bf16, or fp32 without loss."""
    if _INTERPRETED:  # which has no products of bf16
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, y, acc, input_precision="ieee")


@triton.jit
def log_decay(x, rate):
    """−rate · softplus(x), softplus(x) = max(x, 0) + log(1 + exp(−|x|)) by the atanh series (no cancellation)."""
    e = exp(-tl.abs(x))
    s = tl.div_rn(e, 2 + e)
    z = s * s
    series = 1.0 / 17
    for n in tl.static_range(8):
        series = series * z + 1.0 / (15 - 2 * n)
    return -rate * (tl.maximum(x, 0) + 2 * s * series)


@triton.jit
def inverse_norm(squares):
    """1 / sqrt(sum of squares + eps) of each row, right to the last bit but for rare ties.

    It scales a whole key, so its error goes into every product with that key. One Newton step from an estimate r, its
    residual 1 − x r² formed without rounding x r.
    """
    x = tl.sum(squares, 1) + _EPS
    r = tl.rsqrt(x)
    p = x * r
    residual = tl.fma(-p, r, 1.0) - tl.fma(x, r, -p) * r
    return tl.fma(0.5 * r, residual, r)


@triton.jit
def real_rows(parent, row, width):
    """Row 0 and rows with an earlier parent; anything else is padding."""
    above = tl.load(parent + row, mask=row < width, other=-1)
    return ((row == 0) | ((above >= 0) & (above < row))) & (row < width)


@triton.jit
def gate_input(a, a_row, dt_bias, row, mask):
    return tl.load(a + row * a_row, mask=mask, other=0.0).to(tl.float32) + tl.load(dt_bias).to(tl.float32)


@triton.jit
def gates(x, a_log, real):
    """Log decays of rows as g_hi + g_lo, zero in padding; any 128 of the g_hi add exactly. x as from `gate_input`."""
    g = tl.where(real, log_decay(x, exp(tl.load(a_log).to(tl.float32))), 0.0)
    # Adding and taking away 384 · 2^floor(log2 max) rounds to that grid.
    power = (tl.max(tl.abs(g), 0).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 384.0
    g_hi = (g + power) - power
    return g_hi, g - g_hi


@triton.jit
def sees_of(seen, row, col, real, width):
    """Ancestors-or-self of rows [16, BW]; never above the diagonal, nothing in padding rows."""
    allowed = real[:, None] & (col[None, :] <= row[:, None])
    return tl.load(seen + row[:, None] * width + col[None, :], mask=allowed, other=0) != 0


@triton.jit
def decays(sees, c_hi, c_lo, c_hi_all, c_lo_all):
    """exp(c_i − c_j) where i sees j, else 0: rows c [M] against c_all [BW]."""
    # Masked before exp: where j is not above i the difference is positive and may overflow.
    difference = (c_hi[:, None] - c_hi_all[None, :]) + (c_lo[:, None] - c_lo_all[None, :])
    return exp(tl.where(sees, difference, float("-inf")))


@triton.jit
def _join(t, a, SIZE: tl.constexpr):
    """Inverse of diagonal blocks of 2 · SIZE rows from that of blocks of SIZE rows."""
    i = tl.arange(0, 16)[:, None] // SIZE
    j = tl.arange(0, 16)[None, :] // SIZE
    coupling = tl.where((i == j + 1) & (j % 2 == 0), a, 0.0)
    return t - tl.dot(tl.dot(t, coupling, input_precision="ieee"), t, input_precision="ieee")


@triton.jit
def unit_inverse(a):
    """(I + a)^-1 of a strictly lower triangular 16×16 block, by block recursion.

    T <- T − T M_s T for s = 1, 2, 4, 8, M_s the part of a that couples neighbours of size s. No power of a is formed:
    with near-parallel keys powers grow like binomials and cancel.
    """
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    t = tl.where(i == j, 1.0, tl.where((i == j + 1) & (j % 2 == 0), -a, 0.0))
    t = _join(t, a, 2)
    t = _join(t, a, 4)
    return _join(t, a, 8)


@triton.jit
def _cut(x):
    """The upper half of an fp32 number as bf16, and what it leaves, exactly: three cuts take all 24 bits.

    Cutting is a mask and a byte permutation; rounding to bf16 would be a conversion, at a quarter of their rate.
    """
    bits = x.to(tl.int32, bitcast=True)
    half = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return half, x - (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def times_state(keys, queries, s, key_sum, query_sum, PARTS: tl.constexpr):
    """Adds keys · s^T and queries · s^T, [M, step] × [step, columns], to fp32 sums.

    PARTS 3: an fp32 state in three bf16 parts, the smallest first; 1: a bf16 state; 0: keys and queries are fp32.
    """
    if PARTS == 3:
        hi, rest = _cut(s)
        mid, rest = _cut(rest)
        lo, rest = _cut(rest)
        hi = tl.trans(hi)
        mid = tl.trans(mid)
        lo = tl.trans(lo)
        key_sum = product(keys, hi, product(keys, mid, product(keys, lo, key_sum)))
        query_sum = product(queries, hi, product(queries, mid, product(queries, lo, query_sum)))
    else:
        whole = tl.trans(s.to(tl.float32) if PARTS == 0 else s)
        key_sum = product(keys, whole, key_sum)
        query_sum = product(queries, whole, query_sum)
    return key_sum, query_sum
