# SPDX-License-Identifier: Apache-2.0
"""Variables: our own, those that are usual with images for this hardware, and those that are refused by name."""

import json
from pathlib import Path

import pytest

from aeon_ddtree.kernels import dispatch as dispatch_
from aeon_entrypoints import settings, variables
from aeon_entrypoints.recipe import load_recipe
from aeon_entrypoints.resolve import Value, resolve
from aeon_entrypoints.variables import RETIRED, USUAL, USUAL_FLAGS, USUAL_SWITCHES


@pytest.fixture
def environ(monkeypatch):
    """Sets variables for the dispatcher called in this process."""

    def set_all(**variables_):
        for name, value in variables_.items():
            monkeypatch.setenv(name, value)

    return set_all


def refused(outcome, *parts):
    assert outcome.code == 2 and outcome.started is None
    assert len(outcome.err.strip().splitlines()) == 1, outcome.err
    for part in parts:
        assert part in outcome.err, outcome.err


HONOURED = [
    ("MAX_MODEL_LEN", "4096", "--max-model-len", "4096"),
    ("MAX_NUM_SEQS", "3", "--max-num-seqs", "3"),
    ("MAX_NUM_BATCHED_TOKENS", "1024", "--max-num-batched-tokens", "1024"),
    ("TENSOR_PARALLEL_SIZE", "1", "--tensor-parallel-size", "1"),
    ("SERVED_MODEL_NAME", "mine", "--served-model-name", "mine"),
    ("DTYPE", "float32", "--dtype", "float32"),
    ("KV_CACHE_DTYPE", "auto", "--kv-cache-dtype", "auto"),
    ("REASONING_PARSER", "qwen3", "--reasoning-parser", "qwen3"),
    ("LIMIT_MM_PER_PROMPT", '{"image": 4}', "--limit-mm-per-prompt", '{"image": 4}'),
]


@pytest.mark.parametrize(("variable", "value", "flag", "expected"), HONOURED, ids=[row[0] for row in HONOURED])
def test_usual_variables_reach_the_server(pair, dispatch, environ, variable, value, flag, expected):
    environ(**{variable: value})
    assert dispatch("ddtree", "--recipe", pair.recipe_file()).flag(flag) == expected


def test_every_usual_variable_leads_to_a_setting(pair):
    assert set(USUAL.values()) <= set(settings.BY_NAME)
    assert not set(USUAL) & set(USUAL_FLAGS) and not set(USUAL) & set(RETIRED)
    taken = {setting.vllm_flag for setting in settings.SERVER} | {"--enable-prefix-caching"}
    assert not taken & {*USUAL_FLAGS.values(), *USUAL_SWITCHES.values()}


def test_models_by_variable(pair, dispatch, environ):
    for name in ("target", "drafter"):
        (pair.root / name).rename(pair.root / f"other-{name}")
    environ(MODEL_PATH=str(pair.root / "other-target"), DFLASH_DRAFTER=str(pair.root / "other-drafter"))
    outcome = dispatch("ddtree", "--recipe", pair.recipe_file())
    assert outcome.flag("--model").endswith("other-target")
    assert json.loads(outcome.flag("--speculative-config"))["model"].endswith("other-drafter")
    environ(DFLASH_DRAFTER="off")
    refused(dispatch("ddtree", "--recipe", pair.recipe_file()), "DFLASH_DRAFTER", "mode baseline")


def test_our_own_name_wins_and_the_command_line_before_it(pair):
    file = pair.recipe_file()

    def length(environ, **given):
        return resolve("ddtree", load_recipe(file), file, given, environ, []).settings["max_model_len"]

    both = {"MAX_MODEL_LEN": "11", "DDTREE_MAX_MODEL_LEN": "22"}
    assert length(both) == Value(22, "environment DDTREE_MAX_MODEL_LEN")
    assert length({"MAX_MODEL_LEN": "11"}) == Value(11, "environment MAX_MODEL_LEN")
    assert length(both, max_model_len="33") == Value(33, "command line --max-model-len")


