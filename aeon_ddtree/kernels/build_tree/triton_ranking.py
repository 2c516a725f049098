# SPDX-License-Identifier: Apache-2.0
"""Ranking the drafter's candidates in Triton: the vocabulary in chunks, the best of each, then the best of the chunks.

log_softmax only shifts a row, so greedy and coupled rankings order raw scores and read the logits once; the shift comes
from the chunks' running sums. The mixed ranking adds two distributions, so both shifts are found in a launch before.
Candidates travel as one integer, an order-preserving image of the score over the inverted id: ties go to the lower id.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from aeon_ddtree.kernels.keyed_sampling.reference import GREEDY_BELOW
from aeon_ddtree.kernels.keyed_sampling.triton import gumbel_tile, ordered

_INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
_GREEDY_BELOW: tl.constexpr = tl.constexpr(GREEDY_BELOW)
_BLOCK = 2048


@triton.jit
def _scores(
    logits_ptr, temperature_ptr, seed_ptr, index_ptr, horizon, vocab, stride_r, stride_k, tau, softness,
    COUPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """This chunk's ids, logits and, where coupled, perturbed scores: up to a shift per row, log q and log c."""
    row, start = tl.program_id(0), tl.program_id(1) * BLOCK
    request, position = (row // horizon).to(tl.int64), row % horizon
    ids = start + tl.arange(0, BLOCK)
    logit = tl.load(
        logits_ptr + request * stride_r + position * stride_k + ids, mask=ids < vocab, other=-float("inf")
    ).to(tl.float32)
    logit = tl.where(logit == logit, logit, -float("inf"))
    score = logit
    hot = tl.full((), False, tl.int1)
    if COUPLED:
        temperature = tl.load(temperature_ptr + request).to(tl.float32)
        hot = temperature >= _GREEDY_BELOW
        if hot:
            seed = tl.load(seed_ptr + request).to(tl.int64)
            index = tl.load(index_ptr + request).to(tl.int64) + position
            score = (logit / (tau * temperature) + gumbel_tile(seed, index, start, BLOCK)) / softness
    return ids, logit, score, hot


@triton.jit
def _log_sum(value):
    best = tl.max(value)
    safe = tl.where(best == -float("inf"), 0.0, best)
    return safe + tl.log(tl.sum(tl.exp(value - safe)))


@triton.jit
def _pack(score, ids, vocab):
    """Score and id as an int64 that orders by falling score, then by rising id; the same image as `ordered`."""
    return (ordered(score).to(tl.int64) << 32) | tl.where(ids < vocab, 0x7FFFFFFF - ids, 0).to(tl.int64)


@triton.jit
def _top(packed, TOP: tl.constexpr):
    """The TOP largest, falling."""
    if _INTERPRETED:  # its reductions lose a tensor's shape inside tl.topk
        rank = tl.arange(0, TOP)
        best = tl.full((TOP,), -(1 << 63), tl.int64)
        for place in tl.static_range(TOP):
            largest = tl.max(packed)
            best = tl.where(rank == place, largest, best)
            packed = tl.where(packed == largest, -(1 << 63), packed)
        return best
    else:
        return tl.topk(packed, TOP)


@triton.jit
def _sums(
    logits_ptr, temperature_ptr, seed_ptr, index_ptr, sums_ptr, horizon, vocab, stride_r, stride_k, tau, softness,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Log sums of every chunk: sums [2, rows, chunks], of the logits and of the perturbed scores."""
    _, logit, score, _ = _scores(
        logits_ptr, temperature_ptr, seed_ptr, index_ptr, horizon, vocab, stride_r, stride_k, tau, softness, True, BLOCK
    )
    chunks, rows = tl.num_programs(1), tl.num_programs(0)
    place = tl.program_id(0) * chunks + tl.program_id(1)
    tl.store(sums_ptr + place, _log_sum(logit))
    tl.store(sums_ptr + rows * chunks + place, _log_sum(score))


@triton.jit
def _rank_chunks(
    logits_ptr, temperature_ptr, seed_ptr, index_ptr, sums_ptr, best_ptr, horizon, vocab, stride_r, stride_k, tau,
    softness, log_rest, log_mix, COUPLED: tl.constexpr, MIXED: tl.constexpr, TOP: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    ids, logit, score, hot = _scores(
        logits_ptr, temperature_ptr, seed_ptr, index_ptr, horizon, vocab, stride_r, stride_k, tau, softness, COUPLED,
        BLOCK,
    )  # fmt: skip
    chunks, rows, row = tl.num_programs(1), tl.num_programs(0), tl.program_id(0)
    place = row * chunks + tl.program_id(1)
    if MIXED:
        chunk = tl.arange(0, CHUNKS)
        of_row = sums_ptr + row * chunks + chunk
        log_q = logit - _log_sum(tl.load(of_row, mask=chunk < chunks, other=-float("inf")))
        log_c = score - _log_sum(tl.load(of_row + rows * chunks, mask=chunk < chunks, other=-float("inf")))
        first, second = log_q + log_rest, log_c + log_mix
        top = tl.maximum(first, second)
        safe = tl.where(top == -float("inf"), 0.0, top)
        both = safe + tl.log(tl.exp(first - safe) + tl.exp(second - safe))
        score = tl.where(hot, both, log_q)
    else:
        tl.store(sums_ptr + place, _log_sum(score))
    best = _top(_pack(score, ids, vocab), TOP)
    tl.store(best_ptr + place.to(tl.int64) * TOP + tl.arange(0, TOP), best)


@triton.jit
def _rank_rows(
    sums_ptr, best_ptr, token_ptr, logp_ptr, chunks, vocab, top_k, MIXED: tl.constexpr, TOP: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, CHUNKS * TOP)
    packed = tl.load(best_ptr + row * chunks * TOP + entry, mask=entry < chunks * TOP, other=-(1 << 63))
    best = _top(packed, TOP)
    key = (best >> 32).to(tl.int32)
    score = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    if not MIXED:
        chunk = tl.arange(0, CHUNKS)
        score = score - _log_sum(tl.load(sums_ptr + row * chunks + chunk, mask=chunk < chunks, other=-float("inf")))
    rank = tl.arange(0, TOP)
    out = row * top_k + rank
    tl.store(token_ptr + out, 0x7FFFFFFF - (best & 0xFFFFFFFF), mask=rank < top_k)
    tl.store(logp_ptr + out, score, mask=rank < top_k)


def rank(
    logits: Tensor, temperature: Tensor, seed: Tensor, index: Tensor, top_k: int, ranking: str, tau: float, mix: float,
    softness: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `rank_candidates`. logits fp16, bf16 or fp32, top_k at most 128; the arithmetic is fp32."""
    requests, horizon, vocab = logits.shape
    device, rows, chunks = logits.device, requests * horizon, triton.cdiv(vocab, _BLOCK)
    if ranking == "mixed" and mix in (0, 1):
        ranking = "coupled" if mix else "greedy"
    mixed, coupled = ranking == "mixed", ranking != "greedy"
    if logits.stride(2) != 1:
        logits = logits.contiguous()
    token = torch.empty(requests, horizon, top_k, dtype=torch.int64, device=device)
    logp = torch.empty(requests, horizon, top_k, device=device)
    if not rows:
        return token, logp
    top = triton.next_power_of_2(top_k)
    sums = torch.empty(2 if mixed else 1, rows, chunks, device=device)
    best = torch.empty(rows, chunks, top, dtype=torch.int64, device=device)
    temperature, seed, index = temperature.contiguous(), seed.contiguous(), index.contiguous()
    inputs = (logits, temperature, seed, index, sums)
    shape = (horizon, vocab, logits.stride(0), logits.stride(1), tau, softness)
    padded = triton.next_power_of_2(chunks)
    if mixed:
        _sums[(rows, chunks)](*inputs, *shape, _BLOCK)
    log_rest, log_mix = (math.log1p(-mix), math.log(mix)) if mixed else (0.0, 0.0)
    _rank_chunks[(rows, chunks)](*inputs, best, *shape, log_rest, log_mix, coupled, mixed, top, padded, _BLOCK)
    _rank_rows[(rows,)](sums, best, token, logp, chunks, vocab, top_k, mixed, top, padded)
    return token, logp
