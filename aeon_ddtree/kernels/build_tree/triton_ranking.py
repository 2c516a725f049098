# SPDX-License-Identifier: Apache-2.0
"""Ranking the drafter's candidates in Triton: the vocabulary in chunks, and only the best chunks looked at closely.

The K best candidates lie in the K chunks with the greatest maxima. So one launch finds every chunk's maximum, one the K
best of each of those K chunks, and one the K best of those. log_softmax only shifts a row: greedy and coupled rankings
order raw scores, and the shift comes from the chunks' sums. The mixed ranking adds two distributions, so both shifts
are found in a launch before. Candidates travel as one integer, an order-preserving image of the score over the inverted
id: all differ, and ties go to the lower id.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from aeon_ddtree.kernels.keyed_sampling.reference import GREEDY_BELOW
from aeon_ddtree.kernels.keyed_sampling.triton import gumbel_tile, ordered, unordered

_INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
_GREEDY_BELOW: tl.constexpr = tl.constexpr(GREEDY_BELOW)
_BLOCK = 2048


@triton.jit
def _scores(
    logits_ptr, temperature_ptr, seed_ptr, index_ptr, row, start, horizon, vocab, stride_r, stride_k, tau, softness,
    COUPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A chunk's ids, logits and, where coupled, perturbed scores: up to a shift per row, log q and log c."""
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
def _log_sum_of_row(sums_ptr, row, chunks, CHUNKS: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    return _log_sum(tl.load(sums_ptr + row * chunks + chunk, mask=chunk < chunks, other=-float("inf")))


@triton.jit
def _sums(
    logits_ptr, temperature_ptr, seed_ptr, index_ptr, sums_ptr, horizon, vocab, stride_r, stride_k, tau, softness,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Log sums of every chunk: sums [2, rows, chunks], of the logits and of the perturbed scores."""
    row, chunks, rows = tl.program_id(0), tl.num_programs(1), tl.num_programs(0)
    _, logit, score, _ = _scores(
        logits_ptr, temperature_ptr, seed_ptr, index_ptr, row, tl.program_id(1) * BLOCK, horizon, vocab, stride_r,
        stride_k, tau, softness, True, BLOCK,
    )  # fmt: skip
    place = row * chunks + tl.program_id(1)
    tl.store(sums_ptr + place, _log_sum(logit))
    tl.store(sums_ptr + rows * chunks + place, _log_sum(score))


@triton.jit
def _packed_scores(
    logits_ptr, temperature_ptr, seed_ptr, index_ptr, sums_ptr, row, chunk, rows, chunks, horizon, vocab, stride_r,
    stride_k, tau, softness, log_rest, log_mix, COUPLED: tl.constexpr, MIXED: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A chunk's scores, and the same with their ids as int64 that order by falling score, then by rising id."""
    ids, logit, score, hot = _scores(
        logits_ptr, temperature_ptr, seed_ptr, index_ptr, row, chunk * BLOCK, horizon, vocab, stride_r, stride_k, tau,
        softness, COUPLED, BLOCK,
    )  # fmt: skip
    if MIXED:
        log_q = logit - _log_sum_of_row(sums_ptr, row, chunks, CHUNKS)
        log_c = score - _log_sum_of_row(sums_ptr, rows + row, chunks, CHUNKS)
        first, second = log_q + log_rest, log_c + log_mix
        top = tl.maximum(first, second)
        safe = tl.where(top == -float("inf"), 0.0, top)
        both = safe + tl.log(tl.exp(first - safe) + tl.exp(second - safe))
        score = tl.where(hot, both, log_q)
    # Beyond the vocabulary: below every candidate.
    packed = (ordered(score).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
    return score, tl.where(ids < vocab, packed, -(1 << 63))


@triton.jit
def _best_of_chunks(
    logits_ptr, temperature_ptr, seed_ptr, index_ptr, sums_ptr, best_ptr, horizon, vocab, stride_r, stride_k, tau,
    softness, log_rest, log_mix, COUPLED: tl.constexpr, MIXED: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """best [rows, chunks]: every chunk's greatest packed score; unless MIXED also its log sum, in sums."""
    row, chunk, rows, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    score, packed = _packed_scores(
        logits_ptr, temperature_ptr, seed_ptr, index_ptr, sums_ptr, row, chunk, rows, chunks, horizon, vocab, stride_r,
        stride_k, tau, softness, log_rest, log_mix, COUPLED, MIXED, CHUNKS, BLOCK,
    )  # fmt: skip
    tl.store(best_ptr + row * chunks + chunk, tl.max(packed))
    if not MIXED:
        tl.store(sums_ptr + row * chunks + chunk, _log_sum(score))


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
    elif TOP == 1:  # tl.topk starts at two
        return tl.max(packed) + tl.zeros((1,), tl.int64)
    else:
        return tl.topk(packed, TOP)


@triton.jit
def _top_of_chunks(
    logits_ptr, temperature_ptr, seed_ptr, index_ptr, sums_ptr, best_ptr, top_ptr, chunks, horizon, vocab, stride_r,
    stride_k, tau, softness, log_rest, log_mix, COUPLED: tl.constexpr, MIXED: tl.constexpr, TOP: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """top [rows, picks, TOP]: the best of the chunk whose maximum comes in place `pick` among the row's."""
    row, pick, rows, picks = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    chunk = tl.arange(0, CHUNKS)
    best = tl.load(best_ptr + row * chunks + chunk, mask=chunk < chunks, other=-(1 << 63))
    chosen = best
    for _ in range(pick):
        chosen = tl.where(chosen == tl.max(chosen), -(1 << 63), chosen)
    which = tl.min(tl.where(best == tl.max(chosen), chunk, chunks - 1))
    _, packed = _packed_scores(
        logits_ptr, temperature_ptr, seed_ptr, index_ptr, sums_ptr, row, which, rows, chunks, horizon, vocab, stride_r,
        stride_k, tau, softness, log_rest, log_mix, COUPLED, MIXED, CHUNKS, BLOCK,
    )  # fmt: skip
    tl.store(top_ptr + (row * picks + pick) * TOP + tl.arange(0, TOP), _top(packed, TOP))


@triton.jit
def _top_of_rows(
    sums_ptr, top_ptr, token_ptr, logp_ptr, picks, chunks, top_k, MIXED: tl.constexpr, TOP: tl.constexpr,
    PICKS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    entry = tl.arange(0, PICKS * TOP)
    packed = tl.load(top_ptr + row * picks * TOP + entry, mask=entry < picks * TOP, other=-(1 << 63))
    best = _top(packed, TOP)
    score = unordered((best >> 32).to(tl.int32))
    if not MIXED:
        score = score - _log_sum_of_row(sums_ptr, row, chunks, CHUNKS)
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
    top, picks = triton.next_power_of_2(top_k), min(top_k, chunks)
    sums = torch.empty(2 if mixed else 1, rows, chunks, device=device)
    best = torch.empty(rows, chunks, dtype=torch.int64, device=device)
    tops = torch.empty(rows, picks, top, dtype=torch.int64, device=device)
    temperature, seed, index = temperature.contiguous(), seed.contiguous(), index.contiguous()
    inputs = (logits, temperature, seed, index, sums)
    shape = (horizon, vocab, logits.stride(0), logits.stride(1), tau, softness)
    mixing = (math.log1p(-mix), math.log(mix)) if mixed else (0.0, 0.0)
    padded = triton.next_power_of_2(chunks)
    if mixed:
        _sums[(rows, chunks)](*inputs, *shape, _BLOCK)
    _best_of_chunks[(rows, chunks)](*inputs, best, *shape, *mixing, coupled, mixed, padded, _BLOCK)
    _top_of_chunks[(rows, picks)](*inputs, best, tops, chunks, *shape, *mixing, coupled, mixed, top, padded, _BLOCK)
    _top_of_rows[(rows,)](
        sums, tops, token, logp, picks, chunks, top_k, mixed, top, triton.next_power_of_2(picks), padded
    )
    return token, logp
