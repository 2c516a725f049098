# SPDX-License-Identifier: Apache-2.0
"""The committed JSON Schema of recipes: current, and of one mind with the dispatcher on good and bad recipes."""

import copy
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from aeon_ddtree.engine.options import COMMITS
from aeon_ddtree.tree.policy import RANKINGS
from aeon_ddtree.tree.topologies import TOPOLOGIES
from aeon_entrypoints import recipe, references, schema
from aeon_entrypoints.failure import Refusal

FILE = Path(__file__).parents[2] / "recipes" / "schema.json"


@pytest.fixture(scope="module")
def validator():
    content = json.loads(FILE.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(content)
    return jsonschema.Draft202012Validator(content)


def test_the_committed_schema_is_current():
    assert FILE.read_text(encoding="utf-8") == schema.text(), "run scripts/schema"


def test_its_words_are_the_engines():
    assert {"topology": sorted(TOPOLOGIES), "commit": list(COMMITS), "ranking": list(RANKINGS)} == schema.WORDS


@pytest.mark.parametrize("name", references.recipe_names())
def test_shipped_recipes_follow_it(validator, name):
    validator.validate(yaml.safe_load(references.find_recipe(name).read_text(encoding="utf-8")))


def at(*path, value):
    def change(content):
        for key in path[:-1]:
            content = content.setdefault(key, {})
        content[path[-1]] = value

    return change


GOOD = [
    at("profiles", "night", value={"max_num_seqs": 4, "gpu_memory_utilization": 1}),
    at("vllm", "limit-mm-per-prompt", value={"image": 4, "video": {"count": 1}}),
    at("vllm", "override_generation_config", value={"temperature": 0.5}),
    at("env", "VLLM_LOGGING_LEVEL", value="DEBUG"),
    at("env", "DDTREE_CHECK", value="1"),
    at("env", "DDTREE_KERNELS", value="reference"),
    at("sources", value={"model": "org/name@main", "drafter": "org/drafter"}),
    at("container", value="registry.example/image@sha256:0"),
    at("modes", "ddtree", value={"ddtree": {"spine": "auto", "budget": 127, "tau": 0.5}, "vllm": {"seed": 1}}),
    at("modes", "ddtree", value={"ddtree": {"spine": 3, "ranking": "mixed", "softness": 2}}),
    at("defaults", value={"ready_timeout": 0, "stall_after": 60.5, "exit_on_stall": True, "watch": False}),
]
BAD = [
    at("drafters", value="x"),
    at("recipe_version", value=2),
    at("name", value="Has Spaces"),
    at("model", value=""),
    at("defaults", "port", value=70000),
    at("defaults", "max_num_seqs", value=0),
    at("defaults", "tensor_parallel", value=0),
    at("defaults", "gpu_memory_utilization", value=0),
    at("defaults", "gpu_memory_utilization", value=1.01),
    at("defaults", "device", value="tpu"),
    at("profiles", "night", value={"max_num_seq": 4}),
    at("vllm", "--seed", value=1),
    at("vllm", "max-model-len", value=1),
    at("vllm", "max_model_len", value=1),
    at("vllm", "speculative_config", value={}),
    at("env", "DDTREE_BUDGET", value="3"),
    at("env", "DDTREE_TYPO", value="3"),
    at("env", "NUMBER", value=3),
    at("env", "DDTREE_KERNELS", value="torch"),
    at("modes", "ddtree", value={"ddtree": {"budget": 0}}),
    at("modes", "ddtree", value={"ddtree": {"budget": 128}}),
    at("modes", "ddtree", value={"ddtree": {"budget": 1.5}}),
    at("modes", "ddtree", value={"ddtree": {"spine": "half"}}),
    at("modes", "ddtree", value={"ddtree": {"tau": 0}}),
    at("modes", "ddtree", value={"ddtree": {"buget": 3}}),
    at("modes", "ddtree", value={"vllm": {"worker-cls": "x"}}),
    at("modes", "dtree", value={}),
    at("sources", "target", value="org/name"),
]


@pytest.mark.parametrize("change", GOOD)
def test_both_accept(pair, validator, change):
    change(pair.recipe)
    recipe.load_recipe(pair.recipe_file())
    validator.validate(copy.deepcopy(pair.recipe))


@pytest.mark.parametrize("change", BAD)
def test_both_refuse(pair, validator, change):
    change(pair.recipe)
    assert not validator.is_valid(pair.recipe)
    with pytest.raises(Refusal) as refused:
        recipe.load_recipe(pair.recipe_file())
    assert str(pair.root / "pair.yaml") in str(refused.value) and "\n" not in str(refused.value)
