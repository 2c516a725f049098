# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch keyed sampling. On the CPU work is saved where reading values is free; the draw is the same."""

from __future__ import annotations

import torch
from torch import Tensor

from aeon_ddtree.kernels import checks
from aeon_ddtree.kernels.keyed_sampling.memo import gumbel_rows
from aeon_ddtree.kernels.keyed_sampling.philox import gumbel_of, uniform, uniform_at

GREEDY_BELOW = 1e-5
# Candidates tried before sorting a whole vocabulary on the CPU.
_SHORT_LIST = 128


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None,
    seed: Tensor, index: Tensor, with_gap: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See `keyed_sample`."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    greedy = temperature < GREEDY_BELOW
    if not checks.reads_are_free(logits):
        token, gap = _draw(logits, temperature, top_k, top_p, min_p, seed, index, with_gap)
        token_greedy, gap_greedy = _best(logits, None, with_gap)
        token = torch.where(greedy, token_greedy, token)
        if gap is not None and gap_greedy is not None:
            gap = torch.where(greedy, gap_greedy, gap)
        return token, gap
    if not greedy.any():
        return _draw(logits, temperature, top_k, top_p, min_p, seed, index, with_gap)
    token, gap = _best(logits, None, with_gap)
    hot = (~greedy).nonzero()[:, 0]
    if hot.numel():
        k, p, m = (None if x is None else x[hot] for x in (top_k, top_p, min_p))
        token[hot], hot_gap = _draw(logits[hot], temperature[hot], k, p, m, seed[hot], index[hot], with_gap)
        if gap is not None and hot_gap is not None:
            gap[hot] = hot_gap
    return token, gap


def _best(score: Tensor, ids: Tensor | None, with_gap: bool) -> tuple[Tensor, Tensor | None]:
    """Highest score, lowest token id at a tie; ids [N, M] names the tokens of the columns (None: the columns)."""
    if ids is None:
        token = score.argmax(-1)
    else:
        top = score.amax(-1, keepdim=True)
        token = ids.masked_fill(score < top, torch.iinfo(torch.int64).max).amin(-1)
    if not with_gap:
        return token, None
    if score.shape[1] < 2:
        return token, score.new_full((score.shape[0],), torch.inf).float()
    first, second = score.topk(2, dim=-1).values.unbind(-1)
    return token, torch.where(second == -torch.inf, torch.inf, first - second).float()


def _draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None,
    seed: Tensor, index: Tensor, with_gap: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gumbel-max over the allowed set; rows below the greedy temperature come out finite and are discarded above."""
    temperature = torch.where(temperature < GREEDY_BELOW, 1.0, temperature.to(logits.dtype))
    scaled = logits / temperature[:, None]
    vocab = scaled.shape[1]
    if min_p is not None:
        floor = scaled.amax(-1, keepdim=True) + min_p.to(scaled.dtype).clamp(min=0).log()[:, None]
        scaled = scaled.masked_fill_(scaled < floor, -torch.inf)
    on_cpu = checks.reads_are_free(scaled)
    if on_cpu:
        if top_k is not None and not ((top_k > 0) & (top_k < vocab)).any():
            top_k = None
        if top_p is not None and not (top_p < 1).any():
            top_p = None
    if top_k is None and top_p is None:
        return _best(scaled.add_(noise(seed, index, vocab)), None, with_gap)
    length = _short_list_length(top_k, vocab) if on_cpu else vocab
    if length < vocab:
        value, ids, complete = _short_list(scaled, length, top_k, top_p)
        token, gap = _best(value + gumbel_of(uniform_at(seed, index, ids)), ids, with_gap)
        rest = (~complete).nonzero()[:, 0]
        if rest.numel():
            k, p = (None if x is None else x[rest] for x in (top_k, top_p))
            token[rest], rest_gap = _draw_sorted(scaled[rest], k, p, seed[rest], index[rest], with_gap)
            if gap is not None and rest_gap is not None:
                gap[rest] = rest_gap
        return token, gap
    return _draw_sorted(scaled, top_k, top_p, seed, index, with_gap)


def _draw_sorted(
    scaled: Tensor, top_k: Tensor | None, top_p: Tensor | None, seed: Tensor, index: Tensor, with_gap: bool
) -> tuple[Tensor, Tensor | None]:
    """The draw with the whole vocabulary sorted: scaled [N, V], after temperature and min-p."""
    vocab = scaled.shape[1]
    value, ids = scaled.sort(dim=-1, descending=True, stable=True)
    value = _filter(value, None, top_k, top_p)
    return _best(value + noise(seed, index, vocab).gather(1, ids), ids, with_gap)


def _filter(value: Tensor, mass: Tensor | None, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Top-k, then top-p, on columns sorted by falling logit: value [N, M] -> value with −inf where not allowed.

    mass fp64 [N]: sum of exp(logit − largest logit) over the whole vocabulary, for rows without top-k, when the columns
    are not all of it. Sums are fp64 and never divided, so that equal logits give exact multiples.
    """
    columns = value.shape[1]
    limited = None
    if top_k is not None:
        limited = (top_k > 0) & (top_k <= columns)
        kth = value.gather(1, torch.where(limited, top_k.long(), columns)[:, None] - 1)
        value = value.masked_fill((value < kth) & limited[:, None], -torch.inf)
    if top_p is not None:
        share = (value - value[:, :1]).double().exp()
        running = share.cumsum(-1)
        total = running[:, -1]
        if mass is not None:
            total = mass if limited is None else torch.where(limited, total, mass)
        limit = torch.where(top_p < 1, top_p.double(), torch.inf) * total
        outside = torch.zeros_like(value, dtype=torch.bool)
        outside[:, 1:] = running[:, :-1] >= limit[:, None]
        value = value.masked_fill(outside, -torch.inf)
    return value


def _short_list_length(top_k: Tensor | None, vocab: int) -> int:
    """How many candidates to try before sorting the whole vocabulary: a little more than the largest top-k."""
    if top_k is None or not ((top_k > 0) & (top_k <= _SHORT_LIST)).all():
        return min(vocab, _SHORT_LIST)
    return min(vocab, int(top_k.max()) + 8)


def _short_list(
    scaled: Tensor, length: int, top_k: Tensor | None, top_p: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The allowed set out of the `length` best logits: value [N, M], ids [N, M], complete bool [N].

    Complete means that every allowed token is listed: the last column, and any tie with it outside, is not allowed.
    """
    ids = scaled.topk(length, dim=-1, sorted=False).indices.sort(dim=-1).values
    value, order = scaled.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    edge = value[:, -1]
    mass = None
    if top_p is not None and (top_k is None or not ((top_k > 0) & (top_k <= length)).all()):
        mass = (scaled - value[:, :1]).double().exp().sum(-1)
    kept = _filter(value, mass, top_k, top_p)
    complete = kept.masked_fill(kept == -torch.inf, torch.inf).amin(-1) > edge
    if top_k is not None:
        # Top-p needs the whole top-k set, before its own cut: its size and its ties must fit the list as well.
        beyond = (top_k > length) & (top_k < scaled.shape[1])
        kth = value.gather(1, top_k.long().clamp(1, length)[:, None] - 1)[:, 0]
        complete &= ~beyond & ((top_k <= 0) | (top_k > length) | (kth > edge))
    return kept, ids.gather(1, order), complete


def noise(seed: Tensor, index: Tensor, vocab: int) -> Tensor:
    """G fp32 [N, vocab], remembered on the CPU."""
    if checks.reads_are_free(seed):
        return gumbel_rows(seed, index, vocab)
    return gumbel_of(uniform(seed, index, vocab))
