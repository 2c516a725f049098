# SPDX-License-Identifier: Apache-2.0
"""Where two decodings differ, and whether rounding explains it.

Two right computations may resolve a near-tie differently. A difference is allowed only where, in plain decoding, the
token chosen there leads the other mode's token by less than

    fp32   1e-3
    else   twice the noise of that position: the largest difference of a logit, divided by T, between plain decoding and
           plain prefill of the same prefix. It is measured without the mode under test: that mode's own logits would
           excuse any error.

The lead is one of logits at T = 0 and of perturbed logits, logit / T + G(seed, position), at T > 0.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from aeon_ddtree.proving_ground.parity_plan import Prompt

if TYPE_CHECKING:
    from torch import Tensor

FP32_GAP = 1e-3

_NOISE = threading.Lock()
"""Noise rows are remembered on the CPU, for one thread at a time."""


@dataclass(frozen=True)
class Difference:
    """The first difference between two decodings of a prompt; what comes after it has another history.

    position    index of the output token
    plain, got  the two tokens there; None where that decoding had ended
    gap         lead of plain's token over the second best there (scores, see above); None: not measured, see note
    lead        lead of plain's token over the other mode's; never less than the gap
    bound       what the lead must stay below
    noise       largest logit difference between two plain computations of that position
    row         largest logit difference between plain's row and the other mode's, where its decoding was reproduced
    allowed     whether the rule explains it
    note        why there is no gap
    """

    prompt: str
    category: str
    case: str
    against: str
    position: int
    plain: int | None
    got: int | None
    gap: float | None = None
    lead: float | None = None
    bound: float | None = None
    noise: float | None = None
    row: float | None = None
    allowed: bool = False
    note: str | None = None


@dataclass(frozen=True)
class Decoded:
    """What matters of a completion."""

    tokens: tuple[int, ...]
    steps: int
    finish: str | None


def first_difference(plain: Decoded, got: Decoded) -> int | None:
    """The first output position at which two decodings differ, also by ending there; None where they are the same."""
    for position, (a, b) in enumerate(zip(plain.tokens, got.tokens)):
        if a != b:
            return position
    if len(plain.tokens) != len(got.tokens) or plain.finish != got.finish:
        return min(len(plain.tokens), len(got.tokens))
    return None


def differences(
    prompts: Sequence[Prompt], plain: Sequence[Decoded], got: Sequence[Decoded], case: str, against: str
) -> list[tuple[int, Difference]]:
    """(index of the prompt, its first difference), unjudged, of two decodings of the same prompts."""
    if not len(prompts) == len(plain) == len(got):
        raise ValueError(f"{len(prompts)} prompts, {len(plain)} plain and {len(got)} other decodings: expected as many")
    found = []
    for index, (prompt, a, b) in enumerate(zip(prompts, plain, got)):
        position = first_difference(a, b)
        if position is not None:
            ours, theirs = (each.tokens[position] if position < len(each.tokens) else None for each in (a, b))
            found.append((index, Difference(prompt.id, prompt.category, case, against, position, ours, theirs)))
    return found


def scores(logits: Tensor, temperature: float, seed: int, position: int) -> Tensor:
    """What the sampler takes the maximum of: logits [V] at T = 0, else logits / T + G(seed, position, x), fp32 [V]."""
    import torch

    from aeon_ddtree.kernels.keyed_sampling import GREEDY_BELOW, keyed_gumbel

    logits = logits.float()
    if temperature < GREEDY_BELOW:
        return logits
    with _NOISE:
        noise = keyed_gumbel(torch.tensor([seed]), torch.tensor([position]), logits.shape[0])
    return logits / temperature + noise[0]


def judge(
    difference: Difference,
    *,
    rows: tuple[Tensor, Tensor | None, Tensor | None],
    temperature: float,
    seed: int,
    is_fp32: bool,
) -> Difference:
    """The difference with its gap and verdict.

    rows: logits [V] at its position: plain decoding's, plain prefill's (needed unless fp32) and the other mode's.
    """
    if difference.plain is None or difference.got is None:
        return replace(difference, note="one decoding ended where the other did not")
    logits, prefilled, other = rows
    score = scores(logits, temperature, seed, difference.position)
    if int(score.argmax()) != difference.plain:
        return replace(difference, note="plain decoding chose another token when it was repeated")
    best, second = score.topk(2).values.tolist()
    lead = best - float(score[difference.got])
    noise = None if prefilled is None else float((logits - prefilled).abs().max())
    if is_fp32:
        bound = FP32_GAP
    elif noise is None:
        raise ValueError("outside fp32 the noise of the position is the rule: plain prefill's logits are missing")
    else:
        bound = 2 * noise / (temperature or 1.0)
    return replace(
        difference,
        gap=best - second,
        lead=lead,
        bound=bound,
        noise=noise,
        row=None if other is None else float((logits - other).abs().max()),
        allowed=lead < bound,
    )
