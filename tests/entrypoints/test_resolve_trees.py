# SPDX-License-Identifier: Apache-2.0
"""The tree nobody asked for in detail: always one that its drafter can grow; and where the models' revisions go."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aeon_ddtree.engine.options import DDTreeOptions, OptionsError
from aeon_entrypoints import references, tree_options
from aeon_entrypoints.recipe import load_recipe
from aeon_entrypoints.resolve import resolve
from aeon_entrypoints.values import Value


def filled(horizon, policy="flat", **given):
    found = {name: Value(value, "command line") for name, value in given.items()}
    made = tree_options.fill_in(found, Value(policy, "test"), horizon)
    return {"mode": "tree"} | {name: each.value for name, each in made.items()}


@pytest.mark.parametrize("horizon", range(1, 40))
@pytest.mark.parametrize("policy", ["flat", "branch"])
@pytest.mark.parametrize("top_k", [None, 1, 2, 3, 8])
def test_a_default_is_never_refused(horizon, policy, top_k):
    options = filled(horizon, policy, **({} if top_k is None else {"top_k": top_k}))
    made = DDTreeOptions.from_mapping(options).policy(horizon)
    assert made.horizon == horizon and made.budget <= 31
    if policy == "flat" and top_k is None:
        assert made.spine_nodes == min(11, horizon) and made.budget == made.spine_nodes + 4


@given(st.integers(1, 40), st.integers(1, 127), st.sampled_from(["flat", "branch"]))
def test_any_budget_alone_is_possible(horizon, budget, policy):
    options = filled(horizon, policy, budget=budget)
    made = DDTreeOptions.from_mapping(options).policy(horizon)
    assert made.budget == budget
    if policy == "flat":  # which commits along the spine alone
        assert made.spine_nodes >= min(budget, horizon, 11)


@given(st.integers(1, 40), st.integers(0, 40), st.sampled_from(["flat", "branch"]))
def test_a_spine_alone_is_possible_or_beyond_the_horizon(horizon, spine, policy):
    options = filled(horizon, policy, spine=spine)
    try:
        assert DDTreeOptions.from_mapping(options).policy(horizon).spine_nodes == spine
    except OptionsError:
        assert spine > min(horizon, options["budget"])


def test_the_number_of_the_default_gives_the_default():
    assert filled(15, budget=15) == filled(15) == filled(None)
    assert filled(15, root_leaves=3)["topology"] == "root_leaves"
    assert filled(15, topology="best_first").get("root_leaves") is None


def test_a_short_block_gets_a_tree_of_its_size(pair, dispatch):
    pair.configure("drafter", lambda config: config.update(block_size=8))
    pair.recipe["modes"]["ddtree"] = {}
    outcome = dispatch("ddtree", "--recipe", pair.recipe_file())
    assert outcome.options() == {
        "mode": "tree", "top_k": 8, "topology": "root_leaves", "root_leaves": 4, "budget": 11, "commit": "flat",
    }  # fmt: skip
    table = json.loads(dispatch("show", pair.recipe_file(), "--resolved", "--json").out)
    assert table["ddtree"]["budget"]["origin"] == "default, for a horizon of 7"


HUB = {"model": "org/target", "model_revision": "r1", "drafter": "org/drafter", "drafter_revision": "r2"}


def revisions(pair, **given):
    pair.recipe |= HUB
    file = pair.recipe_file()
    made = resolve("ddtree", load_recipe(file), file, given, {}, [])
    return (
        made.target,
        made.drafter,
        *(
            made.settings[name].value if name in made.settings else None
            for name in ("model_revision", "drafter_revision")
        ),
    )


def test_revisions_belong_to_their_reference(pair):
    assert revisions(pair) == ("org/target", "org/drafter", "r1", "r2")
    assert revisions(pair, model="org/other") == ("org/other", "org/drafter", None, "r2")
    assert revisions(pair, model="org/other@v3") == ("org/other", "org/drafter", "v3", "r2")
    assert revisions(pair, model="org/other", model_revision="v4") == ("org/other", "org/drafter", "v4", "r2")
    assert revisions(pair, drafter=str(pair.drafter)) == ("org/target", pair.drafter, "r1", None)


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("org/name@main", ("org/name", "main")),
        ("org/name@refs/pr/3", ("org/name", "refs/pr/3")),
        ("org/name", ("org/name", None)),
        ("org/name@", ("org/name@", None)),
        ("/models/at@home", ("/models/at@home", None)),
        ("package:a/b@c", ("package:a/b@c", None)),
    ],
)
def test_revision_in_a_reference(reference, expected):
    assert references.split_revision(reference) == expected


def test_the_cached_drafter_tells_its_horizon(pair, dispatch, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    pair.recipe |= HUB
    assert dispatch("dflash", "--recipe", pair.recipe_file(), "--dry-run").code == 2  # its block size is not known
    folder = tmp_path / "hf" / "hub" / "models--org--drafter"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "r2").write_text("c0ffee")
    (folder / "snapshots").mkdir()
    pair.drafter.rename(folder / "snapshots" / "c0ffee")
    argv = json.loads(dispatch("dflash", "--recipe", pair.recipe_file(), "--dry-run").out)["argv"]
    speculation = json.loads(argv[argv.index("--speculative-config") + 1])
    assert speculation == {"method": "dflash", "model": "org/drafter", "num_speculative_tokens": 15, "revision": "r2"}
