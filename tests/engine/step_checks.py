# SPDX-License-Identifier: Apache-2.0
"""Decoding with every step recorded, and what must hold of the recording. The tests of logits, state and drafter assert
these checks, and the planted faults are shown to break the very same ones."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fp64_truth
import numpy as np
import step_probes
import torch

import aeon_ddtree.proving_ground
from aeon_ddtree.engine.decoder import Decoder, DecodeRequest

PAIR = Path(os.environ.get("AEON_TEST_PAIR") or Path(aeon_ddtree.proving_ground.__file__).parent / "weights")
"""Folder with target/ and drafter/; AEON_TEST_PAIR names another pair of the same architecture."""

BUDGET = 19
"""Of the tree engine: not the horizon, so that the two cannot be mistaken for each other."""

DEFAULTS = {"commit": "branch", "ranking": "greedy", "tau": 0.5, "top_k": 8, "spine": "full"}

COUPLED = {"ranking": "coupled", "tau": 1.0, "spine": 3}
"""Options that make branches be accepted at T = 1 whatever the pair is worth: the noise is known before drafting."""

LOGITS = 1e-4
"""fp32 engine against fp64, on logits of size 1 … 30: two fp32 orders of summation differ by up to 1e-5 of them."""

STATE = 1e-4
"""Largest difference of a state, relative to the largest entry of the truth (fp32 keeps 6e-8 of each term; sums over
256 terms, 8 layers, and positions of rotary angles up to 200 radians leave about 1e-5)."""

PROMPTS = (
    "def read_lines(path):\n    with open(path) as source:\n        return [line for line in",
    "The",
    "Question: What is 17 + 25? Answer:",
)


@functools.cache
def target() -> fp64_truth.Target:
    return fp64_truth.Target(PAIR / "target")


@functools.cache
def drafter() -> fp64_truth.Drafter:
    return fp64_truth.Drafter(PAIR / "drafter", PAIR / "target")


@functools.cache
def prompts() -> tuple[tuple[int, ...], ...]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    return tuple(tuple(tokenizer(text)["input_ids"]) for text in PROMPTS)


@functools.cache
def engine(budget: int | None = BUDGET) -> Decoder:
    """The engine that verifies trees of `budget` nodes, or plain decoding (None); it lives until the tests end."""
    shared: dict[str, Any] = {"threads": 1, "max_model_len": 512, "max_num_seqs": 4}
    if budget is None:
        decoder = Decoder(str(PAIR / "target"), None, {"mode": "plain"}, **shared)
    else:
        options = {"mode": "tree", "budget": budget, "commit": "branch"}
        pair = (str(PAIR / "target"), str(PAIR / "drafter"))
        decoder = Decoder(*pair, options, num_speculative_tokens=budget, **shared)
    atexit.register(decoder.close)
    return decoder


@dataclass
class Request:
    """One decoded request: `tokens` are its prompt and all that was emitted, `steps` its records (`Probe.record`)."""

    prompt: list[int]
    tokens: list[int]
    steps: list[dict[str, Any]]

    @property
    def trees(self) -> list[dict[str, Any]]:
        return [step for step in self.steps if step["tree"] is not None]


def record(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    what: tuple[str, ...],
    params: dict[str, Any] | None = None,
    guide: Sequence[Sequence[int]] | None = None,
    padded: bool = False,
    reach: int = 4,
    seed: int = 0,
    options: dict[str, Any] | None = None,
    fault: str | None = None,
) -> list[Request]:
    """Decode `prompts`, one arriving every second step, and return what happened; see `Probe.record` and `Probe.guide`.

    options: tree options of this run, beside the defaults and the `branch` policy; fault: one of `step_faults`."""
    guided = None
    if guide is not None:
        guided = {"continuations": [list(t) for t in guide], "seed": seed, "padded": padded, "reach": reach}
    if decoder is not engine(None):
        decoder.configure(**DEFAULTS | (options or {}))
    decoder.rpc(step_probes.start, what, guided, fault)
    wanted = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens} | (params or {})
    try:
        done = decoder.run([DecodeRequest(list(p), wanted, arrival=2 * i) for i, p in enumerate(prompts)])
    finally:
        steps = decoder.rpc(step_probes.stop)
    requests = [Request(list(p), list(p), []) for p in prompts]
    for step in steps:
        request = requests[step["request"]]
        request.steps.append(step)
        if step["ends_prompt"]:
            request.tokens += step["emitted"]
    for request, (completion,) in zip(requests, done):
        output = request.tokens[len(request.prompt) :][:max_tokens]
        assert output == completion.token_ids, "the recorder saw other tokens than the engine answered with"
    return requests


@functools.cache
def plain_outputs(max_tokens: int) -> list[list[int]]:
    """What plain decoding answers to `prompts()` at T = 0."""
    done = engine(None).run(
        [DecodeRequest(list(p), {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens}) for p in prompts()]
    )
    return [completion.token_ids for (completion,) in done]


def off_spine(requests: Sequence[Request]) -> int:
    """Committed nodes that are not on the chain that starts their window."""
    count = 0
    for request in requests:
        for step in request.trees:
            count += sum(row != i for i, row in enumerate(step["path"]))
    return count


# -- the checks; each raises AssertionError with the place


def own_trees(requests: Sequence[Request]) -> None:
    """A request verifies the tree drafted for it in the step before, and its walk follows children that exist."""
    seen = 0
    for index, request in enumerate(requests):
        drafted: dict[str, Any] | None = None
        for number, step in enumerate(request.steps):
            where = f"request {index}, step {number}"
            tree = step["tree"]
            if tree is not None:
                assert drafted is not None, f"{where}: a tree was verified that nobody drafted"
                rows = len(tree["token"])
                for name in ("token", "parent", "depth"):
                    assert tree[name] == drafted[name][:rows], f"{where}: {name} {tree[name]}, drafted {drafted[name]}"
                assert step["row_tokens"][:rows] == tree["token"], f"{where}: the window holds other tokens than the tree"
                assert tree["token"][0] == request.tokens[step["before"]], f"{where}: the root is not the last token"
                path = step["path"]
                assert max(path) < rows, f"{where}: row {max(path)} was accepted, the tree has {rows} rows"
                assert [tree["parent"][row] for row in path] == [-1, *path[:-1]], f"{where}: {path} is no path"
                assert [tree["token"][row] for row in path[1:]] == step["emitted"][:-1], f"{where}: other tokens emitted"
                seen += 1
            drafted = step.get("drafted")
    assert seen, "no tree was verified"


Replay = Callable[[list[list[int]]], list[np.ndarray]]
"""Token sequences -> logits [L, V] of each, the sequence alone."""


def replay_fp64(sequences: list[list[int]]) -> list[np.ndarray]:
    length = max(map(len, sequences))
    ids = torch.tensor([s + [0] * (length - len(s)) for s in sequences])
    return [out[: len(s)].numpy() for s, out in zip(sequences, target().logits(ids))]


def replay_plain(sequences: list[list[int]]) -> list[np.ndarray]:
    """The same engine without trees; a sequence is its prompt."""
    done = record(engine(None), sequences, max_tokens=1, what=("prompt_logits",))
    return [np.concatenate([step["prompt_logits"] for step in request.steps])[: len(s)] for request, s in zip(done, sequences)]


def node_logits(requests: Sequence[Request], replay: Replay = replay_fp64, every: int = 1) -> int:
    """The logits of every row of every `every`-th tree equal those of its path replayed alone. Returns rows compared."""
    compared = 0
    for index, request in enumerate(requests):
        for step in request.trees[::every]:
            tree = step["tree"]
            committed = request.tokens[: step["before"]]
            rows = range(len(tree["token"]))
            leaves = sorted(set(rows) - set(tree["parent"]))
            paths = [_path(tree, leaf) for leaf in leaves]
            replayed = replay([committed + [tree["token"][row] for row in path] for path in paths])
            for path, truth in zip(paths, replayed):
                expected = truth[len(committed) :]
                worst = np.abs(step["logits"][path] - expected).max(axis=1)
                at = int(worst.argmax())
                assert worst[at] <= LOGITS, (
                    f"request {index}, {len(committed)} committed: logits of row {path[at]} at depth {at} differ by "
                    f"{worst[at]:.2g} from those of its path alone; parents {tree['parent']}"
                )
                compared += len(path)
    assert compared, "no tree was verified"
    return compared


def _path(tree: dict[str, list[int]], row: int) -> list[int]:
    path = [row]
    while tree["parent"][path[0]] >= 0:
        path.insert(0, tree["parent"][path[0]])
    return path


def target_state(requests: Sequence[Request]) -> int:
    """KV at every committed position, convolution window and recurrent state of every layer, after every step, equal
    the fp64 truth for the same tokens. Returns the states compared."""
    kinds = target().config.layer_types
    compared = 0
    for index, request in enumerate(requests):
        steps = {step["after"]: step for step in request.steps}
        assert len(steps) == len(request.steps), f"request {index}: a step committed nothing"
        for truth in target().states(request.tokens, sorted(steps)):
            step = steps[truth.length]
            found = {"conv": step["conv"], "recurrent": step["recurrent"]}
            found |= {name: {i: kv[side] for i, kv in step["kv"].items()} for side, name in enumerate(("key", "value"))}
            for name in ("key", "value", "conv", "recurrent"):
                expected = getattr(truth, name)
                attends = name in ("key", "value")
                layers = [i for i, kind in enumerate(kinds) if (kind == "full_attention") == attends]
                assert sorted(found[name]) == sorted(expected) == layers, f"{name} of layers {sorted(found[name])} recorded"
                for layer in layers:
                    where = f"request {index}, {truth.length} committed, path {step['path']}: {name} of layer {layer}"
                    _close(found[name][layer], expected[layer].numpy(), where)
            compared += 1
    return compared


def drafter_inputs(requests: Sequence[Request]) -> int:
    """After every step the drafter's context is that of the committed tokens' hidden states, and its logits are those
    of the plain PyTorch drafter given this context and the bonus. Returns the steps compared."""
    compared = 0
    for index, request in enumerate(requests):
        steps = [step for step in request.steps if step["ends_prompt"]]
        lengths = sorted(step["after"] for step in request.steps)
        hidden = torch.cat([state.hidden for state in target().states(request.tokens, lengths)])
        context = drafter().context(hidden)
        for step in steps:
            after = step["after"]
            where = f"request {index}, {after} committed, path {step['path']}"
            for layer, (found, pair) in enumerate(zip(_in_order(step["drafter_kv"]), context, strict=True)):
                for side, name in enumerate(("key", "value")):
                    _close(found[side], pair[side][:after].numpy(), f"{where}: drafter's {name} of layer {layer}")
            assert step["draft_context"] == after, f"{where}: the block starts at {step['draft_context']}"
            expected = drafter().logits([(k[:after], v[:after]) for k, v in context], request.tokens[after])
            worst = np.abs(step["draft_logits"] - expected.numpy()).max()
            assert worst <= LOGITS, f"{where}: draft logits differ by {worst:.2g}"
            compared += 1
    return compared


def _in_order(layers: dict[int, Any]) -> list[Any]:
    return [layers[index] for index in sorted(layers)]


def _close(found: np.ndarray, expected: np.ndarray, where: str) -> None:
    assert found.shape == expected.shape, f"{where}: shape {found.shape}, expected {expected.shape}"
    worst = float(np.abs(found - expected).max() / np.abs(expected).max())
    assert worst <= STATE, f"{where} differs by {worst:.2g} of its largest entry"


def padded_windows(max_tokens: int, fault: str | None = None) -> list[Request]:
    """Requests whose target always says token 0, the token of padding rows, with windows filled in part."""
    silent = {"logit_bias": {0: 100.0}}
    done = record(
        engine(), prompts(), max_tokens=max_tokens, what=("state",), params=silent,
        guide=[[0] * 128] * len(prompts()), padded=True, reach=2, seed=6, fault=fault,
    )  # fmt: skip
    assert any(len(step["tree"]["token"]) <= BUDGET for request in done for step in request.trees), "no padding"
    assert all(token == 0 for request in done for token in request.tokens[len(request.prompt) :])
    return done
