# SPDX-License-Identifier: Apache-2.0
"""A malformed request is refused alone: its neighbours decode on as if it had never come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from shapes import Pair, assert_same, greedy_and_seeded, same_as_plain

from aeon_ddtree.engine.decoder import Decoder, DecodeRequest

pytestmark = pytest.mark.engine

MALFORMED: dict[str, tuple[Any, dict[str, Any]]] = {
    "prompt longer than the context": ([5] * 1025, {"max_tokens": 4}),
    "empty prompt": ([], {"max_tokens": 4}),
    "token outside the vocabulary": ([5, 999999], {"max_tokens": 4}),
    "negative temperature": ("x", {"temperature": -1.0}),
    "top_p of zero": ("x", {"top_p": 0.0}),
    "no tokens wanted": ("x", {"max_tokens": 0}),
    "min_tokens above max_tokens": ("x", {"max_tokens": 4, "min_tokens": 9}),
    "bias of an unknown token": ("x", {"max_tokens": 4, "logit_bias": {999999: 1.0}}),
    "unknown token allowed": ("x", {"max_tokens": 4, "allowed_token_ids": [999999]}),
    "nothing allowed": ("x", {"max_tokens": 4, "allowed_token_ids": []}),
    "grammar that does not parse": ("x", {"structured_outputs": {"grammar": "root ::= ("}}),
    "regex that does not parse": ("x", {"structured_outputs": {"regex": "(a"}}),
    "schema that is none": ("x", {"structured_outputs": {"json": '{"type": "objekt"'}}),
    "unknown parameter": ("x", {"temprature": 1.0}),
    "penalty out of range": ("x", {"presence_penalty": 3.0}),
    "log-probabilities of chosen tokens": ("x", {"max_tokens": 4, "logprob_token_ids": [5, 6]}),
    "stop string without text": ("x", {"stop": ["a"], "detokenize": False}),
}


def test_refused_alone(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    good = greedy_and_seeded(pair.prompts[13::80][:3], max_tokens=32)
    expected = plain.run(good)
    bad = [
        DecodeRequest(prompt, params, arrival=1 + index // 3, may_fail=True)
        for index, (prompt, params) in enumerate(MALFORMED.values())
    ]
    decoded = tree.run([*good[:3], *bad, *good[3:]])
    refused = dict(zip(MALFORMED, decoded[3 : 3 + len(bad)]))
    wrong = {name: done for name, done in refused.items() if done[0].finish_reason != "refused"}
    assert not wrong, f"accepted: {wrong}"
    assert all(done[0].stop_reason for done in refused.values()), "a refusal without a reason"
    assert_same(plain, good, expected, [*decoded[:3], *decoded[3 + len(bad) :]])
    assert tree.stats()["off_spine"] > 0


def test_the_engine_decodes_on_after_a_run_that_broke_off(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    good = greedy_and_seeded(pair.prompts[14::80][:2], max_tokens=24)
    prompt, params = MALFORMED["negative temperature"]
    with pytest.raises(Exception, match="temperature"):
        tree.run([*good, DecodeRequest(prompt, params, arrival=4)])
    assert_same(plain, good, plain.run(good), tree.run([replace(request, arrival=0) for request in good]))


def test_stop_tokens_outside_the_vocabulary(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    """vLLM lets them pass; with min_tokens they are to be forbidden, and must not end the engine."""
    requests = greedy_and_seeded(pair.prompts[14::80][:2], max_tokens=16, min_tokens=4, stop_token_ids=[999999, -3])
    for run in same_as_plain(plain, tree, requests):
        run.branched()
