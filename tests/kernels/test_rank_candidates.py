# SPDX-License-Identifier: Apache-2.0
"""rank_candidates against its formulas in Python doubles, with the noise that the sampler will draw."""

import math

import pytest
import torch

from aeon_ddtree.kernels.build_tree import RANKINGS, rank_candidates
from aeon_ddtree.kernels.keyed_sampling import keyed_gumbel, keyed_sample


def log_softmax(xs):
    top = max(xs)
    total = math.log(sum(math.exp(x - top) for x in xs)) + top
    return [x - total for x in xs]


def weights(logits, temperature, noise, ranking, tau, mix, softness):
    log_q = log_softmax(logits)
    if ranking == "greedy" or temperature < 1e-5:
        return log_q
    coupled = log_softmax([(x / (tau * temperature) + g) / softness for x, g in zip(log_q, noise)])
    if ranking == "coupled":
        return coupled
    mixed = [(1 - mix) * math.exp(a) + mix * math.exp(b) for a, b in zip(log_q, coupled)]
    return [math.log(x) if x > 0 else -math.inf for x in mixed]


@pytest.mark.parametrize("ranking", RANKINGS)
@pytest.mark.parametrize(
    ("tau", "mix", "softness"), [(1.0, 0.5, 1.0), (0.5, 0.2, 0.7), (0.8, 0.0, 2.0), (0.8, 1.0, 2.0)]
)
def test_formulas(ranking, tau, mix, softness):
    """Rows at T = 0 are greedy in every ranking; depth d uses the noise of output index + d − 1."""
    gen = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 5, 60, generator=gen) * 2
    temperature = torch.tensor([0.0, 1.0, 0.6, 1e-6])
    seed, index = torch.tensor([1, -5, 2**40, 4]), torch.tensor([0, 9, 2**33, 2])
    token, logp = rank_candidates(
        logits, temperature, seed, index, 7, ranking=ranking, tau=tau, mix=mix, softness=softness
    )
    assert token.dtype == torch.int64 and logp.dtype == torch.float32 and token.shape == logp.shape == (4, 5, 7)
    for r in range(4):
        for d in range(5):
            noise = keyed_gumbel(seed[r : r + 1], index[r : r + 1] + d, 60)[0].tolist()
            truth = weights(logits[r, d].tolist(), float(temperature[r]), noise, ranking, tau, mix, softness)
            best = sorted(range(60), key=lambda x: (-truth[x], x))[:7]
            assert token[r, d].tolist() == best
            assert torch.allclose(logp[r, d].double(), torch.tensor([truth[x] for x in best]).double(), atol=2e-5)


def test_ties_go_to_the_lower_id():
    """Also at the edge of the top-k, for either sign of zero, and with tokens that are ruled out."""
    logits = torch.zeros(1, 3, 50)
    logits[0, 1, [40, 10, 30]] = 5.0
    logits[0, 2] = -torch.inf
    logits[0, 2, [7, 9]] = 1.0
    one = torch.ones(1, dtype=torch.int64)
    token, logp = rank_candidates(logits, torch.zeros(1), one, one, 5)
    assert token[0].tolist() == [[0, 1, 2, 3, 4], [10, 30, 40, 0, 1], [7, 9, 0, 1, 2]]
    assert (logp[0, 2, 2:] == -torch.inf).all()


def test_coupled_first_choice_is_the_targets_draw():
    """where q equals p, the drafter's perturbed first choice is the very token the target draws."""
    logits = torch.randn(6, 8, 300, generator=torch.Generator().manual_seed(2)) * 1.5
    temperature, seed, index = torch.tensor([1.0, 0.7, 1.3] * 2), torch.arange(6), torch.arange(6) * 100
    token, _ = rank_candidates(logits, temperature, seed, index, 3, ranking="coupled")
    greedy, _ = rank_candidates(logits, temperature, seed, index, 3)
    drawn = keyed_sample(
        logits.flatten(0, 1), temperature.repeat_interleave(8), None, None, None, seed.repeat_interleave(8),
        (index[:, None] + torch.arange(8)).flatten(),
    )  # fmt: skip
    assert torch.equal(token[..., 0].flatten(), drawn)
    assert (greedy[..., 0].flatten() == drawn).double().mean() < 0.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logits", torch.zeros(2, 3)),
        ("temperature", torch.zeros(3)),
        ("seed", torch.zeros(2)),
        ("index", torch.zeros(1, dtype=torch.int64)),
        ("top_k", 0),
        ("top_k", 6),
        ("ranking", "best"),
        ("tau", 0.0),
        ("tau", 1.5),
        ("mix", -0.1),
        ("softness", 0.0),
    ],
)
def test_bad_input_is_named(name, value):
    whole = torch.zeros(2, dtype=torch.int64)
    arguments = {
        "logits": torch.zeros(2, 3, 5),
        "temperature": torch.zeros(2),
        "seed": whole,
        "index": whole,
        "top_k": 2,
    }
    rank_candidates(**arguments)
    with pytest.raises(ValueError, match=name):
        rank_candidates(**{**arguments, name: value})
