# SPDX-License-Identifier: Apache-2.0
"""Every sampling parameter, on every row of a tree: each with the history of its own path, as plain decoding has it."""

from __future__ import annotations

from typing import Any

import pytest
from shapes import Pair, assert_same, greedy_and_seeded, inside, pieces_of, same_as_plain, with_params

from aeon_ddtree.engine.decoder import Decoder, DecodeRequest

pytestmark = pytest.mark.engine

COMMON = [5, 6, 7, 12]
BRANCH = ("branch",)
"""Rows are sampled before anything is committed, so one policy will do where a test is about one parameter."""

AT_ANY_TEMPERATURE: dict[str, dict[str, Any]] = {
    "presence_penalty": {"presence_penalty": 0.9},
    "frequency_penalty": {"frequency_penalty": 0.6},
    "negative_frequency_penalty": {"frequency_penalty": -0.4},
    "repetition_penalty": {"repetition_penalty": 1.25},
    "all_penalties": {"presence_penalty": 0.3, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "logit_bias": {"logit_bias": {5: 2.5, 13: -100.0, 40: 1.0}},
    "bad_words": {"bad_words": [" the", "(self", ", and", "="]},
    "allowed_token_ids": {"allowed_token_ids": list(range(0, 2900, 1))},
}

OF_SAMPLING: dict[str, dict[str, Any]] = {
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 1.6},
    "top_k": {"temperature": 1.0, "top_k": 7},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "top_k_top_p_min_p": {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "greedy_by_top_k": {"temperature": 1.0, "top_k": 1},
    "default_of_large_models": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "presence_penalty": 0.5},
}


@pytest.mark.parametrize("name", AT_ANY_TEMPERATURE)
def test_what_changes_the_logits(plain: Decoder, tree: Decoder, pair: Pair, name: str) -> None:
    requests = greedy_and_seeded(pair.prompts[4::70][:3], max_tokens=32, ignore_eos=True, **AT_ANY_TEMPERATURE[name])
    for run in same_as_plain(plain, tree, requests, BRANCH):
        run.branched()


@pytest.mark.parametrize("name", OF_SAMPLING)
def test_what_shapes_the_distribution(plain: Decoder, tree: Decoder, pair: Pair, name: str) -> None:
    requests = [
        DecodeRequest(prompt, {"max_tokens": 32, "seed": 70 + number, "ignore_eos": True, **OF_SAMPLING[name]})
        for number, prompt in enumerate(pair.prompts[6::50][:5])
    ]
    for run in same_as_plain(plain, tree, requests, BRANCH):
        run.branched()


