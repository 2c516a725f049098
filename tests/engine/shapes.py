# SPDX-License-Identifier: Apache-2.0
"""Comparing what an engine decoded with plain decoding, and functions that run inside an engine's worker."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from aeon_ddtree.engine.decoder import Completion, Decoder, DecodeRequest

BUDGET = 31
"""Nodes of the trees that the fixtures `tree` and `small` verify."""

SMALL_MODEL_LEN = 288
SMALL_TOKENS = 80
"""Context and tokens per step of the fixture `small`."""

NEAR_TIE = 1e-3
"""fp32: sums in another order move a logit by far less, so a difference with a wider gap is a fault."""

Decoded = list[list[Completion]]


@dataclass(frozen=True)
class Pair:
    """Folders of a target and its drafter, and prompts that mean something to them."""

    target: Path
    drafter: Path
    prompts: list[str]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.target / "tokenizer.json"))

    def ids(self, first: int, last: int) -> list[int]:
        """Token ids of the prompts first .. last - 1, line by line."""
        return self.tokenizer.encode("\n".join(self.prompts[first:last])).ids

    def decode(self, token_id: int) -> str:
        """Text of one token on its own."""
        return self.tokenizer.decode([token_id])


@dataclass(frozen=True)
class Run:
    """What one engine decoded, its counters, and differences from plain decoding that a near-tie explains."""

    decoded: Decoded
    stats: dict[str, Any]
    near_ties: list[str]

    @property
    def fallbacks(self) -> dict[str, int]:
        """Reasons that happened."""
        return {reason: count for reason, count in self.stats["fallbacks"].items() if count}

    def branched(self) -> Run:
        """Assert that real trees ran and were accepted off their spines, and that nothing fell back to a chain."""
        assert not self.fallbacks, f"fallbacks where none is allowed: {self.fallbacks}"
        assert self.stats["off_spine"] > 0, f"no accepted node off the spine: {self.stats}"
        return self


def greedy_and_seeded(prompts: Sequence[Any], seed: int = 11, **params: Any) -> list[DecodeRequest]:
    """Each prompt at T = 0 and at T = 1 with a seed of its own."""
    requests = []
    for number, prompt in enumerate(prompts):
        requests.append(DecodeRequest(prompt, {"temperature": 0.0, **params}))
        requests.append(DecodeRequest(prompt, {"temperature": 1.0, "seed": seed + number, **params}))
    return requests


def staggered(requests: Sequence[DecodeRequest], every: int = 2) -> list[DecodeRequest]:
    """The same requests, one arriving every few engine steps."""
    return [replace(request, arrival=index * every) for index, request in enumerate(requests)]


def with_params(request: DecodeRequest, **params: Any) -> DecodeRequest:
    """The same prompt with some parameters changed."""
    return DecodeRequest(request.prompt, request.params | params)


def pieces_of(sequence: Completion) -> list[range]:
    """The output indices that each engine step brought."""
    ends = list(accumulate(sequence.pieces))
    return [range(end - size, end) for end, size in zip(ends, sequence.pieces)]


def inside(sequence: Completion) -> list[int]:
    """Output indices that are neither the first nor the last of their engine step."""
    return [index for piece in pieces_of(sequence) for index in piece[1:-1]]


def same_as_plain(
    plain: Decoder,
    other: Decoder,
    requests: Sequence[DecodeRequest],
    commits: Sequence[str] = ("branch", "flat"),
    expected: Decoded | None = None,
) -> list[Run]:
    """Decode with plain and, under every commit policy, with the other engine; assert equality; one Run per policy.

    expected: what plain decoding gave before, where the caller has it.
    """
    for request in requests:  # vLLM's default temperature is 1, and a draw without a seed has no reference
        assert request.params.get("temperature") == 0.0 or "seed" in request.params, f"no seed: {request}"
    found = []
    with ThreadPoolExecutor(1) as beside:  # each engine keeps one core busy
        coming = beside.submit(lambda: plain.run(requests) if expected is None else expected)
        for commit in commits:
            other.configure(commit=commit)
            other.stats(reset=True)
            found.append((other.run(requests), other.stats()))
        right = coming.result()
    return [
        Run(decoded, stats, assert_same(plain, requests, right, decoded, where=commit))
        for commit, (decoded, stats) in zip(commits, found)
    ]


def assert_same(
    plain: Decoder, requests: Sequence[DecodeRequest], expected: Decoded, decoded: Decoded, where: str = ""
) -> list[str]:
    """Every sequence equal to plain decoding's, but for near-ties, which are proven by replaying them and returned."""
    near_ties = []
    assert len(expected) == len(decoded) == len(requests)
    for number, request in enumerate(requests):
        if request.abort_after == 0:  # aborted within its prompt
            continue
        assert len(expected[number]) == len(decoded[number]), f"{where} request {number}: another number of sequences"
        for index, (want, got) in enumerate(zip(expected[number], decoded[number])):
            position = first_difference(request, want, got)
            if position is None:
                continue
            name = f"{where} request {number}.{index} {request}"
            if position < 0:
                raise AssertionError(f"{name}: same tokens, but\nplain {want}\ngot   {got}")
            gap = plain_gap(plain, request, index, position)
            line = f"{name}: token {position} is {got.token_ids[position : position + 1]}, plain decoding says "
            line += f"{want.token_ids[position : position + 1]} with a gap of {gap:.2g}"
            assert gap < NEAR_TIE, f"{line}\nplain {want}\ngot   {got}"
            near_ties.append(line)
    return near_ties


