# SPDX-License-Identifier: Apache-2.0
"""Decoding with every step recorded, and what must hold of the recording. The tests of logits, state and drafter assert
these checks, and the planted faults are shown to break the very same ones."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import step_probes
import torch

from aeon_ddtree.engine.decoder import Decoder, DecodeRequest
from aeon_ddtree.proving_ground.oracle import Oracle
from aeon_ddtree.proving_ground.reference_drafter import ReferenceDrafter

DEFAULTS = {"commit": "branch", "ranking": "greedy", "tau": 0.5, "top_k": 8, "spine": "full", "topology": "best_first"}

COUPLED = {"ranking": "coupled", "tau": 1.0, "spine": 3}
"""Options that make branches be accepted at T = 1 whatever the pair is worth: the noise is known before drafting."""

LOGITS = 1e-4
"""fp32 engine against fp64 truth, absolute, on logits of size 1 … 30. One rounding of such a logit is up to 1e-6; sums
of 256 to 1024 terms through 8 layers leave a few of them."""

STATE = 3e-5
"""fp32 state against fp64, as a share of the largest entry of that layer. A term is rounded to 6e-8 of itself; sums,
8 layers and rotary angles of up to 160 radians, which fp32 knows to 1e-5, leave a few 1e-6."""


@dataclass(frozen=True)
class Truth:
    """What transformers says in fp64 of the pair, and the drafter in plain PyTorch, fp64 too."""

    target: Oracle
    drafter: ReferenceDrafter
    prompts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, target: Path, drafter: Path, texts: Sequence[str], lengths: Sequence[int]) -> Truth:
        """lengths: how many tokens of each text are its prompt."""
        from transformers import AutoTokenizer

        oracle = Oracle(target)
        tokenizer = AutoTokenizer.from_pretrained(target)
        prompts = tuple(tuple(tokenizer(text)["input_ids"][:length]) for text, length in zip(texts, lengths))
        assert tuple(map(len, prompts)) == tuple(lengths), f"prompts of {[len(p) for p in prompts]} tokens"
        return cls(oracle, ReferenceDrafter.from_pretrained(drafter, oracle.model.lm_head.weight.detach()), prompts)

    @property
    def kinds(self) -> list[str]:
        """Per layer of the target: full_attention or linear_attention."""
        return self.target.model.config.get_text_config().layer_types


@dataclass
class Request:
    """One decoded request: `tokens` are its prompt and all that was emitted, `steps` its records (`Probe.record`).

    inputs: what transformers' model needs beside the prompt's tokens (pictures)."""

    prompt: list[int]
    tokens: list[int]
    steps: list[dict[str, Any]]
    inputs: dict[str, Any] = field(default_factory=dict)

    @property
    def trees(self) -> list[dict[str, Any]]:
        return [step for step in self.steps if step["tree"] is not None]

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


def record(
    decoder: Decoder,
    prompts: Sequence[Any],
    *,
    max_tokens: int,
    what: tuple[str, ...],
    params: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    guide: Sequence[Sequence[int]] | None = None,
    fault: str | None = None,
    **shape: Any,
) -> list[Request]:
    """Decode `prompts`, one arriving every second step, and return what happened.

    what: see `Probe.record`; options: of this run, beside DEFAULTS; guide: outputs known beforehand, for random trees
    (`step_guide.guide`, which takes `shape`); fault: one of `step_faults`. At T = 0 unless `params` says otherwise.
    """
    guided = None if guide is None else {"continuations": [list(tokens) for tokens in guide], **shape}
    if options is not None or guide is not None:
        decoder.configure(**DEFAULTS | (options or {}))
    decoder.rpc(step_probes.start, what, guided, fault)
    wanted = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens} | (params or {})
    try:
        asked = [p if isinstance(p, dict) else list(p) for p in prompts]
        done = decoder.run([DecodeRequest(prompt, wanted, arrival=2 * i) for i, prompt in enumerate(asked)])
    finally:
        steps = decoder.rpc(step_probes.stop)
    requests = [Request(list(c.prompt_token_ids), list(c.prompt_token_ids), []) for (c,) in done]
    for step in steps:
        request = requests[step["request"]]
        request.steps.append(step)
        if step["ends_prompt"]:
            request.tokens += step["emitted"]
    for request, (completion,) in zip(requests, done):
        assert request.output[:max_tokens] == completion.token_ids, "the recorder saw other tokens than were answered"
    return requests


@functools.cache
def plain_outputs(plain: Decoder, prompts: tuple[tuple[int, ...], ...], max_tokens: int = 128) -> list[list[int]]:
    """What plain decoding answers to `prompts` at T = 0."""
    params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens}
    return [done.token_ids for (done,) in plain.run([DecodeRequest(list(p), params) for p in prompts])]


def off_spine(requests: Sequence[Request]) -> int:
    """Committed nodes that are not on the chain that starts their window."""
    return sum(row != i for request in requests for step in request.trees for i, row in enumerate(step["path"]))


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
                assert step["row_tokens"][:rows] == tree["token"], f"{where}: the window holds other tokens"
                assert tree["token"][0] == request.tokens[step["before"]], f"{where}: the root is not the last token"
                path = step["path"]
                assert max(path) < rows, f"{where}: row {max(path)} was accepted, the tree has {rows} rows"
                assert [tree["parent"][row] for row in path] == [-1, *path[:-1]], f"{where}: {path} is no path"
                assert [tree["token"][row] for row in path[1:]] == step["emitted"][:-1], f"{where}: others emitted"
                seen += 1
            drafted = step.get("drafted")
    assert seen, "no tree was verified"


Replay = Callable[[list[int], list[list[int]]], list[np.ndarray]]
"""Committed tokens, paths of tokens -> logits [len(path), V] of every path, alone behind the committed tokens."""


def replay_fp64(truth: Truth) -> Replay:
    def replay(committed: list[int], paths: list[list[int]]) -> list[np.ndarray]:
        _, past = truth.target.run(committed)
        return [truth.target.run(path, copy.deepcopy(past))[0].logits.numpy() for path in paths]

    return replay


def replay_plain(plain: Decoder) -> Replay:
    """The same engine without a drafter: committed tokens and path are a prompt."""

    def replay(committed: list[int], paths: list[list[int]]) -> list[np.ndarray]:
        prompts = [committed + path for path in paths]
        done = record(plain, prompts, max_tokens=1, what=("prompt_logits",))
        return [np.concatenate([s["prompt_logits"] for s in request.steps])[len(committed) :] for request in done]

    return replay


def node_logits(requests: Sequence[Request], replay: Replay, every: int = 1) -> int:
    """The logits of every row of every `every`-th tree are those of its path replayed alone; returns how many."""
    compared = 0
    for index, request in enumerate(requests):
        for step in request.trees[::every]:
            tree = step["tree"]
            committed = request.tokens[: step["before"]]
            paths = [_path(tree, leaf) for leaf in sorted(set(range(len(tree["token"]))) - set(tree["parent"]))]
            replayed = replay(committed, [[tree["token"][row] for row in path] for path in paths])
            for path, expected in zip(paths, replayed):
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


def target_state(requests: Sequence[Request], truth: Truth) -> int:
    """KV at every committed position, convolution window and recurrent state of every layer, after every step, equal
    the fp64 truth for the same tokens. Returns the states compared."""
    compared = 0
    for index, request in enumerate(requests):
        past, done = None, 0
        for step in request.steps:
            length = step["after"]
            inputs = request.inputs if past is None else {}
            run, past = truth.target.run(request.tokens[done:length], past, **inputs)
            assert sorted([*step["kv"], *step["conv"]]) == list(range(len(truth.kinds))), "layers are missing"
            for layer, expected in enumerate(run.layers):
                if expected.kind == "full_attention":
                    pairs = dict(zip(("key", "value"), zip(step["kv"][layer], (expected.key, expected.value))))
                else:
                    window = step["conv"][layer]
                    pairs = {
                        "window": (window, expected.conv[-len(window) :]),
                        "recurrent": (step["recurrent"][layer], expected.state.transpose(-1, -2)),
                    }
                for name, (found, wanted) in pairs.items():
                    where = f"request {index}, {length} committed, path {step['path']}: {name} of layer {layer}"
                    _close(found, wanted, where)
            done = length
            compared += 1
    return compared


def drafter_inputs(requests: Sequence[Request], truth: Truth) -> int:
    """After every step the drafter's context is that of the committed tokens' hidden states, and its logits are those
    of the plain PyTorch drafter given this context and the bonus. Returns the steps compared."""
    drafter = truth.drafter
    layer_ids = torch.tensor(drafter.config["dflash_config"]["target_layer_ids"])
    compared = 0
    for index, request in enumerate(requests):
        length = max(step["after"] for step in request.steps)
        run, _ = truth.target.run(request.tokens[:length], **_longer(request.inputs, length))
        features = run.hidden[layer_ids + 1].transpose(0, 1).flatten(1)
        positions = torch.arange(length)
        caches = drafter.keys_values(features, positions)
        for step in request.steps:
            after = step["after"]
            where = f"request {index}, {after} committed, path {step['path']}"
            layers = [step["drafter_kv"][layer] for layer in sorted(step["drafter_kv"])]
            for layer, (found, pair) in enumerate(zip(layers, caches, strict=True)):
                for side, name in enumerate(("key", "value")):
                    _close(found[side], pair[side][:after], f"{where}: drafter's {name} of layer {layer}")
            if not step["ends_prompt"]:
                continue
            assert step["draft_context"] == after, f"{where}: the block starts at {step['draft_context']}"
            expected = drafter.logits(features[:after], positions[:after], request.tokens[after])
            worst = float(np.abs(step["draft_logits"] - expected.numpy()).max())
            assert worst <= LOGITS, f"{where}: draft logits differ by {worst:.2g}"
            compared += 1
    return compared


def _longer(inputs: dict[str, Any], length: int) -> dict[str, Any]:
    """The prompt's inputs for prompt and output: what follows is text (type 0)."""
    kinds = inputs.get("mm_token_type_ids")
    if kinds is None:
        return inputs
    return inputs | {"mm_token_type_ids": torch.nn.functional.pad(kinds, (0, length - kinds.shape[1]))}


def _close(found: np.ndarray, expected: torch.Tensor, where: str) -> None:
    wanted = expected.numpy()
    assert found.shape == wanted.shape, f"{where}: shape {found.shape}, expected {wanted.shape}"
    worst = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    assert worst <= STATE, f"{where} differs by {worst:.2g} of its largest entry"


def padded_windows(decoder: Decoder, truth: Truth, max_tokens: int, fault: str | None = None) -> list[Request]:
    """Requests whose target always says token 0, the token of padding rows, with windows filled in part."""
    done = record(
        decoder,
        truth.prompts,
        max_tokens=max_tokens,
        what=("state",),
        params={"logit_bias": {0: 1000.0}},
        guide=[[0] * 128] * len(truth.prompts),
        padded=True,
        reach=1,
        seed=6,
        fault=fault,
    )
    assert all(len(request.trees) > 2 for request in done)
    assert any(len(step["tree"]["token"]) < step["rows"] for request in done for step in request.trees), "no padding"
    assert all(token == 0 for request in done for token in request.output)
    return done
