# SPDX-License-Identifier: Apache-2.0
"""From vLLM's request states to the sampler's: one `SamplingState` per step, and the log-probabilities vLLM reports."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from aeon_ddtree.commit.plan import CommitPlan
from aeon_ddtree.verify.logprobs import path_logits
from aeon_ddtree.verify.requests import RequestParams, build_sampling_state
from aeon_ddtree.verify.state import SamplingState


def seed_of(request: Any, engine_seed: int) -> int:
    """The request's key for all its noise: its own seed, or one drawn from its id, the same on every rank."""
    seed = request.sampling_params.seed
    if seed is not None:
        return int(seed)
    digest = hashlib.blake2b(f"{engine_seed}/{request.req_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def params_of(request: Any, engine_seed: int, vocab_size: int) -> RequestParams:
    """vLLM's request state as the sampler sees it. Histories are referenced, and only where a parameter reads them."""
    wanted = request.sampling_params
    bad_words = wanted.bad_words_token_ids or ()
    penalties = wanted.repetition_penalty != 1.0 or wanted.frequency_penalty != 0.0 or wanted.presence_penalty != 0.0
    reads_history = penalties or bool(bad_words)
    return RequestParams(
        temperature=wanted.temperature,
        top_k=wanted.top_k,
        top_p=wanted.top_p,
        min_p=wanted.min_p,
        seed=seed_of(request, engine_seed),
        repetition_penalty=wanted.repetition_penalty,
        frequency_penalty=wanted.frequency_penalty,
        presence_penalty=wanted.presence_penalty,
        prompt_ids=(request.prompt_token_ids or ()) if penalties else (),
        output_ids=request.output_token_ids if reads_history else (),
        logit_bias=wanted.logit_bias or {},
        allowed_token_ids=wanted.allowed_token_ids,
        bad_words_token_ids=bad_words,
        min_tokens=wanted.min_tokens,
        # vLLM accepts any number here; one outside the vocabulary is never drawn, so there is nothing to forbid.
        stop_token_ids=tuple(token for token in wanted.all_stop_token_ids if 0 <= token < vocab_size),
    )


def sampling_state(requests: Sequence[Any], vocab_size: int, base_index: Tensor, engine_seed: int) -> SamplingState:
    """The batch's state. base_index [R] is the output length before this step, as the device knows it."""
    params = [params_of(request, engine_seed, vocab_size) for request in requests]
    state = build_sampling_state(params, vocab_size, base_index.device)
    if state.min_tokens is not None:
        state = replace(state, output_len=base_index)
    return state


def path_logprobs(sampler: Sampler, logits: Tensor, plan: CommitPlan, count: int) -> LogprobsTensors:
    """Log-probabilities of the emitted tokens, [R x P] rows in path order as vLLM expects them.

    logits [R, W, V] before any adjustment (`logprobs_mode` raw_logprobs or raw_logits); count: alternatives per token,
    -1 for the whole vocabulary.
    """
    rows = path_logits(logits, plan).flatten(0, 1).to(torch.float32)
    values = rows if sampler.logprobs_mode == "raw_logits" else sampler.compute_logprobs(rows)
    if count == -1:
        return LogprobsTensors(torch.empty(0), values, torch.empty(0))
    return sampler.gather_logprobs(values, count, plan.emitted.clamp(min=0).flatten())
