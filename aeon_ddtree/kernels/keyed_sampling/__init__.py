# SPDX-License-Identifier: Apache-2.0
"""Gumbel-max sampling with counter-based noise, so that a draw depends on (seed, output index, token id) alone.

    token_t = argmax over the allowed x of  logits_t[x] / T + G(seed, t, x)

G comes from Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): key = (seed low,
seed high), counter = (x // 4, t low, t high, 0), lane x % 4. A 32-bit word b becomes w = (float32(b) + 0.5) · 2^-32,
at most 1 − 2^-24, and G = −log(−log1p(−w)), which is −log(−log u) for u = 1 − w. Small w, that is large G, keep their
full precision: with u itself in fp32, u = 1 and G = inf would come up once per 2^25 words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aeon_ddtree.kernels.checks import Shapes, require
from aeon_ddtree.kernels.dispatch import takes_triton
from aeon_ddtree.kernels.keyed_sampling import philox, reference

__all__ = ["GREEDY_BELOW", "keyed_gumbel", "keyed_sample", "keyed_uniform"]

GREEDY_BELOW = reference.GREEDY_BELOW


def _check_key(seed: Tensor, index: Tensor, vocab: int) -> None:
    shapes = Shapes()
    shapes("seed", seed, "N", "int")
    shapes("index", index, "N", "int")
    require(1 <= vocab < 1 << 31, f"vocab is {vocab}, expected 1 to 2147483647")


def keyed_uniform(seed: Tensor, index: Tensor, vocab: int, *, device: torch.device | str | None = None) -> Tensor:
    """w(seed, index, x) in (0, 1) for x = 0 … vocab − 1: seed, index int [N] -> fp32 [N, vocab].

    device: where to compute; by default where seed is.
    """
    _check_key(seed, index, vocab)
    device = seed.device if device is None else torch.device(device)
    seed, index = seed.to(device), index.to(device)
    if takes_triton(seed):
        from aeon_ddtree.kernels.keyed_sampling import triton

        return triton.uniform(seed, index, vocab)
    return philox.uniform(seed, index, vocab)


def keyed_gumbel(seed: Tensor, index: Tensor, vocab: int, *, device: torch.device | str | None = None) -> Tensor:
    """Standard Gumbel noise G(seed, index, x) for x = 0 … vocab − 1: seed, index int [N] -> fp32 [N, vocab]."""
    _check_key(seed, index, vocab)
    device = seed.device if device is None else torch.device(device)
    seed, index = seed.to(device), index.to(device)
    if takes_triton(seed):
        from aeon_ddtree.kernels.keyed_sampling import triton

        return triton.gumbel(seed, index, vocab)
    return reference.noise(seed, index, vocab)


def keyed_sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None,
    seed: Tensor, index: Tensor, *, return_scores: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """One token per row.

    logits float [N, V], already penalised, biased and masked (−inf); temperature float [N], below 1e-5 = argmax, lowest
    id at a tie; top_k int [N] or None (<= 0 or >= V off; ties with the k-th value stay), top_p float [N] or None
    (>= 1 off), min_p float [N] or None (<= 0 off); seed, index int [N]. The allowed set is built in the order of
    vLLM's sampler: logits / T, min-p, top-k, then top-p of what is left; among equal logits top-p keeps lower ids.

    On a CUDA device logits of fp64 take the reference, all others Triton, which works in fp32.
    Returns token int64 [N]; with return_scores also gap fp32 [N]: the lead of the winner over the second best, in
    perturbed logits (plain logits where greedy; inf if nothing else is allowed).
    """
    shapes = Shapes()
    shapes("logits", logits, "N V", "float")
    shapes("temperature", temperature, "N", "float")
    shapes("top_k", top_k, "N", "int", optional=True)
    shapes("top_p", top_p, "N", "float", optional=True)
    shapes("min_p", min_p, "N", "float", optional=True)
    shapes("seed", seed, "N", "int")
    shapes("index", index, "N", "int")
    require(1 <= shapes["V"] < 1 << 31, f"logits has {shapes['V']} columns, expected 1 to 2147483647, the vocabulary")
    arguments = (logits, temperature, top_k, top_p, min_p, seed, index, return_scores)
    if takes_triton(logits) and logits.dtype != torch.float64:
        from aeon_ddtree.kernels.keyed_sampling import triton

        token, gap = triton.sample(*arguments)
    else:
        token, gap = reference.sample(*arguments)
    return (token, gap) if gap is not None else token
