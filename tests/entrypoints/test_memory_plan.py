# SPDX-License-Identifier: Apache-2.0
"""The memory plan against figures worked out by hand, and what it says when something does not fit."""

import math
from pathlib import Path

import made_models as made
import pytest
from preflight_world import World
from spark import GIB, H200, meminfo, spark

from aeon_entrypoints.failure import Refusal
from aeon_entrypoints.preflight import Situation, Skipped, before_start
from aeon_entrypoints.preflight.geometry import geometry
from aeon_entrypoints.preflight.memory import plan


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def planned(world: World):
    return plan(Situation(world.resolved(), world.made_machine()))


def test_a_27b_layer_in_bytes():
    """DESIGN: 151 MB of fp32 state for all layers; 53 KB of factors per row and layer; 4 KV heads of 256 in bf16."""
    shape = geometry(made.TARGET_27B["text_config"], 2, 2, 1, "config.json")
    assert (shape.full, shape.recurrent) == (16, 48)
    assert shape.kv_token == 2 * 4 * 256 * 2
    assert shape.channels == 2 * 16 * 128 + 48 * 128
    assert shape.state == 48 * 128 * 128 * 4 + 3 * shape.channels * 2
    assert abs(48 * 48 * 128 * 128 * 4 - 151e6) < 1e6
    assert shape.factors == (48 * 128 + 16 * 128 + 48) * 4 + shape.channels * 2 == 53_440


def test_two_devices_share_everything_but_the_hidden_state():
    whole, half = (geometry(made.TARGET_27B["text_config"], 2, 2, shards, "") for shards in (1, 2))
    for name in ("kv_token", "state", "factors", "mlp", "channels"):
        assert getattr(half, name) * 2 == getattr(whole, name), name
    assert half.hidden == whole.hidden


def test_interval_in_place_of_a_list_of_kinds():
    config = {name: value for name, value in made.TARGET_27B["text_config"].items() if name != "layer_types"}
    assert geometry(config, 2, 2, 1, "").recurrent == 0
    assert geometry(config | {"full_attention_interval": 4}, 2, 2, 1, "").recurrent == 48


@pytest.mark.parametrize("name", ["head_dim", "num_attention_heads", "linear_value_head_dim", "intermediate_size"])
@pytest.mark.parametrize("value", [0, -1, "many", True, [1]])
def test_a_number_that_cannot_be_one_is_named(name, value):
    with pytest.raises(Refusal, match=f"config.json: {name} is .*, expected a whole number, at least 1"):
        geometry(made.TARGET_27B["text_config"] | {name: value}, 2, 2, 1, "config.json")


def test_weights_are_what_the_files_hold(world):
    made_plan = planned(world)
    stored = sum(file.stat().st_size for file in world.target.glob("*.safetensors"))
    assert made_plan.fixed["weights"] == pytest.approx(stored, rel=1e-4)
    assert made_plan.fixed["tree factors"] == 48 * 53_440 * 32 * 4  # layers × bytes × rows × requests


def test_an_unquantised_model_takes_its_dtype(world):
    """bf16 in the files, fp32 in memory: twice the size."""
    (world.target / "hf_quant_config.json").unlink()
    del world.recipe["vllm"]
    for file in world.target.glob("model*"):
        file.unlink()
    made.write_safetensors(world.target / "model.safetensors", {"a": ("BF16", (1000, 1000)), "b": ("U8", (10,))})
    assert planned(world).fixed["weights"] == 2_000_010
    world.default(dtype="float32")
    assert planned(world).fixed["weights"] == 4_000_010


def test_cache_of_a_request_grows_with_its_tokens_and_dtype(world):
    """Per token: 16 attention layers padded to groups of 5, and 5 of the drafter, each 4096 bytes in bf16."""
    short = planned(world)
    world.default(max_model_len=32768 + 1000)
    assert planned(world).request - short.request == 1000 * (20 + 5) * 4096
    world.recipe["vllm"]["kv-cache-dtype"] = "fp8"
    assert planned(world).per_token * 2 == short.per_token
    del world.recipe["vllm"]["kv-cache-dtype"]
    world.quant(lambda quantisation: quantisation.update(kv_cache_quant_algo="FP8"))
    assert planned(world).per_token * 2 == short.per_token


def test_graphs_cost_and_eager_does_not(world):
    assert planned(world).fixed["CUDA graphs"] > 0
    world.recipe["vllm"]["enforce-eager"] = True
    assert "CUDA graphs" not in planned(world).fixed


