# SPDX-License-Identifier: Apache-2.0
"""Keyed sampling in Triton: one read of the logits, split over the vocabulary, and the noise made where it is used.

Without filters a draw is two launches: the best of every chunk, then the best of the chunks. Top-k, top-p and min-p
come down to one number per row, the smallest logit allowed (and, at a tie with it, the largest token id allowed), which
`_cutoff` finds by bisecting over the bits of the logits; it reads the row from the L2 some eighteen times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from aeon_ddtree.kernels.keyed_sampling.reference import GREEDY_BELOW

_INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
_GREEDY_BELOW: tl.constexpr = tl.constexpr(GREEDY_BELOW)
_BLOCK = 2048
_ROUND = 15  # pivots per pass of a bisection: four bits each


@triton.jit
def uniform_tile(seed, index, quad):
    """w of the four tokens of each counter: seed, index int64 scalars, quad int32 [Q] -> fp32 [4 · Q]."""
    zero = tl.zeros_like(quad)
    low = zero + (index & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    high = zero + ((index >> 32) & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    w0, w1, w2, w3 = tl.philox(seed, quad, low, high, zero)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(4 * quad.shape[0])
    return tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)


@triton.jit
def gumbel_of(w):
    """−log(−log1p(−w)), by the functions that PyTorch uses on the device."""
    if _INTERPRETED:
        wide = w.to(tl.float64)
        return (-tl.log(-tl.log(1.0 - wide))).to(tl.float32)
    else:
        return -libdevice.log(-libdevice.log1p(-w))


@triton.jit
def gumbel_tile(seed, index, start, BLOCK: tl.constexpr):
    """G of the tokens start … start + BLOCK − 1, start a multiple of 4: fp32 [BLOCK]."""
    quad = start // 4 + tl.arange(0, BLOCK // 4)
    return gumbel_of(uniform_tile(seed, index, quad))


@triton.jit
def _uniform_kernel(out, seed, index, vocab, BLOCK: tl.constexpr):
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    ids = start + tl.arange(0, BLOCK)
    w = uniform_tile(tl.load(seed + row).to(tl.int64), tl.load(index + row).to(tl.int64),
                     start // 4 + tl.arange(0, BLOCK // 4))  # fmt: skip
    tl.store(out + row * vocab + ids, w, mask=ids < vocab)


@triton.jit
def _gumbel_kernel(out, seed, index, vocab, BLOCK: tl.constexpr):
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    ids = start + tl.arange(0, BLOCK)
    noise = gumbel_tile(tl.load(seed + row).to(tl.int64), tl.load(index + row).to(tl.int64), start, BLOCK)
    tl.store(out + row * vocab + ids, noise, mask=ids < vocab)


def _noise(kernel, seed: Tensor, index: Tensor, vocab: int) -> Tensor:
    out = torch.empty(seed.shape[0], vocab, device=seed.device)
    if out.numel():
        kernel[(seed.shape[0], triton.cdiv(vocab, _BLOCK))](out, seed.contiguous(), index.contiguous(), vocab, _BLOCK)
    return out


def uniform(seed: Tensor, index: Tensor, vocab: int) -> Tensor:
    """See `keyed_uniform`."""
    return _noise(_uniform_kernel, seed, index, vocab)


def gumbel(seed: Tensor, index: Tensor, vocab: int) -> Tensor:
    """See `keyed_gumbel`."""
    return _noise(_gumbel_kernel, seed, index, vocab)


@triton.jit
def _scaled(logits, ids, vocab, temperature):
    """Logits over temperature; NaN, and what lies beyond the vocabulary, as −inf."""
    value = tl.load(logits + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    value = tl.where(value == value, value, -float("inf"))
    return tl.div_rn(value, temperature)


@triton.jit
def ordered(value):
    """Floats -> int32 that compare alike; −0 counts as 0."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):
    """`ordered` back to floats."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(value, best, floor, MASS: tl.constexpr):
    """What an entry weighs: 1, or with MASS exp(logit − best); nothing below `floor`."""
    weight = tl.full(value.shape, 1.0, tl.float32)
    if MASS:
        weight = tl.exp(value - best)
    return tl.where(value >= floor, weight, 0.0)


@triton.jit
def _descend(logits, vocab, temperature, floor, best, target, BLOCK: tl.constexpr, MASS: tl.constexpr):
    """The lowest ordered key whose entries above it weigh less than `target`, and that weight.

    Two bits a pass: of four buckets, those whose entries above weigh too much are too low. Every lane adds up its own
    entries in fp32; lanes are added in fp64, once a pass.
    """
    key = tl.full((), -(1 << 31), tl.int64)
    size = tl.full((), 1 << 30, tl.int64)
    for _ in range(16):
        first, second, third = (
            tl.zeros((BLOCK,), tl.float32),
            tl.zeros((BLOCK,), tl.float32),
            tl.zeros((BLOCK,), tl.float32),
        )
        top = (key + size - 1).to(tl.int32)
        step = size.to(tl.int32)
        for start in range(0, vocab, BLOCK):
            value = _scaled(logits, start + tl.arange(0, BLOCK), vocab, temperature)
            weight = _weights(value, best, floor, MASS)
            place = ordered(value)
            first += tl.where(place > top, weight, 0.0)
            second += tl.where(place > top + step, weight, 0.0)
            third += tl.where(place > top + step + step, weight, 0.0)
        low = (tl.sum(first.to(tl.float64)) >= target).to(tl.int64)
        low += (tl.sum(second.to(tl.float64)) >= target).to(tl.int64)
        low += (tl.sum(third.to(tl.float64)) >= target).to(tl.int64)
        key += low * size
        size = size // 4
    above = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        value = _scaled(logits, start + tl.arange(0, BLOCK), vocab, temperature)
        above += tl.where(ordered(value) > key.to(tl.int32), _weights(value, best, floor, MASS), 0.0)
    return key, tl.sum(above.to(tl.float64))


@triton.jit
def _cutoff(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, low_ptr, tie_ptr, vocab, stride,
    HAS_K: tl.constexpr, HAS_P: tl.constexpr, HAS_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """low, tie [N]: a token is allowed iff its scaled logit is above low, or equal to it and its id at most tie."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    low = tl.full((), -float("inf"), tl.float32)
    tie = tl.full((), vocab, tl.int32)
    if temperature >= _GREEDY_BELOW:
        logits = logits_ptr + row * stride
        highest = tl.full((BLOCK,), -float("inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            highest = tl.maximum(highest, _scaled(logits, start + tl.arange(0, BLOCK), vocab, temperature))
        best = tl.max(highest)
        if HAS_M:
            min_p = tl.maximum(tl.load(min_p_ptr + row).to(tl.float32), 0.0)
            if min_p > 0:
                if _INTERPRETED:
                    low = best + tl.log(min_p)
                else:
                    low = best + libdevice.log(min_p)
        if HAS_K:
            top_k = tl.load(top_k_ptr + row).to(tl.int64)
            if (top_k > 0) & (top_k < vocab):
                key, _ = _descend(logits, vocab, temperature, low, best, top_k.to(tl.float64), BLOCK, False)
                kth = unordered(key.to(tl.int32))
                low = tl.where(kth > low, kth, low)  # NaN where fewer than top_k are left
        if HAS_P:
            top_p = tl.load(top_p_ptr + row).to(tl.float64)
            if top_p < 1:
                share = tl.zeros((BLOCK,), tl.float32)
                for start in range(0, vocab, BLOCK):
                    value = _scaled(logits, start + tl.arange(0, BLOCK), vocab, temperature)
                    share += tl.where(start + tl.arange(0, BLOCK) < vocab, _weights(value, best, low, True), 0.0)
                total = tl.sum(share.to(tl.float64))
                # The first token is always allowed, whatever top_p says.
                limit = tl.maximum(top_p * total, 1e-300)
                key, passed = _descend(logits, vocab, temperature, low, best, limit, BLOCK, True)
                low = unordered(key.to(tl.int32))
                kept = tl.maximum((limit - passed) / tl.exp(low - best).to(tl.float64), 1.0)
                # Equal logits are allowed by rising id, while the mass before them is below the limit.
                seen = tl.full((), 0, tl.int32)
                tie = tl.full((), -1, tl.int32)
                for start in range(0, vocab, BLOCK):
                    ids = start + tl.arange(0, BLOCK)
                    same = (_scaled(logits, ids, vocab, temperature) == low) & (ids < vocab)
                    before = seen + tl.cumsum(same.to(tl.int32)) - same.to(tl.int32)
                    tie = tl.maximum(tie, tl.max(tl.where(same & (before < kept), ids, -1)))
                    seen += tl.sum(same.to(tl.int32))
    tl.store(low_ptr + row, low)
    tl.store(tie_ptr + row, tie)


@triton.jit
def _best_of_chunks(
    logits_ptr, temperature_ptr, seed_ptr, index_ptr, low_ptr, tie_ptr, value_ptr, id_ptr, second_ptr, vocab, stride,
    FILTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = chunk * BLOCK
    ids = start + tl.arange(0, BLOCK)
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    hot = temperature >= _GREEDY_BELOW
    value = _scaled(logits_ptr + row * stride, ids, vocab, tl.where(hot, temperature, 1.0))
    if hot:
        if FILTERED:
            low, tie = tl.load(low_ptr + row), tl.load(tie_ptr + row)
            value = tl.where((value > low) | ((value == low) & (ids <= tie)), value, -float("inf"))
        seed, index = tl.load(seed_ptr + row).to(tl.int64), tl.load(index_ptr + row).to(tl.int64)
        value = value + gumbel_tile(seed, index, start, BLOCK)
    best = tl.max(value)
    token = tl.min(tl.where(value == best, ids, 0x7FFFFFFF))
    out = row * tl.num_programs(1) + chunk
    tl.store(value_ptr + out, best)
    tl.store(id_ptr + out, token)
    tl.store(second_ptr + out, tl.max(tl.where(ids == token, -float("inf"), value)))


@triton.jit
def _best_of_rows(value_ptr, id_ptr, second_ptr, token_ptr, gap_ptr, chunks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    value = tl.load(value_ptr + row * chunks + chunk, mask=chunk < chunks, other=-float("inf"))
    ids = tl.load(id_ptr + row * chunks + chunk, mask=chunk < chunks, other=0x7FFFFFFF)
    second = tl.load(second_ptr + row * chunks + chunk, mask=chunk < chunks, other=-float("inf"))
    best = tl.max(value)
    token = tl.min(tl.where(value == best, ids, 0x7FFFFFFF))
    runner = tl.max(tl.where(ids == token, second, value))
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(gap_ptr + row, tl.where(runner == -float("inf"), float("inf"), best - runner))


def cutoff(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The allowed set per row: tokens above low [N] (in logits / T), and those equal to it with an id up to tie [N].

    logits [N, V] with unit stride along V. Rows below the greedy temperature come out without limits.
    """
    rows, vocab = logits.shape
    low = torch.empty(rows, device=logits.device)
    tie = torch.empty(rows, dtype=torch.int32, device=logits.device)
    filters = (top_k, top_p, min_p)
    # A filter that is not there is never read: any pointer will do.
    pointers = [temperature if x is None else x.contiguous() for x in filters]
    has = [x is not None for x in filters]
    _cutoff[(rows,)](
        logits, temperature, *pointers, low, tie, vocab, logits.stride(0), *has, BLOCK=4 * _BLOCK, num_warps=16
    )
    return low, tie


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None,
    seed: Tensor, index: Tensor, with_gap: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See `keyed_sample`. logits fp16, bf16 or fp32; the arithmetic is fp32."""
    rows, vocab = logits.shape
    device = logits.device
    token = torch.empty(rows, dtype=torch.int64, device=device)
    gap = torch.empty(rows, device=device)
    if not rows:
        return token, gap if with_gap else None
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    temperature, seed, index = temperature.contiguous(), seed.contiguous(), index.contiguous()
    filtered = not (top_k is None and top_p is None and min_p is None)
    low, tie = cutoff(logits, temperature, top_k, top_p, min_p) if filtered else (gap, gap)
    chunks = triton.cdiv(vocab, _BLOCK)
    value, second = torch.empty(2, rows, chunks, device=device)
    ids = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    _best_of_chunks[(rows, chunks)](
        logits, temperature, seed, index, low, tie, value, ids, second, vocab, logits.stride(0), filtered, _BLOCK
    )
    _best_of_rows[(rows,)](value, ids, second, token, gap, chunks, triton.next_power_of_2(chunks), num_warps=1)
    return token, gap if with_gap else None
