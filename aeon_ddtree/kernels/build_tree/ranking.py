# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch ranking of the drafter's candidates, greedy or coupled to the target's coming noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from aeon_ddtree.kernels import checks
from aeon_ddtree.kernels.keyed_sampling import GREEDY_BELOW, keyed_gumbel


def rank(
    logits: Tensor, temperature: Tensor, seed: Tensor, index: Tensor, top_k: int, ranking: str, tau: float, mix: float,
    softness: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `rank_candidates`."""
    score = logits.float().log_softmax(-1)
    if ranking != "greedy":
        hot = temperature >= GREEDY_BELOW
        if checks.reads_are_free(logits):
            which = hot.nonzero()[:, 0]
            if which.numel():
                score[which] = _coupled(
                    score[which], temperature[which], seed[which], index[which], ranking, tau, mix, softness
                )
        else:
            coupled = _coupled(score, temperature, seed, index, ranking, tau, mix, softness)
            score = torch.where(hot[:, None, None], coupled, score)
    token = _top_ids(score, top_k)
    return token, score.gather(-1, token)


def _coupled(
    log_q: Tensor, temperature: Tensor, seed: Tensor, index: Tensor, ranking: str, tau: float, mix: float,
    softness: float,
) -> Tensor:  # fmt: skip
    """Log weights of the perturbed ranking: log_q [R, k, V] -> [R, k, V]."""
    horizon, vocab = log_q.shape[1:]
    output = index.long()[:, None] + torch.arange(horizon, device=index.device)
    noise = keyed_gumbel(seed.long().repeat_interleave(horizon), output.flatten(), vocab).reshape(log_q.shape)
    sharp = tau * torch.where(temperature < GREEDY_BELOW, 1.0, temperature.float())
    coupled = ((log_q / sharp[:, None, None] + noise) / softness).log_softmax(-1)
    if ranking == "coupled" or mix == 1:
        return coupled
    if mix == 0:
        return log_q
    return torch.logaddexp(log_q + math.log1p(-mix), coupled + math.log(mix))


def _top_ids(score: Tensor, top_k: int) -> Tensor:
    """Ids of the top_k highest scores, falling, ties by lower id; fp32 [..., V] -> int64 [..., top_k].

    `topk` leaves the order of ties open, so it is asked about distinct integers: an order-preserving image of the
    float in the high word, the inverted id in the low word. NaN ranks as −inf.
    """
    vocab = score.shape[-1]
    bits = score.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).add(0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    inverted = torch.arange(vocab - 1, -1, -1, device=score.device)
    best = ((ordered << 32) | inverted).topk(top_k, dim=-1).values
    return vocab - 1 - (best & 0xFFFFFFFF)