def test_drafted_tokens(pair, dispatch, environ):
    """For a chain its length; for a tree it can only repeat what the drafter predicts."""
    environ(NUM_SPECULATIVE_TOKENS="10")
    outcome = dispatch("dflash", "--recipe", pair.recipe_file())
    assert json.loads(outcome.flag("--speculative-config"))["num_speculative_tokens"] == 10
    refused(dispatch("ddtree", "--recipe", pair.recipe_file()), "NUM_SPECULATIVE_TOKENS", "10", "15", "DDTREE_BUDGET")
    environ(NUM_SPECULATIVE_TOKENS="15")
    outcome = dispatch("ddtree", "--recipe", pair.recipe_file())
    assert json.loads(outcome.flag("--speculative-config"))["num_speculative_tokens"] == 31  # the recipe's budget
    environ(NUM_SPECULATIVE_TOKENS="99")
    assert dispatch("baseline", "--recipe", pair.recipe_file()).started is not None


METHODS = [
    ("dflash", "dflash", None),
    ("dflash", "ddtree", "mode dflash"),
    ("dflash_ddtree", "ddtree", None),
    ("dflash_ddtree", "dflash", "mode ddtree"),
    ("none", "baseline", None),
    ("none", "ddtree", "mode baseline"),
    ("eagle3", "ddtree", "expected one of dflash, dflash_ddtree"),
    ("dflahs", "dflash", "did you mean dflash?"),
]


@pytest.mark.parametrize(("method", "mode", "part"), METHODS)
def test_method(pair, dispatch, environ, method, mode, part):
    environ(SPEC_METHOD=method)
    outcome = dispatch(mode, "--recipe", pair.recipe_file())
    if part is None:
        assert outcome.started is not None, outcome.err
    else:
        refused(outcome, "SPEC_METHOD", method, part)


def test_switches(pair, dispatch, environ):
    pair.recipe["vllm"] = {"enforce-eager": True, "quantization": "modelopt"}
    environ(ENFORCE_EAGER="0", QUANTIZATION="none", ENABLE_AUTO_TOOL_CHOICE="1", ENABLE_PREFIX_CACHING="0")
    started = dispatch("baseline", "--recipe", pair.recipe_file()).started
    assert "--no-enforce-eager" in started and "--enforce-eager" not in started
    assert "--quantization" not in started
    assert "--enable-auto-tool-choice" in started and "--no-enable-prefix-caching" in started
    environ(ENFORCE_EAGER="perhaps")
    refused(dispatch("baseline", "--recipe", pair.recipe_file()), "ENFORCE_EAGER", "perhaps", "1 or 0")


def test_prefix_caching_is_refused_by_name(pair, dispatch, environ):
    environ(ENABLE_PREFIX_CACHING="1")
    refused(dispatch("dflash", "--recipe", pair.recipe_file()), "ENABLE_PREFIX_CACHING", "not proven lossless")


def test_extra_arguments_come_last_before_those_of_the_command_line(pair, dispatch, environ):
    environ(EXTRA_VLLM_ARGS="""--chat-template "a b'c" --seed 7""")
    outcome = dispatch("ddtree", "--recipe", pair.recipe_file(), "--", "--seed", "8")
    assert outcome.started[-6:] == ["--chat-template", "a b'c", "--seed", "7", "--seed", "8"]
    assert "--seed is given 2 times" in outcome.err
    environ(EXTRA_VLLM_ARGS="--speculative-config {}")
    refused(dispatch("ddtree", "--recipe", pair.recipe_file()), "--speculative-config", "EXTRA_VLLM_ARGS")
    environ(EXTRA_VLLM_ARGS="--chat-template 'a")
    refused(dispatch("ddtree", "--recipe", pair.recipe_file()), "EXTRA_VLLM_ARGS", "close the quotes")


@pytest.mark.parametrize("variable", sorted(RETIRED))
def test_retired_variables_are_refused_with_what_replaces_them(pair, dispatch, environ, variable):
    environ(**{variable: "1"})
    refused(dispatch("ddtree", "--recipe", pair.recipe_file(), "--dry-run"), variable, RETIRED[variable])


def test_a_foreign_switch_that_is_off_does_no_harm(pair, dispatch, environ):
    environ(ENABLE_TURBOQUANT="0", TQ_MODE="off")
    assert dispatch("ddtree", "--recipe", pair.recipe_file()).started is not None


