# SPDX-License-Identifier: Apache-2.0
"""The parity command on the embedded pair, small: plain, chain and both commit policies of one budget, T = 0 and 1."""

import json
from pathlib import Path

import pytest

from aeon_ddtree.engine.decoder import DecodeRequest
from aeon_ddtree.proving_ground import parity
from aeon_ddtree.proving_ground.parity_judge import Difference, judge, scores
from aeon_ddtree.proving_ground.parity_run import logits_after

ARGUMENTS = (
    "--recipe proving-ground --prompts 12 --single-prompts 2 --max-tokens 32 --budgets 31 --commit flat,branch "
    "--temperature 0,1 --batch 1,8 --dtype float32 --device cpu"
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    file: Path = tmp_path_factory.mktemp("parity") / "report.json"
    code = parity.main([*ARGUMENTS.split(), "--json", str(file)])
    assert code in (0, 1), "the harness itself failed"
    return json.loads(file.read_text()) | {"code": code}


def runs(report, **wanted):
    return [run for run in report["runs"] if all(run[name] == value for name, value in wanted.items())]


@pytest.mark.engine
@pytest.mark.slow
class TestParity:
    def test_nothing_differs_beyond_rounding(self, report):
        found = report["parity"]
        assert found["outside_rule"] == 0, found["differences"]
        assert found["compared"] == 2 * 2 + 2 * (12 + 2) * 2 + 3 * (12 + 2), "a combination was left out"
        assert report["code"] == 0 and report["passed"] is True

    def test_branches_were_taken_under_both_policies(self, report):
        trees = runs(report, mode="tree", kind="main")
        assert {(run["options"]["commit"], run["temperature"]) for run in trees} == {
            (commit, temperature) for commit in ("flat", "branch") for temperature in (0.0, 1.0)
        }
        assert all(run["off_spine"] > 0 and run["after_off_spine"] > 0 for run in trees)
        assert all(run["off_spine"] == 0 for run in runs(report, mode="chain")), "a chain has no branches: the control"

    def test_a_tree_emits_no_less_per_step_than_the_chain(self, report):
        rows = [row for row in report["ratios"] if row["kind"] == "main" and row["chain_ranking"] == "greedy"]
        assert len(rows) == 4
        assert all(row["pooled"] >= 1.0 for row in rows), rows

    def test_every_step_is_accounted_for(self, report):
        for run in runs(report, mode="tree") + runs(report, mode="chain"):
            accepted = sum(length * steps for length, steps in enumerate(run["accepted_length"]))
            assert run["verified_steps"] == sum(run["accepted_length"]) == run["steps"] - run["sequences"]
            assert run["emitted"] == accepted + run["verified_steps"] >= run["tokens"] - run["sequences"]
            assert not any(run["fallbacks"].values()), "nothing here squeezes a window"


@pytest.mark.engine
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_gap_that_judges_a_difference_is_that_of_the_engine(plain, tree, pair, temperature):
    """Recomputed scores choose every token that the engine chose, and a false token there is not excused."""
    params = {"temperature": temperature, "seed": 11}
    (decoded,) = plain.run([DecodeRequest(pair.prompts[0], params | {"max_tokens": 8})])[0]
    tokens = decoded.token_ids
    for position in (0, 3, 7):
        prefix = tokens[:position]
        row = logits_after(plain, pair.prompts[0], params, prefix)
        assert int(scores(row, temperature, 11, position).argmax()) == tokens[position]
        prefilled = logits_after(plain, decoded.prompt_token_ids + prefix, {"temperature": 0.0}, [])
        branched = logits_after(tree, pair.prompts[0], params, prefix)
        for other in (prefilled, branched):
            assert float((row - other).abs().max()) < 1e-3
        worst = int(scores(row, temperature, 11, position).argmin())
        difference = Difference("p", "c", "tree", "plain", position, tokens[position], worst)
        verdict = judge(difference, rows=(row, prefilled, branched), temperature=temperature, seed=11, is_fp32=True)
        assert not verdict.allowed and verdict.lead > 1 and verdict.gap > 0
    assert logits_after(plain, pair.prompts[0], params, [tokens[0], tokens[1] ^ 1]) is None, "another way"
