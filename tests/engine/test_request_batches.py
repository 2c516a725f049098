# SPDX-License-Identifier: Apache-2.0
"""Who decodes beside whom: batches, arrivals, chunked prompts, streams, aborts, slots. All as plain decoding says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shapes import BUDGET, Decoded, Pair, assert_same, greedy_and_seeded, same_as_plain, staggered, watch_steps

from aeon_ddtree.engine.decoder import Decoder, DecodeRequest

pytestmark = pytest.mark.engine

W = BUDGET + 1


def assert_as_many_steps(decoded: Decoded, alone: Decoded) -> None:
    """A tree depends on its own request only. With a neighbour's tree or context the text would still be right, but
    take more steps; a few differ because a near-tie of the drafter orders two nodes otherwise."""
    steps = [sum(sequence.steps for done in each for sequence in done) for each in (decoded, alone)]
    assert abs(steps[0] - steps[1]) <= 1 + 0.03 * steps[1], f"{steps[0]} steps in the batch, {steps[1]} alone"


def test_batch_of_different_trees(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    requests = greedy_and_seeded(pair.prompts[::60][:4], max_tokens=32)
    for run in same_as_plain(plain, tree, requests):
        run.branched()


def test_text_does_not_depend_on_the_batch(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    requests = greedy_and_seeded(pair.prompts[10::70][:3], max_tokens=24)
    expected = [plain.run([request])[0] for request in requests]
    together = tree.run(requests)
    alone = [tree.run([request])[0] for request in requests]
    assert tree.stats()["off_spine"] > 0
    assert_same(plain, requests, expected, together, "together")
    assert_same(plain, requests, expected, alone, "alone")
    assert_as_many_steps(together, alone)


def test_requests_arrive_mid_decode(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    requests = staggered(greedy_and_seeded(pair.prompts[5::50][:4], max_tokens=30), every=3)
    for run in same_as_plain(plain, tree, requests):
        run.branched()


@pytest.mark.parametrize("lengths", [(1, 2, W - 1, W, W + 1), (1, 14, 15, 16, 17)])
def test_prompt_lengths_around_the_window_and_the_block(
    plain: Decoder, tree: Decoder, pair: Pair, lengths: tuple[int, ...]
) -> None:
    """A prompt of W tokens must not be taken for a window, nor one token for a decoding step."""
    ids = pair.ids(3, 6)
    requests = greedy_and_seeded([ids[-count:] for count in lengths], max_tokens=20)[:8]
    for run in same_as_plain(plain, tree, requests):
        run.branched()
    # Each arrives while others decode, so that prompts and windows share a forward.
    for run in same_as_plain(plain, tree, staggered(requests, every=1)):
        run.branched()


def test_a_one_token_prompt_starts_from_nothing(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    """Its one row must not read the state that the slot's last request left; alone it is also in slot 0."""
    ids = pair.ids(0, 3)[:40]
    one = DecodeRequest(ids[:1], {"temperature": 0.0, "max_tokens": 16})
    first = tree.run([one])
    assert_same(plain, [one], plain.run([one]), first, "fresh")
    tree.run(greedy_and_seeded([ids, ids[7:]], max_tokens=8))
    again = tree.run([one])
    assert again[0][0].token_ids == first[0][0].token_ids


