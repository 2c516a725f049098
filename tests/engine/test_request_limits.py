# SPDX-License-Identifier: Apache-2.0
"""Too little of something: KV cache, tokens per step, context. Shorter windows are allowed and counted by reason."""

from __future__ import annotations

import pytest
from shapes import BUDGET, SMALL_MODEL_LEN, SMALL_TOKENS, Pair, greedy_and_seeded, same_as_plain, staggered, watch_steps

from aeon_ddtree.engine.decoder import Decoder, DecodeRequest

pytestmark = pytest.mark.engine

W = BUDGET + 1


def test_a_token_budget_below_requests_times_w(plain: Decoder, small: Decoder, pair: Pair) -> None:
    """The scheduler cuts windows; what is left of a tree is a smaller tree, at last the root alone."""
    assert SMALL_TOKENS < 3 * W
    requests = greedy_and_seeded([prompt[:60] for prompt in pair.prompts[::60][:2]], max_tokens=24)
    small.rpc(watch_steps, True)
    for run in same_as_plain(plain, small, requests):
        assert run.fallbacks.keys() == {"token_budget"}
        assert run.stats["off_spine"] > 0
    steps = small.rpc(watch_steps, False)
    granted = {1 + s["drafts"].get(name, 0) for s in steps for name in s["rows"]}
    assert W in granted and any(1 < rows < W for rows in granted), f"windows of {granted} rows"


def test_prompt_chunks_and_squeezed_trees(plain: Decoder, small: Decoder, pair: Pair) -> None:
    """A prompt is cut into chunks of whatever the trees before it leave; its last chunk may be one token."""
    ids = pair.ids(0, 4)
    prompts = [ids[:150], ids[: SMALL_TOKENS + 1], ids[20 : 20 + W], ids[:1]]
    requests = staggered(greedy_and_seeded(prompts, max_tokens=16), every=2)[:6]
    for run in same_as_plain(plain, small, requests):
        assert run.fallbacks.keys() <= {"token_budget"}
        assert run.stats["off_spine"] > 0


def test_alone_it_is_never_squeezed(plain: Decoder, small: Decoder, pair: Pair) -> None:
    (request,) = greedy_and_seeded(pair.prompts[100:101], max_tokens=40)[:1]
    for run in same_as_plain(plain, small, [request]):
        assert not run.fallbacks


@pytest.mark.parametrize("left", [0, 1, 2, W - 1, W, W + 1])
def test_fewer_tokens_left_than_a_window(plain: Decoder, small: Decoder, pair: Pair, left: int) -> None:
    """The last windows before the model length are cut, depths stay what they are.

    Plain decoding has a longer context here, so its reference ends by max_tokens at the same place.
    """
    ids = pair.ids(8, 20)[: SMALL_MODEL_LEN - 1 - left]
    assert len(ids) == SMALL_MODEL_LEN - 1 - left
    fits = 1 + left
    wanted = greedy_and_seeded([ids], max_tokens=fits, ignore_eos=True)
    asked = [DecodeRequest(r.prompt, r.params | {"max_tokens": fits}) for r in wanted]
    for run in same_as_plain(plain, small, asked, expected=plain.run(wanted)):
        assert all((len(s.token_ids), s.finish_reason) == (fits, "length") for (s,) in run.decoded)
        if left > 1:
            assert run.fallbacks.get("model_length", 0) > 0


def test_up_to_the_model_length_without_max_tokens(plain: Decoder, small: Decoder, pair: Pair) -> None:
    """It ends at the model length by itself, beside a request that goes on with whole windows."""
    ids = pair.ids(8, 20)[: SMALL_MODEL_LEN - 40]
    short = pair.prompts[60][:60]
    wanted = [
        DecodeRequest(ids, {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}),
        DecodeRequest(short, {"max_tokens": 60, "temperature": 1.0, "seed": 5, "ignore_eos": True}),
    ]
    asked = [DecodeRequest(ids, {"temperature": 0.0, "max_tokens": None, "ignore_eos": True}), wanted[1]]
    for run in same_as_plain(plain, small, asked, expected=plain.run(wanted)):
        assert run.fallbacks.get("model_length", 0) > 0
        assert run.stats["off_spine"] > 0


def test_preemption(plain: Decoder, small: Decoder, pair: Pair) -> None:
    """Preempted requests lose KV, state and tree, are recomputed from prompt and output, and end with the same text."""
    ids = pair.ids(0, 12)
    prompts = [ids[start : start + 64] for start in (0, 60, 200)]
    requests = staggered(greedy_and_seeded(prompts, max_tokens=60, ignore_eos=True), every=1)
    small.rpc(watch_steps, True)
    for run in same_as_plain(plain, small, requests):
        assert run.stats["off_spine"] > 0
        assert run.fallbacks.keys() <= {"token_budget"}
    steps = small.rpc(watch_steps, False)
    preempted = {name for step in steps for name in step["preempted"]}
    assert preempted, "the KV cache was large enough for all"
    with_tree = {name for step in steps for name in step["drafts"]}
    assert preempted & with_tree, "nobody was preempted while decoding"


def test_preemption_with_penalties_and_grammar(plain: Decoder, small: Decoder, pair: Pair) -> None:
    """What a sampler remembers of a request survives its preemption."""
    ids = pair.ids(30, 42)
    requests = staggered(
        [
            *greedy_and_seeded([ids[:64]], max_tokens=50, ignore_eos=True, presence_penalty=0.8, bad_words=[" the"]),
            *greedy_and_seeded([ids[40:110]], max_tokens=50, structured_outputs={"regex": "[a-z ]{60,90}"}),
            *greedy_and_seeded([ids[90:160]], max_tokens=50, min_tokens=30, logprobs=1, repetition_penalty=1.1),
        ],
        every=1,
    )
    small.rpc(watch_steps, True)
    for run in same_as_plain(plain, small, requests):
        assert run.fallbacks.keys() <= {"token_budget", "grammar"}
    assert any(step["preempted"] for step in small.rpc(watch_steps, False))
