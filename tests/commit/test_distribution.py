# SPDX-License-Identifier: Apache-2.0
"""Chi-square of sampler + walk against the exact distribution of all short sequences.

N independent requests, each with its own seed, decode three tokens; the exact probability of every sequence comes from
the plain-Python sampler. With cells of expected count below 5 merged into one, Pearson's statistic of C cells is
chi-square with C - 1 degrees of freedom. The bound is the point that a correct sampler exceeds once in a million
(Wilson-Hilferty: df * (1 - 2/(9 df) + z sqrt(2/(9 df)))^3 with z = 4.753). Seeds are fixed, so the test is
deterministic: it either always holds or the code is wrong. The control shows the bound's power: the same draws against
the distribution without the feature under test are far beyond it.
"""

import itertools
import math
from dataclasses import replace

import pytest
import sampling_oracles as sampler
from tabular import Tabular, decode

from aeon_ddtree.tree import TreePolicy
from aeon_ddtree.verify import RequestParams

VOCAB, LENGTH, N = 5, 3, 6000
PROMPT = [1, 2]

CASES = {
    "temperature": RequestParams(temperature=1.3),
    "top-k and top-p": RequestParams(temperature=1.8, top_k=4, top_p=0.88),
    "min-p": RequestParams(temperature=1.5, min_p=0.15),
    "penalties": RequestParams(temperature=1.3, repetition_penalty=1.5, frequency_penalty=0.4, presence_penalty=0.6),
    "penalties, top-k and top-p": RequestParams(
        temperature=1.3, top_k=4, top_p=0.85, repetition_penalty=1.4, presence_penalty=0.5
    ),
}


def exact(model: Tabular, params: RequestParams) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of LENGTH tokens."""
    result = {}
    for sequence in itertools.product(range(VOCAB), repeat=LENGTH):
        probability = 1.0
        for i, token in enumerate(sequence):
            before, last = ([*PROMPT, *sequence[:i]])[-2:]
            adjusted = sampler.adjust(model.target[before, last].tolist(), params, list(sequence[:i]))
            probability *= sampler.distribution(adjusted, params)[token]
        result[sequence] = probability
    assert math.isclose(sum(result.values()), 1.0, rel_tol=1e-9)
    return result


def chi_square(outputs: list[list[int]], probability: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """(statistic, degrees of freedom); infinite when a sequence of probability 0 was drawn."""
    counts: dict[tuple[int, ...], int] = {}
    for out in outputs:
        counts[tuple(out[:LENGTH])] = counts.get(tuple(out[:LENGTH]), 0) + 1
    if any(probability[sequence] == 0 for sequence in counts):
        return math.inf, 1
    statistic, cells, rare_seen, rare_expected = 0.0, 0, 0, 0.0
    for sequence, p in probability.items():
        expected = p * len(outputs)
        if expected < 5:
            rare_expected += expected
            rare_seen += counts.get(sequence, 0)
        else:
            statistic += (counts.get(sequence, 0) - expected) ** 2 / expected
            cells += 1
    if rare_expected > 0:
        statistic += (rare_seen - rare_expected) ** 2 / rare_expected
        cells += 1
    return statistic, cells - 1


def bound(df: int) -> float:
    spread = 2 / (9 * df)
    return df * (1 - spread + 4.753 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize("commit", ["branch", "flat"])
@pytest.mark.parametrize("name", CASES)
def test_sequences_have_the_targets_distribution(name, commit):
    model = Tabular(VOCAB, 3)
    params = CASES[name]
    requests = [replace(params, seed=1000 + n, prompt_ids=PROMPT) for n in range(N)]
    policy = TreePolicy(horizon=3, budget=7, top_k=3, ranking="coupled" if commit == "flat" else "greedy", spine=1)
    decoded = decode(model, requests, LENGTH, policy, commit, persistent=True)
    assert sum(int(step.plan.num_accepted.sum()) for step in decoded.steps) > N / 2  # trees did the work
    statistic, df = chi_square(decoded.outputs, exact(model, replace(params, prompt_ids=PROMPT)))
    assert df > 15
    assert statistic < bound(df)
    # Control: the same draws are far from a distribution that lacks this case's feature.
    wrong = RequestParams(temperature=1.0 if name == "temperature" else params.temperature, prompt_ids=PROMPT)
    statistic, df = chi_square(decoded.outputs, exact(model, wrong))
    assert statistic > 1.5 * bound(df)
