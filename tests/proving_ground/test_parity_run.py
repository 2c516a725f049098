# SPDX-License-Identifier: Apache-2.0
"""The harness around a decoder that needs no model: what is right passes, each planted fault is found and judged."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from test_parity_plan import PROMPTS, SETTINGS

from aeon_ddtree.engine.decoder import Completion, DecoderError
from aeon_ddtree.proving_ground import parity_report
from aeon_ddtree.proving_ground.parity_judge import scores
from aeon_ddtree.proving_ground.parity_plan import select
from aeon_ddtree.proving_ground.parity_run import Harness, Pair

VOCAB = 40
SMALL = replace(SETTINGS, prompts=7, single_prompts=3, max_tokens=4, budgets=(15, 31))
CASES = 4 + 2 * (1 + 2) + 4 * (2 + 3)
"""plain; chain (one at T = 0, two at T = 1); trees of two budgets, the narrower also with root leaves; each twice."""


class Model:
    """Logits by prefix. tie: (text, position) whose two best tokens lie 2e-4 apart at T = 0."""

    def __init__(self):
        self.tie = None

    def row(self, text, tokens):
        name = hashlib.blake2b(f"{text}/{tokens}".encode(), digest_size=7).digest()
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(int.from_bytes(name, "little")))
        if self.tie == (text, len(tokens)):
            best, second = logits.topk(2).indices.tolist()
            logits[best] = logits[second] + 2e-4
        return logits


@pytest.fixture
def engine(monkeypatch):
    """Replaces the decoder. engine.fault(mode, options, text, position) -> the rank taken instead of 0, or None."""

    class Engine:
        model, started, closed, configured = Model(), [], [], []
        fault = staticmethod(lambda mode, options, text, position: None)
        off_spine, broken = 3, None

    class Decoder:
        def __init__(self, target, drafter, options, *, num_speculative_tokens=0, **_):
            self.options, self.rows = dict(options), num_speculative_tokens
            assert (drafter is None) == (options["mode"] == "plain") == (num_speculative_tokens == 0)
            Engine.started.append((options["mode"], num_speculative_tokens))

        def ready(self):
            if Engine.broken == self.options["mode"]:
                raise DecoderError("out of memory")
            return self

        def close(self):
            Engine.closed.append((self.options["mode"], self.rows))

        def configure(self, **values):
            self.options |= values
            Engine.configured.append((self.rows, values.get("commit"), values.get("ranking")))

        def stats(self, reset=False):
            length = [self.tokens, *[0] * 15] if hasattr(self, "tokens") else [0] * 16
            counts = {"steps": sum(length), "emitted": sum(length), "nodes": 0, "off_spine": Engine.off_spine}
            return counts | {
                "after_off_spine": 60, "length": length, "offered": [0] * 15, "fallbacks": {"grammar": 0},
            }  # fmt: skip

        def run(self, requests):
            results = [[self.complete(request.prompt, request.params)] for request in requests]
            self.tokens = sum(each[0].steps for each in results)
            return results

        def complete(self, prompt, params):
            """Text is its own token ids here, so that a prefix can be given as ids."""
            ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
            text = bytes(ids[: ids.index(255)] if 255 in ids else ids).decode()
            given = ids[ids.index(255) + 1 :] if 255 in ids else []
            tokens, rows = [], []
            for _ in range(params["max_tokens"]):
                row = Engine.model.row(text, given + tokens)
                score = scores(row, params["temperature"], params.get("seed", 0), len(given + tokens))
                wrong = Engine.fault(self.options["mode"], self.options, text, len(given + tokens))
                tokens.append(int(score.topk(1 + (wrong or 0)).indices[-1]))
                rows.append(dict(enumerate(row.tolist())))
            return Completion(
                tokens,
                "",
                "length",
                [1] * len(tokens),
                None,
                rows if "logprobs" in params else None,
                None,
                [*ids, 255],
            )

    monkeypatch.setattr("aeon_ddtree.engine.decoder.Decoder", Decoder)
    return Engine


def run(settings=SMALL, parallel=2, dtype="float32", tell=lambda line: None):
    pair = Pair("target", "drafter", dtype=dtype)
    return Harness(pair, settings, select(PROMPTS, settings), parallel, tell).run()


@pytest.mark.parametrize("parallel", [1, 2, 4])
def test_equal_decoders_are_found_equal(engine, parallel):
    runs = run(parallel=parallel)
    verdict = parity_report.verdict(runs)
    assert len(runs) == CASES and verdict["passed"], verdict
    # Plain decoding one at a time is compared with plain decoding in a batch; the batch is the reference itself.
    others = (CASES - 4) // 2  # at each batch
    assert verdict["compared"] == verdict["identical"] == 2 * 3 + others * (7 + 3)
    assert sorted(engine.started) == sorted(engine.closed) == [("chain", 15), ("plain", 0), ("tree", 15), ("tree", 31)]


def test_a_wrong_token_in_one_policy_is_found_there_and_nowhere_else(engine):
    victim = PROMPTS[0].text
    engine.fault = staticmethod(
        lambda mode, options, text, position: (
            1 if mode == "tree" and options["commit"] == "branch" and (text, position) == (victim, 3) else None
        )
    )
    lines = []
    runs = run(tell=lines.append)
    verdict = parity_report.verdict(runs)
    assert not verdict["passed"] and verdict["outside_rule"] == 2 * 2 * 2  # budgets, temperatures, batches
    for each in verdict["differences"]:
        assert (each["prompt"], each["position"]) == (PROMPTS[0].id, 3) and "branch" in each["case"]
        assert each["gap"] == each["lead"] > 1e-3 and each["row"] == 0
    assert sum("OUTSIDE" in line for line in lines) == 8


def test_a_near_tie_resolved_the_other_way_is_inside_the_rule(engine):
    victim = PROMPTS[0].text
    engine.model.tie = (victim, 2)
    engine.fault = staticmethod(
        lambda mode, options, text, position: 1 if mode == "chain" and (text, position) == (victim, 2) else None
    )
    settings = replace(SMALL, temperatures=(0.0,))
    verdict = parity_report.verdict(run(settings))
    assert verdict["passed"] and verdict["inside_rule"] == 2 and verdict["outside_rule"] == 0
    assert all(each["gap"] == pytest.approx(2e-4, abs=1e-5) for each in verdict["differences"])
    engine.model.tie = None
    assert parity_report.verdict(run(settings))["outside_rule"] == 2


def test_outside_fp32_a_mode_is_not_excused_by_its_own_errors(engine):
    engine.fault = staticmethod(lambda mode, options, text, position: 1 if mode == "tree" and position == 1 else None)
    verdict = parity_report.verdict(run(replace(SMALL, temperatures=(0.0,), budgets=(15,)), dtype="bfloat16"))
    assert not verdict["passed"] and verdict["inside_rule"] == 0
    measured = [each for each in verdict["differences"] if each["gap"] is not None]
    # The prefix is given as ids; the stand-in computes it exactly alike, so there is no noise to excuse anything.
    assert measured and all(each["noise"] == 0 for each in measured)


def test_only_so_many_differences_are_measured_and_none_is_lost(engine):
    engine.fault = staticmethod(lambda mode, options, text, position: 1 if mode == "chain" else None)
    settings = replace(SMALL, batches=(8,), temperatures=(0.0,), budgets=(31,))
    verdict = parity_report.verdict(run(settings))
    assert verdict["outside_rule"] == settings.prompts
    assert sum(each["gap"] is None for each in verdict["differences"]) == settings.prompts - 5


def test_plain_decoding_that_depends_on_its_batch_is_found(engine, monkeypatch):
    plain = []

    def fault(mode, options, text, position):
        plain.append(mode == "plain")
        return 1 if mode == "plain" and sum(plain) < 10 else None

    engine.fault = staticmethod(fault)
    settings = replace(SMALL, budgets=(31,), temperatures=(0.0,))
    verdict = parity_report.verdict(run(settings, parallel=1))
    against = {each["against"] for each in verdict["differences"]}
    assert not verdict["passed"] and "plain, batch 8" in against
    assert any("repeated" in (each["note"] or "") for each in verdict["differences"])


def test_without_branches_taken_nothing_is_proven(engine):
    engine.off_spine = 0
    verdict = parity_report.verdict(run())
    assert not verdict["passed"] and "nothing is shown about branches" in verdict["reasons"][0]


@pytest.mark.parametrize("mode", ["plain", "chain", "tree"])
def test_an_engine_that_fails_ends_the_run_and_closes_the_others(engine, mode):
    engine.broken = mode
    with pytest.raises(DecoderError, match="out of memory"):
        run()
    assert sorted(engine.started) == sorted(engine.closed)


def test_the_report_is_json_and_tells_modes_apart(engine):
    settings = replace(SMALL, sweep=True)
    report = parity_report.build(run(settings), settings, {"recipe": "pair"})
    assert json.loads(json.dumps(report)) == report or report["settings"]["budgets"]
    assert report["passed"] is True, report["parity"]
    assert report["recipe"] == "pair"
    trees = [each for each in report["runs"] if each["mode"] == "tree" and each["kind"] == "main"]
    assert {each["budget"] for each in trees} == {15, 31}
    assert all(each["tokens_per_step"] == 1.0 and set(each["tokens_per_step_by_category"]) for each in trees)
    assert all(row["mean"] == 1.0 for row in report["ratios"])
    assert {row["kind"] for row in report["ratios"]} == {"main", "single", "sweep"}
    shown = parity_report.table(report)
    assert shown.splitlines()[-1] == "passed" and "tree B=31 branch, T=1, batch 8" in shown
