# SPDX-License-Identifier: Apache-2.0
"""Command line > environment > recipe > default, each value's origin; the commit policy; the resulting command."""

import dataclasses
import json
import sys

import pytest

from aeon_ddtree.engine.options import DDTreeOptions
from aeon_entrypoints import references, settings
from aeon_entrypoints.recipe import OWN_FLAGS, Defaults, load_recipe
from aeon_entrypoints.resolve import Value, resolve

UNSAFE = "DDTREE_UNSAFE_FULL_BRANCH_RESEARCH"


def resolved(pair, mode="ddtree", command_line=None, environ=None, extra=()):
    file = pair.recipe_file()
    return resolve(mode, load_recipe(file), file, command_line or {}, environ or {}, list(extra))


def test_precedence_layer_by_layer(pair):
    pair.recipe["defaults"] = {"device": "cpu"}
    assert resolved(pair).settings["port"] == Value(8000, "default")
    pair.recipe["defaults"]["port"] = 1001
    assert resolved(pair).settings["port"] == Value(1001, "recipe pair")
    pair.recipe["modes"]["ddtree"]["defaults"] = {"port": 1002}
    assert resolved(pair).settings["port"] == Value(1002, "recipe pair: modes.ddtree.defaults")
    assert resolved(pair, mode="dflash").settings["port"] == Value(1001, "recipe pair")
    environ = {"DDTREE_PORT": "1003"}
    assert resolved(pair, environ=environ).settings["port"] == Value(1003, "environment DDTREE_PORT")
    given_port = resolved(pair, command_line={"port": "1004", "host": None}, environ=environ).settings["port"]
    assert given_port == Value(1004, "command line --port")
    assert resolved(pair, environ={"DDTREE_PORT": "", "VLLM_PORT": "5"}).settings["port"].value == 1002


def test_tree_options_take_the_same_way(pair):
    assert resolved(pair).options["budget"] == Value(31, "recipe pair: modes.ddtree.ddtree")
    assert resolved(pair, environ={"DDTREE_BUDGET": "7"}).options["budget"] == Value(7, "environment DDTREE_BUDGET")
    both = resolved(pair, command_line={"budget": "9"}, environ={"DDTREE_BUDGET": "7"})
    assert both.options["budget"] == Value(9, "command line --budget")


def test_tables_agree_with_the_engine_and_the_schema():
    options = {field.name for field in dataclasses.fields(DDTreeOptions)}
    assert set(settings.TREE_BY_NAME) == options - {"mode"}
    assert set(Defaults.model_fields) == set(settings.SERVER_BY_NAME) - set(settings.REFERENCES)
    own = {setting.vllm_flag[2:] for setting in settings.SERVER if setting.vllm_flag}
    assert own & set(OWN_FLAGS) == {"model"}


def test_flat_until_promoted(pair, dispatch):
    pair.recipe["modes"]["ddtree"]["ddtree"] = {"budget": 31, "commit": "branch"}
    outcome = dispatch("ddtree", "--recipe", pair.recipe_file())
    assert outcome.options()["commit"] == "flat"
    assert "no parity report" in outcome.err
    pair.promote()
    outcome = dispatch("ddtree", "--recipe", pair.recipe_file())
    assert outcome.options()["commit"] == "branch"
    assert "promoted by report.json" in outcome.err
    assert dispatch("ddtree", "--recipe", pair.recipe_file(), "--commit", "flat").options()["commit"] == "flat"


@pytest.mark.parametrize(
    "spoilt",
    [
        {"passed": False},
        {"passed": "yes"},
        {"passed": None},
        {"recipe": "another"},
        {"pair": {"model": "other", "drafter": "other"}},
        {"pair": None},
        {"settings": {"commits": ["flat"]}},
        {"settings": None},
        {"dtype": "bfloat16"},
        {"kind": "sweep"},
    ],
)
def test_a_report_that_does_not_promote(pair, dispatch, spoilt):
    pair.promote(**spoilt)
    assert dispatch("ddtree", "--recipe", pair.recipe_file()).options()["commit"] == "flat"