def test_chunked_prompts_beside_trees(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    """Prompts longer than a step's tokens, while others decode trees."""
    short = greedy_and_seeded(pair.prompts[7::90][:2], max_tokens=40)
    long_ids = pair.ids(0, 24)[:900]
    assert len(long_ids) == 900
    long = greedy_and_seeded([long_ids, long_ids[100:801]], seed=31, max_tokens=24)
    requests = [*short, *(replace(request, arrival=2 + index) for index, request in enumerate(long))]
    tree.rpc(watch_steps, True)
    for run in same_as_plain(plain, tree, requests):
        assert run.stats["off_spine"] > 0
    steps = tree.rpc(watch_steps, False)
    mixed = [s for s in steps if s["drafts"] and any(n > 1 + s["drafts"].get(r, 0) for r, n in s["rows"].items())]
    assert mixed, "no step carried a prompt chunk beside a tree"


def test_several_sequences_of_one_prompt(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    requests = [
        DecodeRequest(pair.prompts[20], {"max_tokens": 24, "temperature": 1.0, "seed": 3, "n": 4}),
        DecodeRequest(pair.prompts[90], {"max_tokens": 24, "temperature": 0.8, "seed": 5, "n": 2}, arrival=3),
        DecodeRequest(pair.prompts[90], {"temperature": 0.0, "max_tokens": 24}, arrival=4),
    ]
    for run in same_as_plain(plain, tree, requests):
        run.branched()
        texts = {tuple(sequence.token_ids) for sequence in run.decoded[0]}
        assert len(texts) == 4, "sequences of one request share their noise"


def test_streamed_increments_add_up(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    requests = staggered(greedy_and_seeded(pair.prompts[15::60][:4], max_tokens=32, logprobs=1))
    expected = plain.run(requests)
    streamed = [replace(request, stream=True) for request in requests]
    for run in same_as_plain(plain, tree, streamed, expected=expected):
        run.branched()
        assert any(max(sequence.pieces) > 2 for (sequence,) in run.decoded), "no step brought several tokens"


def test_abort_mid_tree_and_reuse_of_the_slot(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    """Aborted requests leave windows, slots and KV blocks behind: whoever takes them over decodes as if new."""
    requests = [
        replace(request, abort_after=9 if index % 3 else None)
        for index, request in enumerate(greedy_and_seeded(pair.prompts[2::55][:4], max_tokens=48))
    ]
    late = [replace(r, arrival=5 + i) for i, r in enumerate(greedy_and_seeded(pair.prompts[30::80][:3], max_tokens=24))]
    tree.rpc(watch_steps, True)
    for run in same_as_plain(plain, tree, [*requests, *late]):
        run.branched()
        assert sum(done[0].finish_reason is None for done in run.decoded) >= 3, "nothing was aborted"
    steps = tree.rpc(watch_steps, False)
    owners: dict[int, set[str]] = {}
    for step in steps:
        for name, slot in step["slots"].items():
            owners.setdefault(slot, set()).add(name)
    assert any(len(names) > 1 for names in owners.values()), "no slot changed hands"
    assert 0 in owners


def test_abort_within_a_chunked_prompt(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    """Half a prompt is committed state without an output; the next in that slot must not see it."""
    doomed = DecodeRequest(pair.ids(0, 24)[:900], {"temperature": 0.0, "max_tokens": 8}, arrival=3, abort_after=0)
    heirs = greedy_and_seeded([pair.ids(50, 51)[:1], pair.prompts[51]], max_tokens=20)
    requests = [
        *greedy_and_seeded(pair.prompts[52:53], max_tokens=30),
        doomed,
        *(replace(request, arrival=4) for request in heirs),
    ]
    tree.rpc(watch_steps, True)
    for run in same_as_plain(plain, tree, requests):
        run.branched()
    owners = [
        {slot for step in steps for n, slot in step["slots"].items() if n == name}
        for steps in (tree.rpc(watch_steps, False),)
        for name in dict.fromkeys(n for step in steps for n in step["slots"])
    ]
    assert any(a & b for i, a in enumerate(owners) for b in owners[:i]), "no slot changed hands"


def test_a_request_joins_after_another_ended(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    """Batch rows are condensed then: rows and slots part, and whoever confuses them reads another request's tree."""
    lengths = (6, 40, 8, 40)
    first = [
        replace(request, params=request.params | {"max_tokens": length})
        for request, length in zip(greedy_and_seeded(pair.prompts[40::60][:2]), lengths)
    ]
    joining = [
        replace(request, arrival=6 + 2 * index)
        for index, request in enumerate(greedy_and_seeded(pair.prompts[44::60][:2], seed=91, max_tokens=30))
    ]
    requests = [*first, *joining]
    expected = plain.run(requests)
    for commit in ("branch", "flat"):
        tree.rpc(watch_steps, True)
        (run,) = same_as_plain(plain, tree, requests, (commit,), expected)
        steps = tree.rpc(watch_steps, False)
        run.branched()
        apart = [s for s in steps if any(s["slots"][name] != row for row, name in enumerate(s["batch"]))]
        assert apart, "row and slot never differed"
        assert_as_many_steps(run.decoded, [tree.run([replace(request, arrival=0)])[0] for request in requests])


def test_more_requests_than_slots(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    requests = greedy_and_seeded(pair.prompts[1::35][:6], max_tokens=14)
    for run in same_as_plain(plain, tree, requests):
        run.branched()


@pytest.mark.parametrize(
    "options",
    [
        {"spine": "none"},
        {"spine": 4},
        {"ranking": "mixed"},
        {"ranking": "greedy", "top_k": 3},
        {"topology": "root_leaves", "root_leaves": 16, "top_k": 20, "commit": "flat"},
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items()),
)
def test_every_kind_of_tree(plain: Decoder, tree: Decoder, pair: Pair, options: dict[str, object]) -> None:
    tree.configure(**options)
    commits = (str(options.get("commit", "branch")),)
    requests = greedy_and_seeded(pair.prompts[8::60][:4], max_tokens=24)
    try:
        for run in same_as_plain(plain, tree, requests, commits):
            run.branched()
    finally:
        tree.configure(topology="best_first", root_leaves=0, top_k=8, spine="full")
