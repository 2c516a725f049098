# SPDX-License-Identifier: Apache-2.0
"""What a parity run decodes: balanced prompts, arrivals in the middle of others' decoding, every combination once."""

import json
from dataclasses import replace
from itertools import pairwise, product

import pytest

from aeon_ddtree.engine.options import DDTreeOptions
from aeon_ddtree.proving_ground.parity_plan import (
    ALONE,
    EngineKey,
    ParityError,
    Prompt,
    Settings,
    arrivals,
    cases_of,
    in_turns,
    load_prompts,
    seed_of,
    select,
    tree_options,
)

SETTINGS = Settings(
    prompts=20,
    single_prompts=6,
    max_tokens=16,
    budgets=(7, 15, 31, 63),
    commits=("flat", "branch"),
    temperatures=(0.0, 1.0),
    batches=(1, 8),
    horizon=15,
    options=DDTreeOptions().to_mapping(),
)
PROMPTS = [Prompt(f"{c}-{n}", c, f"{c} {n}") for c in ("coding", "math", "prose") for n in range(20)]


def test_every_combination_is_decoded_once():
    cases = cases_of(SETTINGS)
    for temperature, batch in product(SETTINGS.temperatures, SETTINGS.batches):
        here = [
            case for group in cases.values() for case in group if (case.temperature, case.batch) == (temperature, batch)
        ]
        assert len(here) == len({str(case) for case in here})
        assert sum(case.engine.mode == "plain" for case in here) == 1
        chains = [case.options["ranking"] for case in here if case.engine.mode == "chain"]
        assert chains == (["greedy"] if temperature == 0 else ["greedy", "coupled"])
        trees = [
            (case.engine.budget, case.options["commit"])
            for case in here
            if case.engine.mode == "tree" and case.options["topology"] == "best_first"
        ]
        assert sorted(trees) == sorted(product(SETTINGS.budgets, SETTINGS.commits))
    assert next(iter(cases)) == EngineKey("plain"), "the others wait for it"


def test_the_default_ranking_of_the_chain_stands_beside_greedy():
    settings = replace(SETTINGS, options=SETTINGS.options | {"ranking": "mixed", "tau": 0.7})
    chains = [case.options for case in cases_of(settings)[EngineKey("chain")] if case.temperature == 1]
    assert {(options["ranking"], options["tau"]) for options in chains} == {("greedy", 0.7), ("mixed", 0.7)}


@pytest.mark.parametrize("sweep", [False, True])
@pytest.mark.parametrize("spine", ["full", "none", 10])
def test_every_case_is_one_that_the_engine_accepts(sweep, spine):
    settings = replace(SETTINGS, sweep=sweep, options=SETTINGS.options | {"spine": spine})
    for key, cases in cases_of(settings).items():
        for case in cases:
            if key.mode != "plain":
                budget = {"budget": key.budget} if key.mode == "tree" else {}
                DDTreeOptions.from_mapping({"mode": key.mode, **budget, **case.options}).policy(settings.horizon)


def test_a_sweep_varies_one_engine_and_has_its_own_references():
    cases = [
        case for group in cases_of(replace(SETTINGS, sweep=True)).values() for case in group if case.kind == "sweep"
    ]
    assert {case.engine for case in cases} == {EngineKey("plain"), EngineKey("chain"), EngineKey("tree", 31)}
    assert len({(str(case)) for case in cases}) == len(cases)
    for name, values in {"spine": {"full", "none", 5, 10}, "ranking": {"greedy", "coupled", "mixed"}}.items():
        tried = [case for case in cases if case.engine.mode == "tree" and case.temperature == 1]
        assert {case.options[name] for case in tried} == values
    plain = {case.reference for case in cases if case.engine.mode == "plain"}
    assert {case.reference for case in cases} == plain


def test_a_spine_in_numbers_is_cut_to_the_budget():
    settings = replace(SETTINGS, options=SETTINGS.options | {"spine": 12})
    assert [tree_options(budget, settings)["spine"] for budget in (7, 31)] == [7, 12]


def test_prompts_take_turns_by_category():
    assert [prompt.id for prompt in in_turns(PROMPTS)[:4]] == ["coding-0", "math-0", "prose-0", "coding-1"]
    assert sorted(prompt.id for prompt in in_turns(PROMPTS)) == sorted(prompt.id for prompt in PROMPTS)


def test_defaults_are_not_chosen_on_the_prompts_they_are_measured_with():
    chosen = select(PROMPTS, SETTINGS)
    assert [len(chosen[kind]) for kind in ("main", "single", "sweep")] == [20, 6, 40]
    assert not set(chosen["sweep"]) & set(chosen["main"])
    assert set(chosen["single"]) <= set(chosen["main"])
    few = select(PROMPTS, replace(SETTINGS, prompts=50))
    assert set(few["sweep"]) <= set(few["main"])


@pytest.mark.parametrize("count", [0, 61])
def test_more_prompts_than_there_are_is_refused(count):
    with pytest.raises(ParityError, match=r"--prompts \d+: expected 1 to 60.*give fewer"):
        select(PROMPTS, replace(SETTINGS, prompts=count))


def test_arrivals_join_others_and_are_repeatable():
    steps = arrivals(200, 8, seed=3)
    assert steps == arrivals(200, 8, seed=3) != arrivals(200, 8, seed=4)
    assert steps == sorted(steps) and len(set(steps)) > 100
    assert max(b - a for a, b in pairwise(steps)) == 2
    assert arrivals(3, 1, seed=0) == [0, ALONE, 2 * ALONE]


def test_a_prompt_has_one_seed_in_every_mode():
    seeds = [seed_of(prompt, SETTINGS) for prompt in PROMPTS]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 1 << 63 for seed in seeds)
    assert seeds == [seed_of(prompt, replace(SETTINGS, budgets=(3,))) for prompt in PROMPTS]
    assert seeds != [seed_of(prompt, replace(SETTINGS, seed=1)) for prompt in PROMPTS]


def test_a_prompts_file_is_read_or_refused_by_line(tmp_path):
    file = tmp_path / "prompts.jsonl"
    good = {"id": "a", "category": "math", "prompt": "1 + 1 ="}
    file.write_text(json.dumps(good) + "\n")
    assert load_prompts(file) == [Prompt("a", "math", "1 + 1 =")]
    tied = {"id": "b", "category": "math", "prompt": "2 + 2 =", "tied": "two logits are equal"}
    file.write_text(json.dumps(good) + "\n" + json.dumps(tied) + "\n")
    assert [p.tied for p in load_prompts(file)] == ["", "two logits are equal"]
    kept = select(load_prompts(file), replace(SETTINGS, prompts=1, single_prompts=1))
    assert all([p.id for p in chosen] == ["a"] for chosen in kept.values())
    with pytest.raises(ParityError, match="expected 1 to 1"):
        select(load_prompts(file), replace(SETTINGS, prompts=2, single_prompts=1))
    file.write_text(json.dumps(good) + "\n{}\n")
    with pytest.raises(ParityError, match="line 2"):
        load_prompts(file)
    file.write_text((json.dumps(good) + "\n") * 2)
    with pytest.raises(ParityError, match="twice"):
        load_prompts(file)
    with pytest.raises(ParityError, match="cannot be read"):
        load_prompts(tmp_path / "none.jsonl")
