# SPDX-License-Identifier: Apache-2.0
"""JSON schema, regex, choice and EBNF grammars: such requests run as chains, counted; those beside them branch."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from reasoning_probe import pretend_reasoning_parser
from shapes import Pair, greedy_and_seeded, same_as_plain, staggered

from aeon_ddtree.engine.decoder import Decoder, DecodeRequest

pytestmark = pytest.mark.engine

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer"},
        "kind": {"enum": ["box", "drum", "ring"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", "maybe so"]
REGEX = r"\d{3}-[a-z]{4}( [a-f]{1,3}){2}"
EBNF = 'root ::= "SELECT " ("a" | "b" | "count") " FROM " ("t1" | "t2")'

GRAMMARS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA, "disable_any_whitespace": True},
    "json_object": {"json_object": True},
    "regex": {"regex": REGEX},
    "choice": {"choice": CHOICES},
    "grammar": {"grammar": EBNF},
}


def obeys(name: str, text: str) -> bool:
    if name == "json":
        value = json.loads(text)
        return set(value) == {"name", "count", "kind"} and isinstance(value["count"], int)
    if name == "json_object":
        return isinstance(json.loads(text), dict)
    if name == "choice":
        return text in CHOICES
    return re.fullmatch(REGEX if name == "regex" else r"SELECT (a|b|count) FROM t[12]", text) is not None


@pytest.mark.parametrize("name", GRAMMARS)
def test_every_kind_beside_free_requests(plain: Decoder, tree: Decoder, pair: Pair, name: str) -> None:
    grammar = greedy_and_seeded(
        [pair.prompts[205], pair.prompts[210][:80]], max_tokens=64, structured_outputs=GRAMMARS[name]
    )
    free = greedy_and_seeded(pair.prompts[30::90][:2], seed=41, max_tokens=32)
    requests = [request for both in zip(grammar, free) for request in both]
    for run in same_as_plain(plain, tree, requests, ("branch",)):
        assert run.fallbacks.keys() == {"grammar"}
        assert run.stats["off_spine"] > 0, "the free requests did not branch"
        finished = [s for (s,) in run.decoded[::2] if s.finish_reason == "stop"]
        assert all(obeys(name, sequence.text) for sequence in finished)
        assert finished or name == "json_object"


def test_a_grammar_request_never_branches(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    requests = greedy_and_seeded([pair.prompts[205]], max_tokens=40, structured_outputs=GRAMMARS["json"])
    for run in same_as_plain(plain, tree, requests):
        assert run.stats["off_spine"] == 0
        assert 0 < run.fallbacks["grammar"] <= run.stats["steps"]


def test_the_slot_of_an_ended_grammar_request_branches_again(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    """And the other way round: a grammar right after a chat must not meet the chat's tree."""
    free = greedy_and_seeded(pair.prompts[70::90][:2], max_tokens=10)
    constrained = greedy_and_seeded(pair.prompts[200::15][:2], max_tokens=10, structured_outputs=GRAMMARS["regex"])
    for first, second in ((free, constrained), (constrained, free)):
        same_as_plain(plain, tree, first)
        for run in same_as_plain(plain, tree, second):
            assert (run.stats["off_spine"] > 0) == (second is free)
            assert (not run.fallbacks) == (second is free)


def test_grammars_with_everything_else(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    prompt = pair.prompts[215]
    every = [
        {"structured_outputs": GRAMMARS["json"], "temperature": 0.0, "logprobs": 2},
        {"structured_outputs": GRAMMARS["regex"], "seed": 3, "n": 2, "top_p": 0.9, "presence_penalty": 0.5},
        {"seed": 9, "repetition_penalty": 1.1},
        {"structured_outputs": GRAMMARS["json"], "temperature": 0.0, "min_tokens": 3, "max_tokens": 6},
        {"structured_outputs": GRAMMARS["regex"], "temperature": 0.0, "stop": ["-"]},
        {"structured_outputs": GRAMMARS["choice"], "temperature": 0.0},
    ]
    requests = staggered([DecodeRequest(prompt, {"max_tokens": 40} | params) for params in every])
    requests[4] = replace(requests[4], stream=True)
    requests[5] = replace(requests[5], abort_after=1)
    for run in same_as_plain(plain, tree, requests):
        assert run.fallbacks.keys() == {"grammar"}


def test_with_a_reasoning_parser_grammars_emit_one_token_per_step(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    """vLLM decides once per window whether the grammar applies yet: no window may reach past the end of reasoning."""
    constrained = greedy_and_seeded([pair.prompts[205]], max_tokens=24, structured_outputs=GRAMMARS["json"])
    free = greedy_and_seeded(pair.prompts[70::90][:2], max_tokens=24)
    tree.rpc(pretend_reasoning_parser, True)
    try:
        for run in same_as_plain(plain, tree, [*constrained, *free]):
            assert all(s.steps == len(s.token_ids) for (s,) in run.decoded[: len(constrained)])
            assert run.stats["off_spine"] > 0, "the free requests did not branch"
    finally:
        tree.rpc(pretend_reasoning_parser, False)