def test_everybody_samples_differently_in_one_batch(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    """Parameters of one request must not leak into its neighbours' rows."""
    every = [*AT_ANY_TEMPERATURE.values(), *OF_SAMPLING.values(), {}]
    requests = [
        DecodeRequest(
            prompt, {"max_tokens": 16, "seed": number, "temperature": 0.9 * (number % 2)} | params, number // 4
        )
        for number, (prompt, params) in enumerate(zip(pair.prompts[::14], every))
    ]
    assert len(requests) == len(every)
    for run in same_as_plain(plain, tree, requests):
        run.branched()


def test_penalties_count_what_the_path_holds(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    """A token is penalised although it stands nowhere but further up in the same window. Sums repeat their digits."""
    free = greedy_and_seeded(pair.prompts[80:120:5], max_tokens=24, ignore_eos=True)
    penalised = [with_params(request, presence_penalty=2.0, frequency_penalty=2.0) for request in free]
    expected = plain.run(penalised)
    by_the_path = 0
    for (unpenalised,), (right,) in zip(tree.run(free), expected):
        tokens = unpenalised.token_ids
        changed = next((i for i, (a, b) in enumerate(zip(tokens, right.token_ids)) if a != b), None)
        if changed is not None:
            start = next(piece.start for piece in pieces_of(unpenalised) if changed in piece)
            by_the_path += tokens[changed] in tokens[start:changed] and tokens[changed] not in tokens[:start]
    assert by_the_path, "nothing here depends on the path's history"
    same_as_plain(plain, tree, penalised, BRANCH, expected)


def test_bad_words_that_begin_in_the_path(plain: Decoder, tree: Decoder, pair: Pair, free_runs: Any) -> None:
    """Words of two tokens, both accepted in one step when the word was allowed."""
    chosen = []
    for request, free in free_runs:
        for index in inside(free):
            word = pair.tokenizer.decode(free.token_ids[index - 1 : index + 1])
            if word == word.strip() and pair.tokenizer.encode(word).ids == free.token_ids[index - 1 : index + 1]:
                chosen.append((with_params(request, bad_words=["never said", word]), free, index, word))
                break
    chosen = chosen[:6]
    assert len(chosen) >= 4
    for run in same_as_plain(plain, tree, [request for request, _, _, _ in chosen]):
        same_until = [
            sequence.token_ids[:index] == free.token_ids[:index] != sequence.token_ids[: index + 1]
            for (_, free, index, _), (sequence,) in zip(chosen, run.decoded)
        ]
        assert all(same_until), "the word was to be forbidden there"


def test_few_allowed_tokens(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    """The drafter does not know of them, so nearly all of its nodes are wrong, and the answer still is right."""
    requests = greedy_and_seeded(pair.prompts[3::80][:3], max_tokens=16, ignore_eos=True, allowed_token_ids=COMMON)
    for run in same_as_plain(plain, tree, requests):
        assert run.stats["nodes"] > 15 * run.stats["steps"] / 2 and not run.fallbacks
        assert all(set(sequence.token_ids) <= set(COMMON) for done in run.decoded for sequence in done)


def test_the_same_seed_gives_the_same_text_in_all_modes(
    plain: Decoder, chain: Decoder, tree: Decoder, pair: Pair
) -> None:
    prompt = pair.prompts[50]
    requests = [
        DecodeRequest(prompt, {"max_tokens": 32, "temperature": 1.0, "seed": seed, "ignore_eos": True})
        for seed in (0, 1, 2**31 - 1, 2**62 + 12345, 1)
    ]
    expected = plain.run(requests)
    for run in same_as_plain(plain, tree, requests, expected=expected):
        run.branched()
    assert_same(plain, requests, expected, chain.run(requests), "chain")
    for engine in (plain, chain, tree):
        alone = engine.run(requests[1:2])
        assert alone[0][0].token_ids == expected[1][0].token_ids == expected[4][0].token_ids
    assert len({tuple(done[0].token_ids) for done in expected}) == 4, "different seeds gave the same text"


def test_without_a_seed_requests_differ(tree: Decoder, pair: Pair) -> None:
    request = DecodeRequest(pair.prompts[50], {"max_tokens": 24, "temperature": 1.0, "ignore_eos": True})
    texts = {tuple(done[0].token_ids) for done in tree.run([request] * 4)}
    assert len(texts) == 4


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs(plain: Decoder, tree: Decoder, pair: Pair, count: int) -> None:
    requests = greedy_and_seeded(pair.prompts[11::75][:2], max_tokens=28, logprobs=count)
    requests.append(DecodeRequest(pair.prompts[12], {"temperature": 0.0, "max_tokens": 28}))  # it wants none
    for run in same_as_plain(plain, tree, requests):
        run.branched()
        for request, (sequence,) in zip(requests[:-1], run.decoded):
            assert sequence.logprobs is not None and len(sequence.logprobs) == len(sequence.token_ids)
            greedy = request.params["temperature"] == 0.0
            for token, entry in zip(sequence.token_ids, sequence.logprobs):
                assert token in entry and count <= len(entry) <= count + 1
                assert not greedy or entry[token] == max(entry.values())


def test_logprobs_of_the_whole_vocabulary(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    requests = greedy_and_seeded(pair.prompts[11::75][:1], max_tokens=8, logprobs=-1)
    for run in same_as_plain(plain, tree, requests):
        assert run.decoded[0][0].logprobs is not None and len(run.decoded[0][0].logprobs[0]) > 2000


def test_prompt_logprobs(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    """They are computed from the prompt's rows, of which a chunked prompt brings some beside trees."""
    long = "\n".join(pair.prompts[:10])
    requests = [
        DecodeRequest(pair.prompts[9], {"max_tokens": 20, "temperature": 1.0, "seed": 1, "prompt_logprobs": 2}),
        DecodeRequest(pair.prompts[19], {"temperature": 0.0, "max_tokens": 20}),
        DecodeRequest(
            long[:1500], {"temperature": 0.0, "max_tokens": 12, "prompt_logprobs": 1, "logprobs": 2}, arrival=2
        ),
        DecodeRequest(pair.prompts[29], {"temperature": 0.0, "max_tokens": 12, "prompt_logprobs": 0}, arrival=4),
    ]
    for run in same_as_plain(plain, tree, requests):
        run.branched()
        for index in (0, 2, 3):
            (sequence,) = run.decoded[index]
            assert sequence.prompt_logprobs is not None and sequence.prompt_token_ids is not None
            assert len(sequence.prompt_logprobs) == len(sequence.prompt_token_ids)
