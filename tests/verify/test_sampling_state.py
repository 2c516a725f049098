# SPDX-License-Identifier: Apache-2.0
"""Building a SamplingState, and keeping a persistent one up to date on the device."""

import random

import pytest
import sampling_oracles as sampler
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aeon_ddtree.verify import RequestParams, SamplingState, build_sampling_state, record_emitted

VOCAB = 11


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (RequestParams(temperature=1.0), "without a seed"),
        (RequestParams(frequency_penalty=1.0, output_ids=[1, -1]), "output_ids holds token -1"),
        (RequestParams(repetition_penalty=2.0, prompt_ids=[VOCAB]), "prompt_ids holds token 11, expected 0 .. 10"),
        (RequestParams(logit_bias={VOCAB: 1.0}), "logit_bias"),
        (RequestParams(allowed_token_ids=[VOCAB]), "allowed_token_ids"),
        (RequestParams(bad_words_token_ids=[[1, VOCAB]]), "bad_words_token_ids"),
        (RequestParams(min_tokens=1, stop_token_ids=[VOCAB]), "stop_token_ids"),
    ],
)
def test_bad_requests_are_refused(params, said):
    with pytest.raises(ValueError, match="request 1") as error:
        build_sampling_state([RequestParams(), params], VOCAB)
    assert said in str(error.value)


def test_fields_need_their_companions():
    with pytest.raises(ValueError, match="min_tokens is given without stop_mask and output_len"):
        SamplingState(min_tokens=torch.tensor([1]))
    with pytest.raises(ValueError, match="temperature is given without seed"):
        SamplingState(temperature=torch.tensor([1.0]))
    words = torch.zeros(1, 1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="holds 1 tokens, bad words of 3 tokens need 2"):
        SamplingState(bad_words=words, bad_words_len=words[:, :, 0], last_tokens=words[:, 0, :1])


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64 + 5, -1])
def test_seeds_are_taken_modulo_two_to_64(seed):
    state = build_sampling_state([RequestParams(temperature=1.0, seed=seed)], VOCAB)
    assert int(state.seed[0]) % 2**64 == seed % 2**64


def test_features_of_a_neighbour_are_off_for_the_others():
    busy = sampler.random_params(random.Random(1), VOCAB, [1, 2, 3], temperature=1.0)
    state = build_sampling_state([busy, RequestParams(temperature=1.0, seed=1, output_ids=[4])], VOCAB)
    off = {
        "repetition_penalty": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "top_k": 0,
        "top_p": 1,
        "min_p": 0,
        "min_tokens": 0,
    }
    assert len(set(off) & set(state.tensors())) > 2
    for name, value in off.items():
        if name in state.tensors():
            assert state.tensors()[name][1] == value
    if state.allowed is not None:
        assert state.allowed[1].all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_recorded_history_equals_a_rebuilt_one(seed):
    rng = random.Random(seed)
    requests, slots_held, width = 3, 5, 4
    common = {
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "prompt_ids": [1],
        "bad_words_token_ids": [[1] * rng.randint(1, 6)],
        "min_tokens": 99,
        "stop_token_ids": [0],
    }
    outputs = [[rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))] for _ in range(slots_held)]

    def state_of():
        return build_sampling_state([RequestParams(output_ids=o, **common) for o in outputs], VOCAB)

    state = state_of()
    for _ in range(4):
        slots = rng.sample(range(slots_held), requests)
        skipped = rng.random() < 0.5
        if skipped:
            slots[rng.randrange(requests)] = -1
        emitted = [[rng.randrange(VOCAB) for _ in range(width)] for _ in range(requests)]
        count = [rng.randint(0, width) for _ in range(requests)]
        padded = [row[:n] + [-1] * (width - n) for row, n in zip(emitted, count)]
        record_emitted(state, torch.tensor(slots), torch.tensor(padded), torch.tensor(count))
        for slot, row, n in zip(slots, emitted, count):
            if slot >= 0:
                outputs[slot] += row[:n]
        rebuilt = state_of().tensors()
        for name, value in state.tensors().items():
            assert torch.equal(value, rebuilt[name]), name


def test_select_takes_rows_of_every_field():
    rng = random.Random(3)
    params = [sampler.random_params(rng, VOCAB, [1, 2], temperature=1.0) for _ in range(6)]
    state = build_sampling_state(params, VOCAB)
    picked = state.select(torch.tensor([4, 0]))
    assert state.tensors().keys() == picked.tensors().keys()
    for name, value in picked.tensors().items():
        assert torch.equal(value, state.tensors()[name][[4, 0]])