@pytest.mark.parametrize(
    "damage", [lambda file: file.unlink(), lambda file: file.write_text("{"), lambda file: file.write_text("[]")]
)
def test_a_report_that_is_gone_or_broken(pair, dispatch, damage):
    pair.promote()
    damage(pair.root / "report.json")
    assert dispatch("ddtree", "--recipe", pair.recipe_file()).options()["commit"] == "flat"


@pytest.mark.parametrize("field", ["model", "drafter"])
def test_another_pair_is_not_promoted_by_the_recipes_report(pair, dispatch, field):
    pair.promote()
    other = pair.root / "other"
    (pair.root / ("target" if field == "model" else "drafter")).rename(other)
    outcome = dispatch("ddtree", "--recipe", pair.recipe_file(), f"--{field}", other)
    assert outcome.options()["commit"] == "flat"
    assert "the recipe's own pair" in outcome.err


def test_unsafe_full_branch(pair, dispatch, monkeypatch):
    monkeypatch.setenv(UNSAFE, "1")
    for name in ("unsafe-full-branch", "ddtree-full"):
        outcome = dispatch(name, "--recipe", pair.recipe_file())
        assert outcome.options() == {"mode": "tree", "budget": 31, "top_k": 8, "commit": "branch"}


def test_defaults_of_an_unpromoted_pair_are_the_conservative_tree(pair, dispatch):
    del pair.recipe["modes"]["ddtree"]["ddtree"]
    outcome = dispatch("ddtree", "--recipe", pair.recipe_file())
    expected = {"mode": "tree", "budget": 15, "topology": "root_leaves", "root_leaves": 4, "top_k": 8, "commit": "flat"}
    assert outcome.options() == expected


