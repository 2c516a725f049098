# SPDX-License-Identifier: Apache-2.0
"""`SamplingState`: how every request of a batch samples, as tensors; None for what no request of the batch uses."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingState:
    """Sampling parameters and committed history of R requests in a vocabulary of V.

    A field that is None costs nothing. The committed history is the prompt and the output so far, the root included:
    the root is the last output token, so the tree adds only nodes to it.

    temperature            [R] float        below 1e-5 is greedy; None: every request is greedy
    seed                   [R] int64        key of the noise; needed with temperature
    top_k                  [R] int          <= 0 is off
    top_p, min_p           [R] float        1 resp. 0 is off
    repetition_penalty     [R] float        1 is off; over prompt and output tokens
    frequency_penalty      [R] float        0 is off; over output tokens, times their count
    presence_penalty       [R] float        0 is off; over output tokens
    prompt_mask            [R, V] bool      tokens of the prompt; needed with repetition_penalty
    output_counts          [R, V] int       how often each token stands in the output; needed with any penalty
    logit_bias             [R, V] float     added to the logits
    allowed                [R, V] bool      False is forbidden; [R, W, V] gives every row its own set
    min_tokens             [R] int          stop tokens are forbidden while the output is shorter
    stop_mask              [R, V] bool      the tokens forbidden by min_tokens; needed with it
    bad_words              [R, n, m] int64  token sequences, right-aligned (what stands before a word is ignored)
    bad_words_len          [R, n] int       their lengths, 0 for no word; needed with bad_words
    output_len             [R] int          length of the output so far; needed with min_tokens
    last_tokens            [R, H] int64     the newest output tokens, right-aligned, -1 before the first; H >= m - 1
    """

    temperature: Tensor | None = None
    seed: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    repetition_penalty: Tensor | None = None
    frequency_penalty: Tensor | None = None
    presence_penalty: Tensor | None = None
    prompt_mask: Tensor | None = None
    output_counts: Tensor | None = None
    logit_bias: Tensor | None = None
    allowed: Tensor | None = None
    min_tokens: Tensor | None = None
    stop_mask: Tensor | None = None
    bad_words: Tensor | None = None
    bad_words_len: Tensor | None = None
    output_len: Tensor | None = None
    last_tokens: Tensor | None = None

    def __post_init__(self) -> None:
        needs = {
            "temperature": ("seed",),
            "repetition_penalty": ("prompt_mask", "output_counts"),
            "frequency_penalty": ("output_counts",),
            "presence_penalty": ("output_counts",),
            "min_tokens": ("stop_mask", "output_len"),
            "bad_words": ("bad_words_len",),
        }
        for name, companions in needs.items():
            missing = [other for other in companions if getattr(self, other) is None]
            if getattr(self, name) is not None and missing:
                raise ValueError(f"SamplingState: {name} is given without {' and '.join(missing)}; set both or neither")
        if self.bad_words is not None:
            longest = self.bad_words.shape[2]
            held = 0 if self.last_tokens is None else self.last_tokens.shape[1]
            if held < longest - 1:
                raise ValueError(
                    f"SamplingState: last_tokens holds {held} tokens, bad words of {longest} tokens need {longest - 1}"
                )

    @property
    def has_penalties(self) -> bool:
        """True when any of the three penalties is in use."""
        return (
            self.repetition_penalty is not None
            or self.frequency_penalty is not None
            or self.presence_penalty is not None
        )

    @property
    def adjusts(self) -> bool:
        """True when `adjust_logits` has anything to change."""
        return self.has_penalties or any(
            value is not None for value in (self.allowed, self.bad_words, self.min_tokens, self.logit_bias)
        )

    def select(self, index: Tensor) -> SamplingState:
        """The state of the requests in `index` [N] (req -> row of this state): per-slot tensors to a batch."""
        return SamplingState(**{name: value[index] for name, value in self.tensors().items()})

    def to(self, device: torch.device | str) -> SamplingState:
        """The same state on another device."""
        return SamplingState(**{name: value.to(device) for name, value in self.tensors().items()})

    def with_allowed(self, allowed: Tensor | None) -> SamplingState:
        """The same state with another `allowed` mask, for instance a grammar's."""
        return replace(self, allowed=allowed)

    def tensors(self) -> dict[str, Tensor]:
        """The fields in use, by name."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}
