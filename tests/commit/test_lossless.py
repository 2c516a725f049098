# SPDX-License-Identifier: Apache-2.0
"""The whole step on a tabular target: the tree says token for token what plain decoding says."""

import random
from dataclasses import replace

import pytest
import sampling_oracles as sampler
from hypothesis import given, settings
from hypothesis import strategies as st
from tabular import Tabular, decode

from aeon_ddtree.tree import TreePolicy
from aeon_ddtree.verify import RequestParams

VOCAB, HORIZON, LENGTH = 11, 7, 20

POLICIES = {
    "full spine": {},
    "no spine": {"spine": 0},
    "short spine": {"spine": 1},
    "root leaves": {"topology": "root_leaves"},
}


def policy_of(shape: str, budget: int, horizon: int = HORIZON, **extra) -> TreePolicy:
    options = dict(POLICIES[shape])
    if shape == "root leaves":
        leaves = max(min(3, budget - 1), budget - horizon)
        if not 1 <= leaves < budget:
            options = {}  # one node cannot be spine and leaf
        else:
            options["root_leaves"] = leaves
    if options.get("spine") is not None:
        options["spine"] = min(options["spine"], budget)
    top_k = max(6, options.get("root_leaves", 0) + 1)
    return TreePolicy(horizon=horizon, budget=budget, top_k=top_k, **options, **extra)


def requests_of(seed: int, temperature: float | None, count: int = 4, plain: bool = False) -> list[RequestParams]:
    rng = random.Random(seed)
    params = []
    for _ in range(count):
        p = sampler.random_params(rng, VOCAB, [rng.randrange(VOCAB) for _ in range(4)], temperature)
        if plain:
            p = RequestParams(temperature=p.temperature, seed=p.seed)
        # Bad words of earlier outputs do recur in a vocabulary of 11; min_tokens ends inside the text.
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 6))]
        params.append(replace(p, prompt_ids=prompt, output_ids=(), min_tokens=min(p.min_tokens, LENGTH)))
    return params


def check_equal(model, params, policy, commit, **extra):
    plain = decode(model, params, LENGTH, None)
    tree = decode(model, params, LENGTH, policy, commit, **extra)
    for r in range(len(params)):
        assert tree.outputs[r][:LENGTH] == plain.outputs[r][:LENGTH], params[r]
    return tree


@pytest.mark.parametrize("commit", ["branch", "flat"])
@pytest.mark.parametrize("shape", POLICIES)
@settings(max_examples=9, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    budget=st.sampled_from([1, 4, 15, 31]),
    temperature=st.sampled_from([0.0, 1.0, None]),
    ranking=st.sampled_from(["greedy", "coupled", "mixed"]),
    shrink=st.booleans(),
    persistent=st.booleans(),
)
def test_tree_equals_plain(shape, commit, seed, budget, temperature, ranking, shrink, persistent):
    # At budget 31 root leaves need a horizon that holds the spine.
    horizon = 24 if shape == "root leaves" and budget == 31 else HORIZON
    policy = policy_of(shape, budget, horizon, ranking=ranking)
    requests = requests_of(seed, temperature)
    check_equal(Tabular(VOCAB, seed), requests, policy, commit, shrink=shrink, persistent=persistent)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("commit", ["branch", "flat"])
@pytest.mark.parametrize("budget", [1, 4, 15, 31])
def test_full_spine_is_never_behind_the_chain(budget, commit, temperature):
    params = requests_of(budget, temperature, count=8, plain=True)
    tree = check_equal(Tabular(VOCAB, 5), params, policy_of("full spine", budget), commit, beside_chain=True)
    steps = [step for step in tree.steps if step.chain is not None]
    assert len(steps) == len(tree.steps) - 1  # all but the prompt's own token
    for step in steps:
        assert (step.plan.num_emitted >= step.chain.num_emitted).all()
        if commit == "flat":  # a chain, token for token: only what is carried differs
            assert (step.plan.num_emitted <= step.chain.num_emitted + 1).all()
    # The case is worth something: some drafts were accepted, and some tokens were found off the spine.
    assert sum(int(step.chain.num_accepted.sum()) for step in steps) > 10
    if budget > HORIZON:
        off_spine = sum(int(step.plan.moves.sum() + step.plan.num_carried.sum()) for step in tree.steps)
        assert off_spine > 5


def test_carried_tokens_are_accepted_by_the_next_step():
    tree = check_equal(Tabular(VOCAB, 6), requests_of(1, 1.0, count=8), policy_of("no spine", 31), "flat")
    seen = 0
    for step, following in zip(tree.steps, tree.steps[1:]):
        expected = step.plan.num_carried.clamp(max=HORIZON)
        assert (following.plan.num_accepted >= expected).all()
        seen += int(expected.sum())
    assert seen > 10


def test_token_0_as_target_and_padding():
    # The target always says 0; trees are small, windows wide, so padding of token 0 stands everywhere.
    model = Tabular(VOCAB, 0)
    model.target[:, :, 0] += 50
    params = [RequestParams(prompt_ids=[3, 4]), RequestParams(prompt_ids=[0, 0], temperature=1.0, seed=9)]
    tree = check_equal(model, params, policy_of("no spine", 15), "branch", shrink=True)
    assert all(token == 0 for out in tree.outputs for token in out)


def test_a_stop_token_inside_the_path_is_cut_there():
    model, stop = Tabular(VOCAB, 12, disturb=0.2), 3
    params = requests_of(2, 0.0, count=8, plain=True)
    plain = decode(model, params, LENGTH, None)
    tree = decode(model, params, LENGTH, policy_of("full spine", 15))
    cuts = 0
    for step in tree.steps:
        is_stop = step.plan.emitted == stop
        first = is_stop.int().argmax(dim=1) + 1
        cut = step.plan.cut(first.where(is_stop.any(1), step.plan.num_emitted))
        for r in range(len(params)):
            if is_stop[r].any():
                assert cut.bonus[r] == stop
                assert cut.num_accepted[r] == first[r] - 1
                cuts += int(first[r] < step.plan.num_emitted[r])
    assert cuts > 0
    assert [o[:LENGTH] for o in tree.outputs] == [o[:LENGTH] for o in plain.outputs]
