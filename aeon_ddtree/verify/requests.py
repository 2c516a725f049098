# SPDX-License-Identifier: Apache-2.0
"""From plain request parameters to a `SamplingState`, for callers that hold the history as Python lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aeon_ddtree.verify.state import SamplingState

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy."""


@dataclass(frozen=True)
class RequestParams:
    """One request as the sampler sees it; the defaults are "off".

    seed is needed at a temperature above 0 (a request without a seed gets a random one from whoever accepts it) and is
    taken modulo 2**64. output_ids ends in the root. stop_token_ids are those that min_tokens forbids, the EOS included.
    top_k <= 0, top_p = 1 and min_p = 0 are off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()

    @property
    def uses_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def below_min_tokens(self) -> bool:
        return len(self.output_ids) < self.min_tokens and len(self.stop_token_ids) > 0


def build_sampling_state(
    params: Sequence[RequestParams], vocab_size: int, device: torch.device | str = "cpu"
) -> SamplingState:
    """The state of a batch of R = len(params) requests; fields that no request uses stay None.

    ValueError for token ids outside the vocabulary and for a temperature without a seed.
    """
    fields: dict[str, Tensor] = {}

    def scalars(name: str, dtype: torch.dtype, value: Callable[[RequestParams], float]) -> None:
        fields[name] = torch.tensor([value(p) for p in params], dtype=dtype)

    sampling = [p.temperature >= GREEDY_BELOW for p in params]
    if any(sampling):
        for r, p in enumerate(params):
            if sampling[r] and p.seed is None:
                raise ValueError(f"request {r}: temperature {p.temperature} without a seed; draw one for the request")
        scalars("temperature", torch.float32, lambda p: p.temperature)
        fields["seed"] = torch.tensor([_signed64(p.seed or 0) for p in params], dtype=torch.int64)
        if any(s and 0 < p.top_k < vocab_size for s, p in zip(sampling, params)):
            scalars("top_k", torch.int64, lambda p: p.top_k if 0 < p.top_k < vocab_size else 0)
        if any(s and p.top_p < 1 for s, p in zip(sampling, params)):
            scalars("top_p", torch.float32, lambda p: p.top_p)
        if any(s and p.min_p > 0 for s, p in zip(sampling, params)):
            scalars("min_p", torch.float32, lambda p: p.min_p)

    _add_penalties(fields, params, vocab_size)
    if any(p.logit_bias for p in params):
        fields["logit_bias"] = torch.zeros(len(params), vocab_size)
        for r, p in enumerate(params):
            if p.logit_bias:
                ids = _ids(list(p.logit_bias), vocab_size, r, "logit_bias")
                fields["logit_bias"][r, ids] = torch.tensor(list(p.logit_bias.values()), dtype=torch.float32)
    if any(p.allowed_token_ids is not None for p in params):
        fields["allowed"] = torch.ones(len(params), vocab_size, dtype=torch.bool)
        for r, p in enumerate(params):
            if p.allowed_token_ids is not None:
                fields["allowed"][r] = False
                fields["allowed"][r, _ids(p.allowed_token_ids, vocab_size, r, "allowed_token_ids")] = True
    if any(p.below_min_tokens for p in params):
        scalars("min_tokens", torch.int64, lambda p: p.min_tokens if p.below_min_tokens else 0)
        scalars("output_len", torch.int64, lambda p: len(p.output_ids))
        fields["stop_mask"] = torch.zeros(len(params), vocab_size, dtype=torch.bool)
        for r, p in enumerate(params):
            if p.below_min_tokens:
                fields["stop_mask"][r, _ids(p.stop_token_ids, vocab_size, r, "stop_token_ids")] = True
    _add_bad_words(fields, params, vocab_size)
    return SamplingState(**{name: value.to(device) for name, value in fields.items()})


def _add_penalties(fields: dict[str, Tensor], params: Sequence[RequestParams], vocab_size: int) -> None:
    if not any(p.uses_penalties for p in params):
        return
    for name, off in (("repetition_penalty", 1.0), ("frequency_penalty", 0.0), ("presence_penalty", 0.0)):
        values = [getattr(p, name) for p in params]
        if any(value != off for value in values):
            fields[name] = torch.tensor(values, dtype=torch.float32)
    fields["output_counts"] = torch.zeros(len(params), vocab_size, dtype=torch.int32)
    for r, p in enumerate(params):
        if p.uses_penalties and len(p.output_ids):
            ids = _ids(p.output_ids, vocab_size, r, "output_ids")
            fields["output_counts"][r] = torch.bincount(ids, minlength=vocab_size).to(torch.int32)
    if "repetition_penalty" in fields:
        fields["prompt_mask"] = torch.zeros(len(params), vocab_size, dtype=torch.bool)
        for r, p in enumerate(params):
            if p.repetition_penalty != 1.0 and len(p.prompt_ids):
                fields["prompt_mask"][r, _ids(p.prompt_ids, vocab_size, r, "prompt_ids")] = True


def _add_bad_words(fields: dict[str, Tensor], params: Sequence[RequestParams], vocab_size: int) -> None:
    if not any(p.bad_words_token_ids for p in params):
        return
    most = max(len(p.bad_words_token_ids) for p in params)
    longest = max((len(word) for p in params for word in p.bad_words_token_ids), default=0)
    if not longest:
        return
    words = torch.full((len(params), most, longest), -1, dtype=torch.int64)
    length = torch.zeros(len(params), most, dtype=torch.int64)
    last = torch.full((len(params), longest - 1), -1, dtype=torch.int64)
    for r, p in enumerate(params):
        for n, word in enumerate(p.bad_words_token_ids):
            if len(word):
                words[r, n, longest - len(word) :] = _ids(word, vocab_size, r, "bad_words_token_ids")
                length[r, n] = len(word)
        newest = p.output_ids[max(0, len(p.output_ids) - (longest - 1)) :] if p.bad_words_token_ids else ()
        if len(newest) and longest > 1:
            last[r, longest - 1 - len(newest) :] = _ids(newest, vocab_size, r, "output_ids")
    fields["bad_words"], fields["bad_words_len"], fields["last_tokens"] = words, length, last


def _ids(values: Sequence[int], vocab_size: int, request: int, name: str) -> Tensor:
    ids = torch.as_tensor(values, dtype=torch.int64)
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ValueError(f"request {request}: {name} holds token {int(wrong)}, expected 0 .. {vocab_size - 1}")
    return ids


def _signed64(seed: int) -> int:
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >= 1 << 63 else seed
