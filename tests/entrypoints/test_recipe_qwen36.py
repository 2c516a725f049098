# SPDX-License-Identifier: Apache-2.0
"""The default recipe on a machine that has neither its GPU nor its models: the exact command for a Spark."""

import json
import sys

import pytest

CHAIN = {"method": "dflash", "model": "/models/dflash-drafter", "num_speculative_tokens": 15}
KEPT = [
    ("--quantization", "modelopt"),
    ("--kv-cache-dtype", "auto"),
    ("--attention-backend", "flash_attn"),
    ("--reasoning-parser", "qwen3"),
    ("--tool-call-parser", "qwen3_coder"),
    ("--generation-config", "vllm"),
    ("--mm-shm-cache-max-object-size-mb", "256"),
    ("--model", "/models/aeon-xs"),
    ("--worker-cls", "aeon_ddtree.engine.worker.GPUWorker"),
]


class Plan:
    def __init__(self, outcome):
        assert outcome.code == 0, outcome.err
        content = json.loads(outcome.out)
        self.argv, self.env, self.mode, self.err = content["argv"], content["env"], content["mode"], outcome.err

    def __getitem__(self, flag):
        assert self.argv.count(flag) == 1, (flag, self.argv)
        return self.argv[self.argv.index(flag) + 1]

    def size(self):
        return tuple(self[f] for f in ("--max-model-len", "--max-num-seqs", "--gpu-memory-utilization"))

    def options(self):
        return json.loads(self["--additional-config"])["ddtree"]


@pytest.fixture
def plan(dispatch, monkeypatch):
    monkeypatch.delenv("DDTREE_RECIPE", raising=False)
    return lambda *arguments: Plan(dispatch(*arguments, "--dry-run"))


def test_ddtree_by_default(plan):
    made = plan("ddtree")
    assert made.argv[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert made.size() == ("2048", "1", "0.65")
    assert made["--max-num-batched-tokens"] == "2048" and made["--port"] == "8000"
    assert "--no-enable-prefix-caching" in made.argv and "--enable-auto-tool-choice" in made.argv
    for flag, value in KEPT:
        assert made[flag] == value
    assert json.loads(made["--speculative-config"]) == CHAIN
    flat = {"mode": "tree", "commit": "flat", "budget": 15, "topology": "root_leaves", "root_leaves": 4, "top_k": 8}
    assert made.options() == flat
    assert made.env.items() >= {
        "VLLM_NVFP4_GEMM_BACKEND": "flashinfer-cutlass", "VLLM_TEST_FORCE_FP8_MARLIN": "0", "ENABLE_NVFP4_SM100": "0",
    }.items()  # fmt: skip
    assert "recipe qwen36-27b-xs" in made.err and "commit policy flat" in made.err
    assert made.err.count("/models/aeon-xs") == 1 and "a real start would stop here" in made.err


@pytest.mark.parametrize("mode", ["dflash", "baseline", "ddtree"])
@pytest.mark.parametrize("by", ["flag", "PROFILE", "DDTREE_PROFILE"])
@pytest.mark.parametrize(
    ("profile", "size"),
    [
        ("production", ("200000", "16", "0.85")),
        ("gateway", ("256000", "64", "0.75")),
        ("benchmark", ("2048", "256", "0.85")),
    ],
)
def test_profiles(plan, monkeypatch, mode, by, profile, size):
    if by != "flag":
        monkeypatch.setenv(by, profile)
    made = plan(mode, *(["--profile", profile] if by == "flag" else []))
    assert made.size() == size
    assert f"profile {profile}" in made.err


def test_chain_and_plain_take_production_by_themselves(plan):
    made = plan("dflash")
    assert made.size() == ("200000", "16", "0.85")
    assert json.loads(made["--speculative-config"]) == CHAIN and made.options() == {"mode": "chain"}
    plain = plan("baseline")
    assert plain.size() == made.size() and "--speculative-config" not in plain.argv


def test_research_commits_branches(plan, monkeypatch):
    monkeypatch.setenv("DDTREE_UNSAFE_FULL_BRANCH_RESEARCH", "1")
    made = plan("ddtree-full")
    assert made.mode == "unsafe-full-branch" and made.size() == ("2048", "1", "0.65")
    assert made.options() == {"mode": "tree", "budget": 31, "top_k": 8, "commit": "branch"}
    assert json.loads(made["--speculative-config"])["num_speculative_tokens"] == 31


def test_a_profile_stands_between_environment_and_recipe(plan, dispatch, monkeypatch):
    monkeypatch.setenv("MAX_NUM_SEQS", "5")
    made = plan("ddtree", "--profile", "gateway", "--gpu-memory-utilization", "0.5")
    assert made.size() == ("256000", "5", "0.5")
    table = json.loads(dispatch("show", "--resolved", "--profile", "gateway", "--json").out)
    assert table["settings"]["max_model_len"]["origin"] == "profile gateway (command line --profile)"
    assert table["settings"]["max_num_seqs"] == {"value": 5, "origin": "environment MAX_NUM_SEQS"}
    assert table["settings"]["port"] == {"value": 8000, "origin": "recipe qwen36-27b-xs"}
    assert table["recipe"]["profile"]["value"] == "gateway"


def test_an_unknown_profile_names_the_nearest(dispatch, monkeypatch):
    monkeypatch.setenv("PROFILE", "producton")
    outcome = dispatch("dflash", "--dry-run")
    assert outcome.code == 2
    assert all(
        part in outcome.err for part in ("PROFILE", "did you mean production?", "production, gateway, benchmark")
    )


def test_the_budget_can_be_raised_alone(plan):
    assert plan("ddtree", "--budget", "31").options()["budget"] == 31
    assert plan("ddtree", "--budget", "7").options() == {"mode": "tree", "top_k": 8, "budget": 7, "commit": "flat"}


@pytest.mark.engine
@pytest.mark.parametrize("mode", ["ddtree", "dflash", "baseline"])
def test_vllm_takes_the_command(plan, mode):
    """vLLM's own parser, with nothing read from the models."""
    vllm_parser = pytest.importorskip("vllm.entrypoints.openai.cli_args")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    made = plan(mode)
    parsed = vllm_parser.make_arg_parser(FlexibleArgumentParser()).parse_args(made.argv[3:])
    assert parsed.model == "/models/aeon-xs" and parsed.max_model_len == int(made["--max-model-len"])
    assert parsed.additional_config["ddtree"] == made.options()
    assert parsed.enable_prefix_caching is False and parsed.tool_call_parser == "qwen3_coder"
    assert parsed.served_model_name == ["qwen36-27b-xs"]


@pytest.mark.engine
def test_the_flags_of_several_words_are_vllms(plan):
    from aeon_entrypoints.command import SEVERAL_WORDS

    vllm_parser = pytest.importorskip("vllm.entrypoints.openai.cli_args")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    actions = vllm_parser.make_arg_parser(FlexibleArgumentParser())._actions
    found = {flag for action in actions if action.nargs in ("+", "*") for flag in action.option_strings}
    assert found >= SEVERAL_WORDS, sorted(found)
    assert {flag for flag in found if flag.startswith("--")} - SEVERAL_WORDS == set()
