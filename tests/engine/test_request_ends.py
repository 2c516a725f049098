# SPDX-License-Identifier: Apache-2.0
"""Ends inside an accepted path: the output stops exactly there, although the step verified more."""

from __future__ import annotations

from typing import Any

import pytest
from shapes import Pair, greedy_and_seeded, inside, same_as_plain, with_params

from aeon_ddtree.engine.decoder import Completion, Decoder, DecodeRequest

pytestmark = pytest.mark.engine


def cut_at(free_runs: list[tuple[DecodeRequest, Completion]], fits: Any) -> list[tuple[DecodeRequest, Completion, int]]:
    """Per temperature, up to three requests with an index inside an accepted path for which fits(sequence, index)."""
    chosen: dict[float, list[tuple[DecodeRequest, Completion, int]]] = {0.0: [], 1.0: []}
    for request, sequence in free_runs:
        index = next((i for i in inside(sequence) if fits(sequence, i)), None)
        if index is not None:
            chosen[request.params["temperature"]].append((request, sequence, index))
    assert all(chosen.values()), "no accepted path to end in"
    return [each for some in chosen.values() for each in some[:3]]


def is_first(sequence: Completion, index: int) -> bool:
    """The token occurs there for the first time."""
    return sequence.token_ids[index] not in sequence.token_ids[:index]


def test_max_tokens(plain: Decoder, tree: Decoder, free_runs: Any) -> None:
    cuts = cut_at(free_runs, lambda sequence, index: True)
    requests = [with_params(request, max_tokens=index + 1) for request, _, index in cuts]
    for run in same_as_plain(plain, tree, requests):
        for (_, _, index), (sequence,) in zip(cuts, run.decoded):
            assert (len(sequence.token_ids), sequence.finish_reason) == (index + 1, "length")


def test_max_tokens_of_one(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    for run in same_as_plain(plain, tree, greedy_and_seeded(pair.prompts[:3], max_tokens=1)):
        assert all(len(done[0].token_ids) == 1 for done in run.decoded)


@pytest.mark.parametrize("min_tokens_too", [False, True])
def test_stop_token_ids(plain: Decoder, tree: Decoder, free_runs: Any, min_tokens_too: bool) -> None:
    """With min_tokens behind the token it is forbidden, and every row must know from its depth whether it still is."""
    cuts = cut_at(free_runs, is_first)
    requests = []
    for request, sequence, index in cuts:
        least = {"min_tokens": index + 3} if min_tokens_too else {}
        requests.append(with_params(request, stop_token_ids=[sequence.token_ids[index]], **least))
    for run in same_as_plain(plain, tree, requests):
        for (_, free, index), (sequence,) in zip(cuts, run.decoded):
            if min_tokens_too:
                assert len(sequence.token_ids) >= index + 3
            else:
                assert sequence.token_ids == free.token_ids[: index + 1]
                assert (sequence.finish_reason, sequence.stop_reason) == ("stop", free.token_ids[index])


@pytest.mark.parametrize("included", [False, True])
def test_stop_strings(plain: Decoder, tree: Decoder, pair: Pair, free_runs: Any, included: bool) -> None:
    pieces = {id(free): [pair.decode(token) for token in free.token_ids] for _, free in free_runs}

    def fits(sequence: Completion, index: int) -> bool:
        piece = pieces[id(sequence)][index]
        before = "".join(pieces[id(sequence)][:index])
        return len(piece.strip()) > 1 and piece.isascii() and piece not in before + piece[:-1]

    cuts = cut_at(free_runs, fits)
    requests = [
        with_params(
            request, stop=["never said", pieces[id(free)][index]], include_stop_str_in_output=included, logprobs=1
        )
        for request, free, index in cuts
    ]
    for run in same_as_plain(plain, tree, requests):
        for (_, free, index), (sequence,) in zip(cuts, run.decoded):
            piece = pieces[id(free)][index]
            assert sequence.token_ids == free.token_ids[: index + 1], "tokens after the stop string"
            assert sequence.logprobs is not None and len(sequence.logprobs) == index + 1
            assert (sequence.finish_reason, sequence.stop_reason) == ("stop", piece)
            assert sequence.text.endswith(piece) == included


def test_a_stop_string_across_tokens(plain: Decoder, tree: Decoder, free_runs: Any) -> None:
    """It begins in one token and ends in the next; the text ends before it, in the middle of a token."""
    requests = []
    for request, sequence in free_runs[:8]:
        middle = len(sequence.text) // 2
        stop = sequence.text[middle : middle + 5]
        if stop and stop.isascii():
            requests.append(with_params(request, stop=[stop]))
    assert len(requests) >= 4
    for run in same_as_plain(plain, tree, requests):
        assert all(done[0].finish_reason == "stop" for done in run.decoded)


def test_end_of_sequence(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    """The model's own end, accepted as a node or drawn as a bonus; and the same requests when it is to be ignored."""
    requests = greedy_and_seeded(pair.prompts[82:160:10], max_tokens=64)
    runs = same_as_plain(plain, tree, requests)
    for run in runs:
        ended = [s for (s,) in run.decoded if s.finish_reason == "stop"]
        assert any(s.pieces[-1] > 1 for s in ended), "no request ended inside an accepted path"
        run.branched()
    ended_at = [i for i, (s,) in enumerate(runs[0].decoded) if s.finish_reason == "stop"][:4]
    ignoring = [with_params(requests[i], ignore_eos=True, skip_special_tokens=bool(i % 2)) for i in ended_at]
    for run in same_as_plain(plain, tree, ignoring):
        for index, (sequence,) in zip(ended_at, run.decoded):
            assert len(sequence.token_ids) == 64
            before = runs[0].decoded[index][0].token_ids
            assert sequence.token_ids[: len(before)] == before


def test_text_without_detokenising_and_with_special_tokens(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    requests = [
        DecodeRequest(pair.prompts[33], {"temperature": 0.0, "max_tokens": 24, "detokenize": False}),
        DecodeRequest(pair.prompts[34], {"temperature": 0.0, "max_tokens": 24, "skip_special_tokens": False}),
        DecodeRequest(pair.prompts[35], {"temperature": 0.0, "max_tokens": 24, "spaces_between_special_tokens": False}),
        DecodeRequest(pair.prompts[36], {"max_tokens": 24, "temperature": 1.0, "seed": 2}),
    ]
    for run in same_as_plain(plain, tree, requests):
        run.branched()
        assert run.decoded[0][0].text == "" and all(done[0].text for done in run.decoded[1:])
