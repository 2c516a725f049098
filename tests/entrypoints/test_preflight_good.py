# SPDX-License-Identifier: Apache-2.0
"""Good set-ups start, with warnings as notes; a dry run asks nothing of this machine."""

# ruff: noqa: E501 - tables with a case on each line

import dataclasses
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from preflight_world import World
from spark import GB10, GIB, H200, meminfo

from aeon_entrypoints.failure import Refusal
from aeon_entrypoints.preflight import before_start


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


GOOD: dict[str, Callable[[World], object]] = {
    "as it is": lambda w: None,
    "chain": lambda w: setattr(w, "mode", "dflash"),
    "baseline": lambda w: (setattr(w, "mode", "baseline"), shutil.rmtree(w.drafter)),
    "no flag": lambda w: w.recipe.pop("vllm"),
    "config.json says it too": lambda w: w.goal(lambda c: c.update(quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})),
    "plain weights": lambda w: ((w.target / "hf_quant_config.json").unlink(), w.recipe.pop("vllm")),
    "mixed with its layers": lambda w: w.quant(
        lambda q: q.update(quant_algo="MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "FP8"}})
    ),
    "unpatched within one window": lambda w: (w.dflash_source.write_text(""), w.default(max_model_len=2048)),
    "unpatched without windows": lambda w: (
        w.dflash_source.write_text(""),
        w.draft(lambda c: c.update(layer_types=["full_attention"] * 5, sliding_window=None, use_sliding_window=False)),
    ),
    "a GPU of its own": lambda w: w.machine.update(gpus=(H200,), cuda_architectures="9.0;12.1a", meminfo=meminfo(64, 60)),
    "capability unknown": lambda w: w.machine.update(gpus=(dataclasses.replace(GB10, capability=None),)),
    "user named by a variable": lambda w: w.machine.update(user=None, environ={"USER": "me"}),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_good_set_ups_pass(world, name):
    GOOD[name](world)
    resolved = world.resolved()
    before_start(resolved, {}, machine=world.made_machine())
    assert any(note.startswith("memory: weights ") for note in resolved.notes)
    with pytest.raises(Refusal):  # and the control: the same set-up without its target is refused
        shutil.rmtree(world.target)
        before_start(world.resolved(), {}, machine=world.made_machine())


def test_snapshots_of_the_hub_cache_are_links_that_stay_inside_it(world):
    """As the hub's library lays them out: snapshots/COMMIT/FILE -> ../../blobs/HASH."""
    root = world.root / "models--org--name"
    (root / "snapshots").mkdir(parents=True)
    (root / "blobs").mkdir()
    snapshot = root / "snapshots" / "0123"
    world.target.rename(snapshot)
    for file in list(snapshot.iterdir()):
        file.rename(root / "blobs" / file.name)
        file.symlink_to(Path("..", "..", "blobs", file.name))
    world.recipe["model"] = str(snapshot)
    resolved = world.resolved()
    before_start(resolved, {}, machine=world.made_machine())
    assert not any("link" in note for note in resolved.notes)


def test_the_cache_serves_offline(world):
    cache = world.root / "hub"
    root = cache / "models--org--name"
    (root / "snapshots").mkdir(parents=True)
    world.target.rename(root / "snapshots" / "0123")
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0123")
    world.recipe["model"] = "org/name"
    environ = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    world.machine["environ"] = environ
    before_start(world.resolved(), environ, machine=world.made_machine())
    (root / "snapshots" / "0123" / world.shard.name).unlink()
    with pytest.raises(Refusal, match="shard-missing"):
        before_start(world.resolved(), environ, machine=world.made_machine())


WARNINGS: dict[str, tuple[Callable[[World], object], str]] = {
    "many long requests": (lambda w: w.default(max_model_len=262144, max_num_seqs=16), "memory.crowded"),
    "a share that CUDA does not report": (lambda w: w.default(gpu_memory_utilization=0.85), "memory.cuda-free"),
    "no tokenizer": (lambda w: (w.target / "tokenizer.json").unlink(), "model.tokenizer"),
    "a link out of the folder": (lambda w: (w.shard.rename(w.root / "elsewhere"), w.shard.symlink_to(w.root / "elsewhere")), "model.link-outside"),
    "a drafter of a short context": (lambda w: w.draft(lambda c: c.update(max_position_embeddings=4096)), "context.drafter"),
    "a cache of so many bytes": (lambda w: w.extra.append("--kv-cache-memory-bytes=8G"), "memory.explicit-cache"),
    "vLLM's own choice of GEMM": (lambda w: w.recipe.pop("env"), "quantisation.backend"),
    "another vLLM": (lambda w: w.machine.update(vllm_version="0.22.0"), "vllm.version"),
    "little shared memory": (lambda w: w.machine.update(disk=defaultdict(lambda: 900 * GIB, {Path("/dev/shm"): 64 << 20})), "host.shared-memory"),
    "a model still on the hub": (lambda w: w.recipe.update(model="org/name"), "model.not-cached"),
}  # fmt: skip


@pytest.mark.parametrize("name", WARNINGS)
def test_what_can_start_all_the_same_is_a_note(world, name):
    spoil, code = WARNINGS[name]
    spoil(world)
    resolved = world.resolved()
    before_start(resolved, {}, machine=world.made_machine())
    assert any(note.endswith(f"[{code}]") for note in resolved.notes), resolved.notes


def test_a_dry_run_is_for_any_machine(world):
    """No GPU, no memory, a taken port: none of it matters yet. Models that do not fit each other do."""
    world.machine = {"gpus": (), "meminfo": "", "vllm_version": None, "plugins": {}, "home": None}
    resolved = world.resolved()
    before_start(resolved, {}, dry_run=True, machine=world.made_machine())
    assert resolved.notes[-1].startswith("commit policy"), resolved.notes
    world.draft(lambda config: config.update(vocab_size=1))
    with pytest.raises(Refusal, match="vocab_size"):
        before_start(world.resolved(), {}, dry_run=True, machine=world.made_machine())
    shutil.rmtree(world.drafter)
    resolved = world.resolved()
    before_start(resolved, {}, dry_run=True, machine=world.made_machine())
    assert any("a real start would stop here" in note and str(world.drafter) in note for note in resolved.notes)