def first_difference(request: DecodeRequest, want: Completion, got: Completion) -> int | None:
    """None when equal; the first differing token; -1 when anything but the tokens differs."""
    for position, (a, b) in enumerate(zip(want.token_ids, got.token_ids)):
        if a != b:
            return position
    if request.abort_after is not None and None in (want.finish_reason, got.finish_reason):
        # An aborted request ends after the step that reached the limit, and steps differ in length.
        enough = min(len(want.token_ids), len(got.token_ids)) >= request.abort_after
        return None if enough else -1
    if len(want.token_ids) != len(got.token_ids):
        return min(len(want.token_ids), len(got.token_ids))
    ends = [(c.text, c.finish_reason, c.stop_reason, c.prompt_token_ids) for c in (want, got)]
    if ends[0] != ends[1]:
        return -1
    pairs = [(want.logprobs, got.logprobs), (want.prompt_logprobs, got.prompt_logprobs)]
    return None if all(_same_logprobs(a, b) for a, b in pairs) else -1


def _same_logprobs(want: list[Any] | None, got: list[Any] | None, tolerance: float = NEAR_TIE) -> bool:
    """Equal ids and values; an id may stand on one side only where it ties with the last of the other side."""
    if want is None or got is None:
        return want is got
    if len(want) != len(got):
        return False
    for a, b in zip(want, got):
        if a is None or b is None:
            if a is not b:
                return False
            continue
        if len(a) != len(b) or any(abs(a[t] - b[t]) > tolerance for t in a.keys() & b.keys()):
            return False
        if any(
            abs(side[t] - min(a.values())) > tolerance for side in (a, b) for t in side.keys() ^ (a.keys() & b.keys())
        ):
            return False
    return True


def plain_gap(plain: Decoder, request: DecodeRequest, index: int, position: int) -> float:
    """By how much the winner won at a position of plain decoding: of adjusted logits, or of logits / T + noise."""
    plain.rpc(record_gaps, True)
    plain.run([replace(request, arrival=0, abort_after=None)])
    gaps = plain.rpc(record_gaps, False)
    child = f"{index}_" if request.params.get("n", 1) > 1 else ""
    found = [gap for (req_id, at), gap in gaps.items() if at == position and req_id.startswith(f"{child}r")]
    # A sequence that ended before this position was not cut by any tie.
    return min(found, default=float("inf"))


def record_gaps(worker: Any, on: bool) -> dict[tuple[str, int], float] | None:
    """In the worker of a plain engine: start recording {(request, output index): gap}, or stop and return it."""
    import aeon_ddtree.engine.runner as module
    from aeon_ddtree.verify import adjust_logits, sample_gaps, sample_rows

    if not on:
        recorded = module.sample_rows.gaps  # type: ignore[attr-defined]
        module.sample_rows = sample_rows
        return recorded

    def recording(logits: Any, state: Any, tree: Any, *, base_index: Any) -> Any:
        sampled, gap = sample_gaps(adjust_logits(logits, state, tree), state, tree, base_index=base_index)
        names = worker.model_runner.input_batch.req_ids
        recording.gaps.update(zip(zip(names, base_index.tolist()), gap[:, 0].tolist()))  # type: ignore[attr-defined]
        return sampled

    recording.gaps = {}  # type: ignore[attr-defined]
    module.sample_rows = recording
    return None


def watch_steps(worker: Any, on: bool) -> list[dict[str, Any]] | None:
    """In any worker: start noting every step's scheduled rows, drafts and preemptions, or stop and return them."""
    runner = worker.model_runner
    if not on:
        noted = runner._update_states.noted
        del runner._update_states  # the class's own again
        return noted
    update = runner._update_states

    def noting(scheduled: Any) -> Any:
        result = update(scheduled)
        noting.noted.append(  # type: ignore[attr-defined]
            {
                "rows": dict(scheduled.num_scheduled_tokens),
                "drafts": {name: len(ids) for name, ids in scheduled.scheduled_spec_decode_tokens.items()},
                "preempted": sorted(scheduled.preempted_req_ids or ()),
                "slots": dict(runner.trees.slots._slot),
                "batch": list(runner.input_batch.req_ids),
            }
        )
        return result

    noting.noted = []  # type: ignore[attr-defined]
    runner._update_states = noting
    return None
