# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the report."""

import pytest
from test_parity_plan import PROMPTS

from aeon_ddtree.proving_ground import parity, parity_report
from aeon_ddtree.proving_ground.parity_judge import Decoded
from aeon_ddtree.proving_ground.parity_plan import Case, EngineKey
from aeon_ddtree.proving_ground.parity_run import Run, tokens_per_step

BRANCH = {"commit": "branch", "topology": "best_first", "ranking": "greedy"}


def decoding(mode, budget, counts, temperature=0.0, **options):
    """A run of one prompt per category; counts: (tokens, steps) of each."""
    prompts = [PROMPTS[0], PROMPTS[20], PROMPTS[40]][: len(counts)]
    decoded = [Decoded(tuple(range(tokens)), steps, "length") for tokens, steps in counts]
    steps, tokens = sum(s for _, s in counts), sum(t for t, _ in counts)
    verified = steps - len(counts)
    counters = {
        "steps": verified, "emitted": tokens - len(counts), "nodes": 10 * verified,
        "off_spine": 2, "after_off_spine": 3,
        "length": [4, 3, 2, 1], "offered": [9, 8, 7], "fallbacks": {"grammar": 0},
    }  # fmt: skip
    return Run(Case(EngineKey(mode, budget), temperature, 8, "main", options), prompts, decoded, 1.0, counters)


def test_the_step_of_the_prompt_does_not_count():
    assert tokens_per_step([Decoded((1,), 1, "stop")]) is None
    assert tokens_per_step([Decoded((1, 2, 3, 4, 5), 3, "stop")]) == 2.0
    pooled = [Decoded((1, 2, 3, 4, 5), 3, "stop"), Decoded((1,), 1, "stop"), Decoded(tuple(range(9)), 9, "stop")]
    assert tokens_per_step(pooled) == pytest.approx(12 / 10)


def test_a_run_in_the_report():
    described = parity_report.describe(decoding("tree", 31, [(9, 5), (13, 4)], **BRANCH))
    assert described["tokens_per_step_by_category"] == {"coding": 2.0, "math": 4.0}
    assert described["tokens_per_step"] == pytest.approx(20 / 7)
    assert described["tokens_per_step_mean_of_categories"] == 3.0
    assert described["nodes_per_step"] == 10
    assert described["accepted_length"] == [4, 3, 2, 1]
    assert described["accepted_at_depth"] == [6, 3, 1]
    assert described["verified_steps"] == 7 and described["emitted"] == 20


def test_ratios_are_of_means_and_by_category():
    tree = decoding("tree", 31, [(9, 5), (13, 4)], **BRANCH)
    chain = decoding("chain", 0, [(9, 9), (13, 5)], ranking="greedy")
    hotter = decoding("chain", 0, [(9, 9), (13, 5)], temperature=1.0, ranking="greedy")
    (row,) = parity_report.ratios([tree, chain, hotter])
    assert row["by_category"] == {"coding": 2.0, "math": pytest.approx(4 / 3)}
    assert row["least_category"] == pytest.approx(4 / 3)
    assert row["mean"] == pytest.approx(3 / 2)
    assert row["pooled"] == pytest.approx((20 / 7) / (20 / 12))


def test_goals_say_what_was_not_measured():
    runs = [
        decoding("tree", 31, [(9, 5), (13, 4)], **BRANCH),
        decoding("chain", 0, [(9, 9), (13, 5)], ranking="greedy"),
    ]
    goals = {
        goal["what"]: goal["met"]
        for goal in parity_report.goals(runs, parity_report.ratios(runs), parity_report.verdict(runs))
    }
    assert goals["tree B=31 branch / chain at T=0, mean, at least"] is True
    assert goals["tree B=31 branch / greedy chain at T=1, mean, at least"] is None
    assert goals["tree / chain, branch, least over budgets >= 15, at least"] is True
    assert goals["tree / chain, flat, least over budgets >= 15, at least"] is None
    assert goals["fallbacks to a chain, at most"] is True
    assert goals["right tokens after them, at least"] is False
    assert goals["differences inside the rule, at most"] is True


def test_the_digest_sees_every_token():
    runs = [
        [Decoded((1, 2), 2, "stop"), Decoded((3,), 1, "stop")],
        [Decoded((1,), 2, "stop"), Decoded((2, 3), 1, "stop")],
    ]
    assert parity_report.digest(runs[0]) != parity_report.digest(runs[1])
    assert parity_report.digest(runs[0]) == parity_report.digest([Decoded((1, 2), 9, None), Decoded((3,), 1, None)])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "--json"),
        ("--json {out} --budgets 7,x", "--budgets: '7,x'"),
        ("--json {out} --budgets 7,7", "twice"),
        ("--json {out} --commit tree", "flat or branch"),
        ("--json {out} --recipe no-such", "unknown recipe no-such"),
        ("--json {out} --unknown", "--unknown"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments, said, capsys, tmp_path):
    assert parity.main(arguments.format(out=tmp_path / "r.json").split()) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