@pytest.mark.parametrize(
    ("variable", "near"),
    [("DDTREE_BUGDET", "DDTREE_BUDGET"), ("DDTREE_TOPK", "DDTREE_TOP_K"), ("DDTREE_PROFIL", "DDTREE_PROFILE")],
)
def test_unknown_variables_name_the_nearest(pair, dispatch, environ, variable, near):
    environ(**{variable: "1"})
    for arguments in (["ddtree", "--recipe", pair.recipe_file(), "--dry-run"], ["show", "--resolved"]):
        refused(dispatch(*arguments), variable, f"did you mean {near}?")


def test_vllm_port_is_not_ours(pair, dispatch, environ):
    environ(VLLM_PORT="9", PORT="0")
    outcome = dispatch("baseline", "--recipe", pair.recipe_file())
    assert outcome.flag("--port") == "0"
    assert "VLLM_PORT" in outcome.err


def test_names_of_one_value_that_differ_are_noted(pair, dispatch, environ):
    environ(MODEL_PATH=str(pair.target), MODEL_ID="org/other", TENSOR_PARALLEL="1", TENSOR_PARALLEL_SIZE="1")
    outcome = dispatch("baseline", "--recipe", pair.recipe_file())
    assert outcome.flag("--model") == str(pair.target)
    assert "MODEL_PATH and MODEL_ID differ; MODEL_PATH is used" in outcome.err and "TENSOR_PARALLEL" not in outcome.err


RANGES = [
    ("max_num_seqs", "0"), ("max_num_seqs", "-3"), ("max_num_seqs", "2.5"), ("max_model_len", "0"),
    ("max_num_batched_tokens", "0"), ("port", "-1"), ("port", "65536"), ("port", "0x50"), ("tensor_parallel", "0"),
    ("gpu_memory_utilization", "0"), ("gpu_memory_utilization", "1.1"), ("gpu_memory_utilization", "-0.5"),
    ("gpu_memory_utilization", "nan"), ("gpu_memory_utilization", "inf"), ("gpu_memory_utilization", "85%"),
    ("horizon", "0"), ("budget", "128"), ("top_k", "0"), ("root_leaves", "-1"), ("tau", "0"), ("mix", "2"),
    ("softness", "0"), ("ready_timeout", "-1"), ("stall_after", "soon"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), RANGES)
@pytest.mark.parametrize("origin", ["command line", "own variable", "usual variable"])
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["start", "dry-run"])
def test_ranges_hold_whatever_the_origin(pair, dispatch, environ, name, value, origin, dry):
    setting = settings.BY_NAME[name]
    arguments: list[str] = []
    if origin == "command line":
        arguments, place = [f"{setting.flag}={value}"], setting.flag
    else:
        usual = [variable for variable, goal in variables.USUAL.items() if goal == name]
        if origin == "usual variable" and not usual:
            pytest.skip("no usual variable")
        place = setting.variable if origin == "own variable" else usual[0]
        environ(**{place: value})
    mode = "dflash" if name == "horizon" else "ddtree"
    refused(dispatch(mode, "--recipe", pair.recipe_file(), *arguments, *dry), place, value, setting.what)


def test_every_flag_and_variable_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "dispatcher.md").read_text(encoding="utf-8")
    names = [setting.flag for setting in settings.BY_NAME.values()] + variables.usual_variables()
    assert [name for name in (*names, *variables.OTHER_VARIABLES) if f"`{name}" not in text] == []


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["start", "dry-run"])
def test_kernels_are_chosen_by_name(pair, dispatch, environ, dry):
    environ(DDTREE_KERNELS="refrence")
    outcome = dispatch("ddtree", "--recipe", pair.recipe_file(), *dry)
    refused(outcome, "environment: DDTREE_KERNELS is 'refrence'", "reference or triton", "did you mean reference?")
    environ(DDTREE_KERNELS="reference")
    assert dispatch("ddtree", "--recipe", pair.recipe_file(), *dry).code == 0


def test_the_choices_are_the_kernels_own():
    assert {dispatch_.VARIABLE: dispatch_.CHOICES} == variables.CHOICES