def test_command_of_each_mode(pair, dispatch, monkeypatch):
    monkeypatch.setenv(UNSAFE, "1")
    file = pair.recipe_file()
    speculation = {"method": "dflash", "model": str(pair.drafter)}
    expected = {
        "baseline": ("plain", None),
        "dflash": ("chain", speculation | {"num_speculative_tokens": 15}),
        "ddtree": ("tree", speculation | {"num_speculative_tokens": 31}),
        "unsafe-full-branch": ("tree", speculation | {"num_speculative_tokens": 31}),
    }
    for mode, (engine_mode, spec) in expected.items():
        outcome = dispatch(mode, "--recipe", file)
        assert outcome.started[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        assert outcome.options()["mode"] == engine_mode
        assert outcome.flag("--model") == str(pair.target)
        assert outcome.flag("--worker-cls") == "aeon_ddtree.engine.worker.CPUWorker"
        assert outcome.flag("--generation-config") == "vllm"
        assert "--no-enable-prefix-caching" in outcome.started
        assert "--language-model-only" not in outcome.started
        if spec is None:
            assert "--speculative-config" not in outcome.started
        else:
            assert json.loads(outcome.flag("--speculative-config")) == spec


def test_method_name_dflash_ddtree_means_dflash(pair, dispatch):
    pair.recipe["modes"]["ddtree"]["method"] = "dflash_ddtree"
    outcome = dispatch("ddtree", "--recipe", pair.recipe_file())
    assert json.loads(outcome.flag("--speculative-config"))["method"] == "dflash"


def test_horizon_and_chain_options(pair, dispatch):
    outcome = dispatch(
        "dflash", "--recipe", pair.recipe_file(), "--horizon", "7", "--ranking", "coupled", "--tau", "0.7"
    )
    assert json.loads(outcome.flag("--speculative-config"))["num_speculative_tokens"] == 7
    # A chain shorter than the horizon is a tree without alternatives: the engine's own chain is as long as the horizon.
    shorter = {"mode": "tree", "budget": 7, "top_k": 1, "commit": "flat"}
    assert outcome.options() == shorter | {"ranking": "coupled", "tau": 0.7}
    assert DDTreeOptions.from_mapping(outcome.options()).num_speculative_tokens(15) == 7
    assert dispatch("dflash", "--recipe", pair.recipe_file(), "--horizon", "15").options() == {"mode": "chain"}


def test_cuda_has_its_own_worker_and_memory_share(pair, dispatch):
    arguments = ["ddtree", "--recipe", pair.recipe_file(), "--gpu-memory-utilization", "0.5"]
    argv = json.loads(dispatch(*arguments, "--device", "cuda", "--dry-run").out)["argv"]
    assert argv[argv.index("--worker-cls") + 1] == "aeon_ddtree.engine.worker.GPUWorker"
    assert argv[argv.index("--gpu-memory-utilization") + 1] == "0.5"
    assert "--gpu-memory-utilization" not in dispatch(*arguments, "--device", "cpu").started


def test_hugging_face_ids_are_passed_on(pair, dispatch):
    pair.recipe |= {"model": "org/target", "model_revision": "abc", "drafter": "org/drafter", "drafter_revision": "def"}
    outcome = dispatch("ddtree", "--recipe", pair.recipe_file())
    assert (outcome.flag("--model"), outcome.flag("--revision")) == ("org/target", "abc")
    assert json.loads(outcome.flag("--speculative-config"))["revision"] == "def"
    assert (
        dispatch("dflash", "--recipe", pair.recipe_file()).code == 2
    )  # the block size, hence the horizon, is not known yet


def test_arguments_after_the_dashes_come_last_and_replace(pair, dispatch):
    pair.recipe["vllm"] = {
        "seed": 1,
        "enforce_eager": True,
        "async-scheduling": False,
        "compilation-config": {"mode": 0},
    }
    extra = ["--seed", "7", "--chat-template", "a b'\"$x\n"]
    outcome = dispatch("ddtree", "--recipe", pair.recipe_file(), "--", *extra)
    assert outcome.started[-4:] == extra
    assert outcome.flag("--seed") == "7"
    assert "--seed is given after --" in outcome.err
    assert "--enforce-eager" in outcome.started and "--no-async-scheduling" in outcome.started
    assert json.loads(outcome.flag("--compilation-config")) == {"mode": 0}


def test_environment_of_the_server(pair, dispatch, monkeypatch):
    pair.recipe["env"] = {"FIRST_OF_PAIR": "recipe", "SECOND_OF_PAIR": "recipe"}
    monkeypatch.setenv("SECOND_OF_PAIR", "user")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    environ = dispatch("ddtree", "--recipe", pair.recipe_file()).environ
    assert (environ["FIRST_OF_PAIR"], environ["SECOND_OF_PAIR"]) == ("recipe", "user")
    assert environ["VLLM_PLUGINS"] == "other,aeon_ddtree"
    assert environ["PATH"]


def test_shipped_recipes_are_valid_and_their_promotions_hold(dispatch):
    assert "proving-ground" in references.recipe_names()
    for name in references.recipe_names():
        file = references.find_recipe(name)
        recipe = load_recipe(file)
        assert recipe.name == name
        assert dispatch("validate", name).code == 0
        mode = recipe.mode("ddtree")
        if mode is not None and mode.promoted_by is not None:
            policy = resolve("ddtree", recipe, file, {}, {}, []).options["commit"]
            assert policy == Value("branch", "recipe " + name + ": modes.ddtree.ddtree"), policy


def test_show_resolved_names_every_origin(pair, dispatch, monkeypatch):
    monkeypatch.setenv("DDTREE_BUDGET", "9")
    table = json.loads(dispatch("show", pair.recipe_file(), "--resolved", "--json").out)
    assert table["ddtree"]["budget"] == {"value": 9, "origin": "environment DDTREE_BUDGET"}
    assert table["settings"]["dtype"] == {"value": "auto", "origin": "default"}
    lines = dispatch("show", pair.recipe_file(), "--resolved").out.splitlines()
    assert any(line.split() == ["ddtree.budget", "9", "environment", "DDTREE_BUDGET"] for line in lines)
    assert json.loads(dispatch("show", pair.recipe_file(), "--json").out)["name"] == "pair"
