# SPDX-License-Identifier: Apache-2.0
"""Random mixes of requests on the running engines; every output is plain decoding's.

Longer: pytest tests/engine/test_fuzz.py --fuzz-seconds 3600 [--fuzz-seed N]. A failure names the seed of its round.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pytest
from fuzzing import random_mix, random_options, smallest
from shapes import Pair, Run, greedy_and_seeded, same_as_plain

from aeon_ddtree.engine.decoder import Decoder, DecodeRequest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FIRST_SEED = 20_261_129
MAX_NEAR_TIES = 1 / 2000
"""Near-ties per token; in fp32 they are far rarer, and a flood of them would hide a fault."""


@pytest.mark.timeout(0)
def test_random_mixes(
    plain: Decoder, tree: Decoder, small: Decoder, pair: Pair, request: pytest.FixtureRequest
) -> None:
    seconds = request.config.getoption("--fuzz-seconds", 75.0)
    seed = request.config.getoption("--fuzz-seed", None)
    seed = FIRST_SEED if seed is None else seed
    total: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    end = time.monotonic() + seconds
    while time.monotonic() < end or total["rounds"] < 1:
        for run in fuzz_round(seed + total["rounds"], plain, tree, small, pair.prompts):
            total.update({name: run.stats[name] for name in ("steps", "emitted", "nodes", "off_spine")})
            total["near_ties"] += len(run.near_ties)
            reasons.update(run.fallbacks)
        total["rounds"] += 1
    print(f"fuzz from seed {seed}: {dict(total)}, fallbacks {dict(reasons)}")
    assert total["off_spine"] > 0
    assert total["near_ties"] <= 1 + total["emitted"] * MAX_NEAR_TIES
    for engine in (tree, small):
        healthy(plain, engine, pair)


def fuzz_round(seed: int, plain: Decoder, tree: Decoder, small: Decoder, prompts: list[str]) -> list[Run]:
    rng = random.Random(seed)
    engine = rng.choice([tree, tree, small])
    requests = random_mix(rng, prompts, fits_small=engine is small)
    options = random_options(rng)
    engine.configure(**options)

    def check(requests: list[DecodeRequest]) -> list[Run]:
        return same_as_plain(plain, engine, requests)

    def fails(requests: list[DecodeRequest]) -> bool:
        try:
            check(requests)
        except Exception:
            return True
        return False

    try:
        runs = check(requests)
    except Exception as error:
        few = smallest(requests, fails)
        name = "small" if engine is small else "tree"
        pytest.fail(f"--fuzz-seed {seed}, engine {name}, {options}: {error}\nsmallest case: {few}")
    allowed = {"token_budget"}
    if any("structured_outputs" in r.params for r in requests):
        allowed.add("grammar")
    if engine is small:
        allowed.add("model_length")
    for run in runs:
        assert run.fallbacks.keys() <= allowed, f"--fuzz-seed {seed}: {run.fallbacks}"
    return runs


def healthy(plain: Decoder, engine: Decoder, pair: Pair) -> None:
    """It decodes right, branches, and holds nothing of what went before."""
    for run in same_as_plain(plain, engine, greedy_and_seeded([pair.prompts[60][:60]], max_tokens=24)[:1]):
        run.branched()
    left = engine.rpc(holdings)
    assert max(left.values()) <= 1, f"left behind by ended requests: {left}"


def holdings(worker: Any) -> dict[str, int]:
    """What the worker keeps by request; the last one's is freed when the next comes."""
    runner = worker.model_runner
    return {
        "requests": len(runner.requests),
        "batch rows": len(runner.input_batch.req_ids),
        "slots": len(runner.trees.slots._slot),
        "drafted": len(runner._drafted),
    }