def test_what_a_spark_can_give(world):
    """0.85 of 121.7 GiB are 103.4; with 102 available and the headroom kept, 0.78 is the most."""
    world.machine["meminfo"] = meminfo(121.7, 102.0)
    world.default(gpu_memory_utilization=0.85)
    made_plan = planned(world)
    assert made_plan.share / GIB == pytest.approx(103.4, abs=0.05)
    assert made_plan.pool.headroom == pytest.approx(0.05 * 121.7 * GIB, rel=0.001)
    assert made_plan.pool.utilisation == math.floor(100 * (102.0 - 0.05 * 121.7) / 121.7) / 100 == 0.78
    for text in ("103.4", "largest utilisation 0.78", "weights 17.6"):
        assert text in str(made_plan)


def test_the_cures_that_it_names_work(world):
    """What a refusal tells to give is accepted, once given."""
    world.machine["meminfo"] = meminfo(121.7, 102.0)
    world.default(gpu_memory_utilization=0.85)
    with pytest.raises(Refusal, match=r"--gpu-memory-utilization 0\.78"):
        before_start(world.resolved(), {}, machine=world.made_machine())
    world.default(gpu_memory_utilization=0.78)
    before_start(world.resolved(), {}, machine=world.made_machine())

    world.machine["meminfo"] = meminfo(121.7, 40.0)
    world.default(max_model_len=262144, gpu_memory_utilization=0.2)
    with pytest.raises(Refusal, match=r"memory\.plan") as refused:
        before_start(world.resolved(), {}, machine=world.made_machine())
    length = int(str(refused.value).partition("give --max-model-len ")[2].split()[0])
    share = float(str(refused.value).partition("(with --gpu-memory-utilization ")[2].split(")")[0])
    world.default(max_model_len=length, gpu_memory_utilization=share)
    before_start(world.resolved(), {}, machine=world.made_machine())
    world.default(max_model_len=length + 1)
    with pytest.raises(Refusal, match=r"memory\.plan"):
        before_start(world.resolved(), {}, machine=world.made_machine())


def test_a_discrete_gpu_is_planned_by_its_own_memory(world):
    world.machine |= {"gpus": (H200,), "meminfo": meminfo(64, 8)}
    made_plan = planned(world)
    assert (made_plan.pool.total, made_plan.pool.available, made_plan.pool.unified) == (140 * GIB, 139 * GIB, False)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda w: w.machine.update(meminfo=""), "/proc/meminfo"),
        (lambda w: w.machine.update(gpus=()), "no GPU"),
        (lambda w: w.goal(lambda c: c["text_config"].pop("num_attention_heads")), "num_attention_heads"),
        (lambda w: w.recipe.update(model="org/name"), "download"),
    ],
)
def test_what_is_not_known_is_said_and_nothing_guessed(world, change, why):
    change(world)
    with pytest.raises(Skipped, match=why):
        planned(world)


def test_on_the_cpu_the_space_for_the_cache_counts(world):
    def start(**environ: str) -> list[str]:
        world.machine["environ"] = environ
        resolved = world.resolved()
        before_start(resolved, environ, machine=world.made_machine())
        return resolved.notes

    (world.target / "hf_quant_config.json").unlink()
    del world.recipe["vllm"]
    world.default(device="cpu")
    with pytest.raises(Refusal, match=r"VLLM_CPU_KVCACHE_SPACE is 1\.00 GiB, expected .* GiB for one request"):
        start(VLLM_CPU_KVCACHE_SPACE="1")
    world.machine["meminfo"] = meminfo(121.7, 90.0)
    with pytest.raises(Refusal, match=r"not set, so that vLLM asks for 0\.92 .* set VLLM_CPU_KVCACHE_SPACE=4"):
        start()
    with pytest.raises(Refusal, match=r"80\.0 GiB beside"):
        start(VLLM_CPU_KVCACHE_SPACE="80")
    assert any("memory: " in note for note in start(VLLM_CPU_KVCACHE_SPACE="4"))
    world.machine["meminfo"] = meminfo(121.7, 10.0)
    with pytest.raises(Refusal, match=r"memory\.plan"):
        start(VLLM_CPU_KVCACHE_SPACE="4")


@pytest.mark.parametrize(
    ("flag", "code"), [("--max-num-seqs=0", "tokens.range"), ("--max-model-len=0", "context.range")]
)
def test_ranges_of_what_comes_after_the_dashes(world, flag, code):
    world.extra.append(flag)
    with pytest.raises(Refusal, match=code):
        before_start(world.resolved(), {}, machine=world.made_machine())


def test_facts_are_named_and_nothing_else():
    with pytest.raises(TypeError, match="no fact 'gpu'"):
        spark(gpu=())
