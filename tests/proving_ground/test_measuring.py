# SPDX-License-Identifier: Apache-2.0
"""The measuring tools against brute force: trees by prefix, the 5-gram baseline, loop detection, the optimiser."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from aeon_ddtree.proving_ground.train.evaluate import distinct4, loops
from aeon_ddtree.proving_ground.train.ngram import KneserNey
from aeon_ddtree.proving_ground.train.optim import orthogonalise
from aeon_ddtree.proving_ground.train.prefix_trees import Draft, chain_accepts, simulate, tree_accepts


def draft(seed: int, horizon: int = 4, width: int = 3) -> Draft:
    rng = np.random.default_rng(seed)
    logp = np.sort(np.log(rng.dirichlet(np.ones(width + 2), horizon)), -1)[:, ::-1][:, :width]
    ids = np.stack([rng.permutation(50)[:width] for _ in range(horizon)])
    return Draft(ids, logp)


def brute_force(d: Draft, budget: int) -> set[tuple[int, ...]]:
    """The `budget` rank paths of highest summed log-probability (a prefix never scores below its extension)."""
    horizon, width = d.ids.shape
    paths = [p for n in range(1, horizon + 1) for p in itertools.product(range(width), repeat=n)]
    paths.sort(key=lambda p: -sum(d.logp[i, r] for i, r in enumerate(p)))
    return set(paths[:budget])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", [1, 5, 12, 40])
def test_best_first_tree_is_the_top_paths(seed: int, budget: int) -> None:
    d = draft(seed)
    inside = brute_force(d, budget)
    for path in itertools.product(range(3), repeat=4):
        tokens = np.array([d.ids[i, r] for i, r in enumerate(path)])
        expected = max((n for n in range(5) if n == 0 or path[:n] in inside), default=0)
        assert tree_accepts(d, tokens, budget, 0) == expected


def test_full_spine_contains_the_chain_and_spends_the_rest_elsewhere() -> None:
    for seed in range(20):
        d = draft(seed)
        tokens = d.ids[:, 0].copy()
        assert tree_accepts(d, tokens, 4, 4) == chain_accepts(d, tokens) == 4
        tokens[0] = d.ids[0, 1]
        assert chain_accepts(d, tokens) == 0 and tree_accepts(d, tokens, 4, 4) == 0
        assert tree_accepts(d, tokens, 60, 4) == 4


def test_simulated_steps_add_up() -> None:
    tokens = np.arange(11)
    right = [Draft(np.arange(i + 1, i + 5)[:, None], np.zeros((4, 1))) for i in range(11)]
    walk = simulate(tokens, right, chain_accepts)
    assert (walk.steps, walk.tokens, walk.miss_ranks) == (2, 10, [])
    wrong = [Draft(np.full((4, 2), 99), np.zeros((4, 2))) for _ in range(11)]
    walk = simulate(tokens, wrong, chain_accepts)
    assert (walk.steps, walk.tokens, walk.miss_ranks) == (10, 10, [-1] * 10)


def test_kneser_ney_sums_to_one_and_prefers_what_it_saw() -> None:
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 7, 4000).astype(np.uint16)
    tokens[::5] = 3
    model = KneserNey(tokens, 7)
    context = tokens[100:104]
    every = np.concatenate([np.append(context, w) for w in range(7)])
    total = sum(2 ** model.log2_probabilities(every[i * 5 : i * 5 + 5])[0] for i in range(7))
    assert total == pytest.approx(1.0, abs=1e-9)
    assert -model.log2_probabilities(tokens[:2000]).mean() < np.log2(7)


def test_loops_and_distinct() -> None:
    rng = np.random.default_rng(3)
    text = rng.integers(0, 3000, 128)
    assert not loops(text)
    text[60:110] = np.tile(text[60:65], 10)
    assert loops(text)
    assert distinct4([np.arange(10)]) == 1.0 and distinct4([np.zeros(10)]) == pytest.approx(1 / 7)


def test_orthogonalise_has_singular_values_near_one() -> None:
    for shape in ((2, 64, 160), (1, 160, 64)):
        out = orthogonalise(torch.randn(*shape, generator=torch.Generator().manual_seed(4)))
        values = torch.linalg.svdvals(out)
        assert values.min() > 0.5 and values.max() < 1.3
