# SPDX-License-Identifier: Apache-2.0
"""Engines for all tests of this folder: started once, together, and only those that the selected tests ask for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shapes import BUDGET, SMALL_MODEL_LEN, SMALL_TOKENS, Pair, greedy_and_seeded

import aeon_ddtree.proving_ground
from aeon_ddtree.engine.decoder import Completion, Decoder, DecodeRequest

PACKAGE = Path(aeon_ddtree.proving_ground.__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuzz of the running engine")
    group.addoption("--fuzz-seconds", type=float, default=75.0, help="how long tests/engine/test_fuzz.py goes on")
    group.addoption("--fuzz-seed", type=int, default=None, help="first seed of the fuzz; prints itself when it fails")


def pytest_collection_finish(session: pytest.Session) -> None:
    asked = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    session.config.stash[_ASKED] = [name for name in ENGINES if name in asked]


@pytest.fixture(scope="session")
def pair() -> Pair:
    """The packaged pair; AEON_TEST_PAIR names a folder with another target/ and drafter/."""
    root = Path(os.environ.get("AEON_TEST_PAIR") or PACKAGE / "weights")
    for part in (root / "target", root / "drafter"):
        if not (part / "config.json").is_file():
            pytest.fail(f"{part}/config.json is missing: install the package with its data, or set AEON_TEST_PAIR")
    with (PACKAGE / "prompts.jsonl").open() as lines:
        prompts = [json.loads(line)["prompt"] for line in lines]
    return Pair(root / "target", root / "drafter", prompts)


TREE: dict[str, Any] = {"mode": "tree", "budget": BUDGET, "commit": "branch", "ranking": "coupled", "tau": 0.7}
"""What the fixtures `tree` and `small` are set to before each test that uses them."""

ROOMY = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 8,
    "max_logprobs": -1,
    "num_gpu_blocks_override": 80,
}
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"mode": "plain"}, ROOMY),
    "tree": (TREE, ROOMY),
    "chain": ({"mode": "chain"}, ROOMY),
    # A short context, fewer tokens a step than requests x W, and seven blocks of KV cache: a request takes one for its
    # states and one per 144 tokens, of which vLLM allocates 2 B ahead.
    "small": (
        TREE,
        {
            "max_model_len": SMALL_MODEL_LEN,
            "max_num_batched_tokens": SMALL_TOKENS,
            "max_num_seqs": 8,
            "block_size": 16,
            "num_gpu_blocks_override": 8,
        },
    ),
}
"""name -> DDTree's options, vLLM's arguments. Each name is a fixture."""

_ASKED = pytest.StashKey[list[str]]()
_DRAFTED = {"plain": 0, "chain": 15, "tree": BUDGET}


class Engines:
    """The engines by name. The first that is asked for starts all that this session needs, side by side."""

    def __init__(self, pair: Pair, names: list[str]) -> None:
        self._pair, self._names = pair, names
        self._running: dict[str, Decoder] = {}

    def __getitem__(self, name: str) -> Decoder:
        for other in [name, *self._names]:
            if other not in self._running:
                self._running[other] = self._start(other)
        return self._running[name].ready()

    def close(self) -> None:
        for decoder in self._running.values():
            decoder.close()

    def _start(self, name: str) -> Decoder:
        options, arguments = ENGINES[name]
        drafted = _DRAFTED[options["mode"]]
        return Decoder(
            str(self._pair.target),
            str(self._pair.drafter) if drafted else None,
            options,
            num_speculative_tokens=drafted,
            threads=1,
            skip_mm_profiling=True,
            **arguments,
        )


@pytest.fixture(scope="session")
def engines(pair: Pair, request: pytest.FixtureRequest) -> Iterator[Engines]:
    started = Engines(pair, request.config.stash[_ASKED])
    yield started
    started.close()


@pytest.fixture
def plain(engines: Engines) -> Decoder:
    """Plain decoding: no drafter, the truth for every other engine."""
    return engines["plain"]


@pytest.fixture
def chain(engines: Engines) -> Decoder:
    return engines["chain"]


@pytest.fixture
def tree(engines: Engines) -> Decoder:
    """Trees of BUDGET nodes; commit policy, spine, ranking and topology can be changed with `configure`."""
    return _reset(engines["tree"])


@pytest.fixture
def small(engines: Engines) -> Decoder:
    """As `tree`, with little of everything: KV cache, tokens per step, context."""
    return _reset(engines["small"])


@pytest.fixture(scope="session")
def free_runs(engines: Engines, pair: Pair) -> list[tuple[DecodeRequest, Completion]]:
    """Requests that end nowhere, and what the tree engine decoded for them under `branch`."""
    requests = greedy_and_seeded(pair.prompts[4::30], max_tokens=64, ignore_eos=True)
    decoded = _reset(engines["tree"]).run(requests)
    return [(request, sequence) for request, (sequence,) in zip(requests, decoded)]


def _reset(decoder: Decoder) -> Decoder:
    decoder.configure(**TREE)
    decoder.stats(reset=True)
    return decoder
