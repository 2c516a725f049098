# SPDX-License-Identifier: Apache-2.0
"""Which differences are seen, and which of them rounding explains."""

import pytest
import torch

from aeon_ddtree.kernels.keyed_sampling import keyed_sample
from aeon_ddtree.proving_ground.parity_judge import Decoded, Difference, differences, first_difference, judge, scores
from aeon_ddtree.proving_ground.parity_plan import Prompt

VOCAB = 50


def decoded(*tokens, finish="length"):
    return Decoded(tokens, len(tokens), finish)


def difference(plain, got, position=4):
    return Difference("p", "math", "tree", "plain", position, plain, got)


@pytest.mark.parametrize(
    ("plain", "got", "position"),
    [
        (decoded(1, 2, 3), decoded(1, 2, 3), None),
        (decoded(1, 2, 3), decoded(1, 9, 3), 1),
        (decoded(1, 2, 3), decoded(9, 9, 9), 0),
        (decoded(1, 2, 3), decoded(1, 2), 2),
        (decoded(1, 2), decoded(1, 2, 3), 2),
        (decoded(), decoded(1), 0),
        (decoded(1, 2), decoded(1, 2, finish="stop"), 2),
    ],
)
def test_the_first_difference(plain, got, position):
    assert first_difference(plain, got) == position


def test_differences_name_prompt_position_and_tokens():
    prompts = [Prompt("a", "math", ""), Prompt("b", "prose", "")]
    found = differences(prompts, [decoded(1, 2), decoded(3, 4)], [decoded(1, 2), decoded(3, 5)], "tree", "plain")
    assert found == [(1, Difference("b", "prose", "tree", "plain", 1, 4, 5))]
    ended = differences(prompts, [decoded(1, 2), decoded(3, 4)], [decoded(1), decoded(3, 4)], "tree", "plain")
    assert [(each.plain, each.got) for _, each in ended] == [(2, None)]
    with pytest.raises(ValueError, match="as many"):
        differences(prompts, [decoded(1)], [decoded(1)], "tree", "plain")


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_scores_are_what_the_sampler_takes_the_maximum_of(temperature):
    generator = torch.Generator().manual_seed(0)
    for seed in range(20):
        logits = torch.randn(VOCAB, generator=generator)
        found = scores(logits, temperature, seed + (1 << 62), seed * 3)
        token, gap = keyed_sample(
            logits[None], torch.tensor([temperature]), None, None, None, torch.tensor([seed + (1 << 62)]),
            torch.tensor([seed * 3]), return_scores=True,
        )  # fmt: skip
        assert int(found.argmax()) == int(token)
        best, second = found.topk(2).values
        assert float(best - second) == pytest.approx(float(gap), abs=1e-6)


def row_with_lead(lead, temperature, seed=7, position=4):
    """(logits, best, runner-up, third): the scores of best and runner-up lie `lead` apart, all others far below."""
    base = scores(torch.zeros(VOCAB), temperature, seed, position)
    wanted = torch.full((VOCAB,), -5.0)
    wanted[3], wanted[8], wanted[9] = 2.0 + lead, 2.0, 1.0
    scale = temperature or 1.0
    return (wanted - base) * scale, 3, 8, 9


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("lead", "allowed"), [(2e-4, True), (9e-4, True), (1.1e-3, False), (0.5, False)])
def test_fp32_allows_near_ties_only(temperature, lead, allowed):
    logits, best, second, _ = row_with_lead(lead, temperature)
    verdict = judge(difference(best, second), rows=(logits, None, None), temperature=temperature, seed=7, is_fp32=True)
    assert verdict.allowed is allowed
    assert verdict.gap == pytest.approx(lead, abs=1e-5) and verdict.lead == pytest.approx(lead, abs=1e-5)


def test_a_near_tie_excuses_only_the_two_tokens_that_tie():
    logits, best, _, third = row_with_lead(2e-4, 1.0)
    verdict = judge(difference(best, third), rows=(logits, None, None), temperature=1.0, seed=7, is_fp32=True)
    assert verdict.gap < 1e-3 < verdict.lead and not verdict.allowed


def test_what_plain_decoding_does_not_repeat_is_not_excused():
    logits, best, second, _ = row_with_lead(2e-4, 0.0)
    for given in (difference(second, best), difference(None, best), difference(best, None)):
        verdict = judge(given, rows=(logits, None, None), temperature=0.0, seed=7, is_fp32=True)
        assert not verdict.allowed and verdict.note and verdict.gap is None


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize(("lead", "allowed"), [(0.1, True), (0.5, False)])
def test_outside_fp32_the_noise_of_plain_decoding_decides_and_not_that_of_the_mode_under_test(
    temperature, lead, allowed
):
    logits, best, second, _ = row_with_lead(lead, temperature)
    prefilled = logits.clone()
    prefilled[20] += 0.1 * (temperature or 1.0)  # bound: 2 · 0.1
    broken = logits + 100 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    verdict = judge(
        difference(best, second),
        rows=(logits, prefilled, broken),
        temperature=temperature,
        seed=7,
        is_fp32=False,
    )
    assert verdict.allowed is allowed and verdict.bound == pytest.approx(0.2, abs=1e-3) and verdict.row > 10
    with pytest.raises(ValueError, match="missing"):
        judge(difference(best, second), rows=(logits, None, broken), temperature=temperature, seed=7, is_fp32=False)
