# SPDX-License-Identifier: Apache-2.0
"""Broken set-ups: each is refused before anything loads, exit code 2, in one line that names file, field and cure."""

# ruff: noqa: E501 - a table with a case on each line

import errno
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_models as made
import pytest
from preflight_world import World
from spark import GIB, H200, meminfo

from aeon_entrypoints import cli
from aeon_entrypoints.failure import Refusal
from aeon_entrypoints.preflight import Gpu, before_start


def _cut(file: Path, size: int) -> None:
    os.truncate(file, size)


def _relink(file: Path, target: str) -> None:
    file.unlink()
    file.symlink_to(target)


def _without(folder: Path, name: str) -> None:
    (folder / name).unlink()


def _replace(folder: Path, **changes: made.Shape) -> None:
    """Other shapes for tensors of the drafter; None removes one."""
    tensors = made.drafter_tensors(made.DRAFTER_27B, 5120) | {k.replace("__", "."): v for k, v in changes.items()}
    made.write_safetensors(folder / "model.safetensors", {k: v for k, v in tensors.items() if v})


def _refuse_bind(number: int):
    return lambda w: w.machine.update(unbindable=defaultdict(lambda: OSError(number, os.strerror(number))))


def _unwritable(*names: str):
    why = "/home/aeon cannot be written by user 12345"
    folders = {Path(f"/home/aeon/{name}"): why for name in names}
    return lambda w: w.machine.update(unwritable=defaultdict(lambda: None, folders))


def _unquantise(w: World) -> None:
    _without(w.target, "hf_quant_config.json")


def _mixed(w: World) -> None:
    w.quant(lambda q: q.update(quant_algo="MIXED_PRECISION"))


def _inline(**content: Any):
    return lambda w: w.goal(lambda c: c.update(quantization_config=content))


H100 = Gpu("NVIDIA H100", total=80 * GIB, free=30 * GIB, capability=(9, 0))
WINDOW = made.DRAFTER_27B["layer_types"]

# name: (what is broken, code, parts of the line)
CASES: dict[str, tuple[Callable[[World], object], str, list[str]]] = {
    # damaged so that reading them could fail, or take all memory
    "architecture is a text": (lambda w: w.goal(lambda c: c.update(architectures="Qwen3")), "model.architecture", ["architectures", "Qwen3", "a list"]),
    "architecture without a name": (lambda w: w.draft(lambda c: c.update(architectures=[None])), "drafter.architecture", ["architectures"]),
    "configuration nested without end": (lambda w: (w.target / "config.json").write_text('{"a":' * 100000), "model.config-invalid", ["config.json", "JSON"]),
    "header nested without end": (lambda w: w.shard.write_bytes((100000).to_bytes(8, "little") + b"[" * 100000), "model.shard-header", [".safetensors"]),
    "drafter without tensors": (lambda w: (w.drafter / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}"), "drafter.shard-empty", ["without tensors"]),
    "tensor before the file": (lambda w: w.shard.write_bytes((63).to_bytes(8, "little") + b'{"a":{"dtype":"BF16","shape":[1],"data_offsets":[-2,0]}}'.ljust(63)), "model.shard-header", [".safetensors"]),
    "index leads out of the folder": (lambda w: w.edit(w.index, lambda c: c["weight_map"].update(x="/etc/passwd")), "model.index-invalid", ["/etc/passwd", "beside the index"]),
    "kinds of layers as a text": (lambda w: w.goal(lambda c: c.get("text_config", c).update(layer_types="x")), "model.config-field", ["layer_types"]),
    "too few kinds of layers": (lambda w: w.goal(lambda c: c.get("text_config", c).update(layer_types=["full_attention"])), "model.config-field", ["layer_types", "num_hidden_layers"]),
    "a billion drafter layers": (lambda w: w.draft(lambda c: c.update(num_hidden_layers=10**9, layer_types=None)), "drafter.layers", ["num_hidden_layers", "1000000000"]),
    "number of drafter layers missing": (lambda w: w.draft(lambda c: (c.pop("num_hidden_layers"), c.pop("layer_types"))), "drafter.layers", ["num_hidden_layers", "missing"]),
    # models mounted and complete
    "target not mounted": (lambda w: shutil.rmtree(w.target), "model.path", ["recipe pair: model", "does not exist", "--model"]),
    "drafter not mounted": (lambda w: shutil.rmtree(w.drafter), "drafter.path", ["drafter", "does not exist"]),
    "path deeper than a hub id": (lambda w: w.recipe.update(model="models/not/mounted"), "model.path", ["models/not/mounted", "does not exist"]),
    "a path without its slash": (lambda w: w.recipe.update(model="etc/aeon-xs"), "model.path", ["etc/aeon-xs, which does not exist", "write /etc/aeon-xs"]),
    "a file for a folder": (lambda w: (shutil.rmtree(w.target), w.target.touch()), "model.path", ["is a file"]),
    "empty mount": (lambda w: [f.unlink() for f in w.target.iterdir()], "model.empty", ["which is empty"]),
    "no config": (lambda w: _without(w.target, "config.json"), "model.config-missing", ["config.json is missing"]),
    "config is no JSON": (lambda w: (w.target / "config.json").write_text("{,"), "model.config-invalid", ["config.json", "not readable as JSON"]),
    "config is a list": (lambda w: (w.drafter / "config.json").write_text("[]"), "drafter.config-invalid", ["config.json", "JSON object"]),
    "config without architecture": (lambda w: w.goal(lambda c: c.pop("architectures")), "model.architecture", ["architectures is missing"]),
    "shard missing": (lambda w: w.shard.unlink(), "model.shard-missing", ["index.json: model-00002-of-00004.safetensors is missing", "all 4 files"]),
    "shard missing, no index": (lambda w: (w.shard.unlink(), w.index.unlink()), "model.shard-missing", ["model-00002-of-00004.safetensors is missing"]),
    "shard empty": (lambda w: _cut(w.shard, 0), "model.shard-empty", ["model-00002-of-00004.safetensors is an empty file"]),
    "shard cut off in its data": (lambda w: _cut(w.shard, w.shard.stat().st_size - 1), "model.shard-truncated", ["model-00002", "bytes by its header"]),
    "shard cut off in its header": (lambda w: _cut(w.shard, 100), "model.shard-truncated", ["model-00002", "100 bytes long"]),
    "shard cut off in its length": (lambda w: _cut(w.shard, 5), "model.shard-truncated", ["5 bytes long"]),
    "shard with bytes behind": (lambda w: _cut(w.shard, w.shard.stat().st_size + 1), "model.shard-header", ["model-00002"]),
    "shard is a pointer": (lambda w: w.shard.write_text("version https://git-lfs.github.com/spec/v1\n"), "model.shard-pointer", ["git-lfs pointer"]),
    "shard is HTML": (lambda w: w.shard.write_text("<!DOCTYPE html>" * 9), "model.shard-header", ["model-00002"]),
    "shard's header is damaged": (lambda w: w.shard.write_bytes(b"\x04\0\0\0\0\0\0\0{{}}"), "model.shard-header", ["unreadable header"]),
    "index is no JSON": (lambda w: w.index.write_text(""), "model.index-invalid", ["index.json", "not readable as JSON"]),
    "index without map": (lambda w: w.index.write_text("{}"), "model.index-invalid", ["weight_map is missing"]),
    "index promises another tensor": (lambda w: w.edit(w.index, lambda c: c["weight_map"].update(extra="model-00001-of-00004.safetensors")), "model.index-tensors", ["model-00001-of-00004.safetensors", "without extra"]),
    "link leaves the mount": (lambda w: _relink(w.shard, "../../blobs/0a1b2c"), "model.link-outside", ["model-00002-of-00004.safetensors is a link to", "blobs/0a1b2c", "mount"]),
    "link leads nowhere": (lambda w: _relink(w.shard, "gone.safetensors"), "model.link-broken", ["a link to", "gone.safetensors"]),
    "mount is a dangling link": (lambda w: (shutil.rmtree(w.target), w.target.symlink_to("/srv/absent")), "model.link-outside", ["/srv/absent"]),
    "drafter without weights": (lambda w: _without(w.drafter, "model.safetensors"), "drafter.weights", ["weights is missing"]),
    "offline and not cached": (lambda w: (w.recipe.update(model="org/name"), w.machine.update(environ={"HF_HUB_OFFLINE": "1"})), "model.offline", ["org/name", "HF_HUB_OFFLINE", "download"]),
    # the drafter fits
    "another method's drafter": (lambda w: w.draft(lambda c: c.update(architectures=["LlamaForCausalLMEagle3"])), "drafter.method", ["architectures", "DFlashDraftModel"]),
    "no DFlash section": (lambda w: w.draft(lambda c: c.pop("dflash_config")), "drafter.method", ["dflash_config is missing"]),
    "another vocabulary": (lambda w: w.draft(lambda c: c.update(vocab_size=248576)), "drafter.vocabulary", ["vocab_size is 248576", "248320"]),
    "another hidden size": (lambda w: w.draft(lambda c: c.update(hidden_size=4096)), "drafter.hidden-size", ["hidden_size is 4096", "5120"]),
    "trained for another depth": (lambda w: w.draft(lambda c: c.update(num_target_layers=48)), "drafter.target-layers", ["num_target_layers is 48", "64"]),
    "layer ids beyond the target": (lambda w: w.draft(lambda c: c["dflash_config"].update(target_layer_ids=[1, 16, 31, 46, 64])), "drafter.layer-ids", ["target_layer_ids", "0 to 63"]),
    "more layer ids than columns": (lambda w: w.draft(lambda c: c["dflash_config"].update(target_layer_ids=[1, 9, 16, 31, 46, 61])), "drafter.fc", ["fc.weight", "[5120, 25600]", "30720 columns"]),
    "no projection": (lambda w: _replace(w.drafter, fc__weight=None), "drafter.fc", ["fc.weight is missing"]),
    "projection of another width": (lambda w: _replace(w.drafter, fc__weight=("BF16", (4096, 25600))), "drafter.fc", ["fc.weight", "5120 rows"]),
    "layers guessed": (lambda w: w.draft(lambda c: c.update(num_hidden_layers=8)), "drafter.layers", ["num_hidden_layers is 8", "5 layers"]),
    "mask id outside": (lambda w: w.draft(lambda c: c["dflash_config"].update(mask_token_id=248320)), "drafter.mask-id", ["dflash_config.mask_token_id is 248320", "248319"]),
    "mask id in the wrong place": (lambda w: w.draft(lambda c: c.update(mask_token_id=c["dflash_config"].pop("mask_token_id"))), "drafter.mask-place", ["dflash_config.mask_token_id", "top level"]),
    "no block size": (lambda w: w.draft(lambda c: c.pop("block_size")), "drafter.block-size", ["block_size is missing"]),
    "window without size": (lambda w: w.draft(lambda c: c.update(sliding_window=None)), "drafter.window", ["sliding_window is None", "4 layers"]),
    "window switched off": (lambda w: w.draft(lambda c: c.update(use_sliding_window=False)), "drafter.window", ["use_sliding_window is false"]),
    "kinds for fewer layers": (lambda w: w.draft(lambda c: c.update(layer_types=WINDOW[:4])), "drafter.window", ["layer_types is a list of 4", "5 entries"]),
    "an unknown kind": (lambda w: w.draft(lambda c: c.update(layer_types=["chunked"] * 5)), "drafter.window", ["layer_types", "sliding_attention"]),
    "vLLM without the patch": (lambda w: w.dflash_source.write_text("class DFlashQwen3Attention: ...\n"), "drafter.window-patch", ["layer_types", "0001-dflash-sliding-window", "apply_patches"]),
    # quantisation, by the model's own files
    "files contradict each other": (_inline(quant_method="modelopt", quant_algo="FP8"), "quantisation.files", ["hf_quant_config.json: quantization.quant_algo is NVFP4", "FP8 as in config.json"]),
    "flag contradicts the files": (lambda w: w.recipe["vllm"].update(quantization="awq"), "quantisation.flag", ["quantization is awq", "modelopt_fp4", "hf_quant_config.json"]),
    "flag for a plain model": (_unquantise, "quantisation.flag", ["recipe pair: vllm: quantization is modelopt", "names a quantisation"]),
    "flag after the dashes": (lambda w: w.extra.extend(["--quantization", "gptq"]), "quantisation.flag", ["arguments after --", "quantization is gptq"]),
    "an unknown algorithm": (lambda w: w.quant(lambda q: q.update(quant_algo="W4A8_AWQ")), "quantisation.algorithm", ["quant_algo is W4A8_AWQ", "NVFP4"]),
    "mixed without its layers": (_mixed, "quantisation.layers", ["quantized_layers is missing", "MIXED_PRECISION"]),
    "NVFP4 without group size": (lambda w: w.quant(lambda q: q.pop("group_size")), "quantisation.field", ["quantization.group_size is missing"]),
    "NVFP4 on the CPU": (lambda w: w.default(device="cpu"), "quantisation.device", ["quant_algo is NVFP4", "full precision on the CPU", "--gpus all"]),
    # memory, tokens, context
    "share beyond what is available": (lambda w: (w.default(gpu_memory_utilization=0.85), w.machine.update(meminfo=meminfo(121.7, 102.0))), "memory.utilisation", ["gpu_memory_utilization is 0.85", "103.4 GiB", "at most 0.78", "102.0 of 121.7"]),
    "vLLM's default share": (lambda w: w.recipe["defaults"].pop("gpu_memory_utilization"), "memory.utilisation", ["vLLM's default: gpu_memory_utilization is 0.92", "at most 0.91"]),
    "share too small": (lambda w: w.default(gpu_memory_utilization=0.1), "memory.share", ["gpu_memory_utilization is 0.1", "12.2 GiB", "--gpu-memory-utilization 0."]),
    "context that cannot fit": (lambda w: (w.default(max_model_len=262144), w.machine.update(meminfo=meminfo(121.7, 40.0))), "memory.plan", ["max_model_len is 262144", "--max-model-len"]),
    "a discrete GPU in use": (lambda w: w.machine.update(gpus=(H100,), cuda_architectures="9.0"), "memory.utilisation", ["at most 0.37", "30.0 of 80.0"]),
    "container's own limit": (lambda w: w.machine.update(memory_limit=16 * GIB), "memory.plan", ["16.0 of 121.7 GiB", "container's memory limit"]),
    "trees starve": (lambda w: w.default(max_num_seqs=256), "tokens.budget", ["max_num_seqs is 256 × 32", "8192 tokens", "4096", "--max-num-seqs 128"]),
    "default batch of tokens": (lambda w: (w.default(max_num_seqs=512), w.recipe["defaults"].pop("max_num_batched_tokens")), "tokens.default", ["max_num_seqs is 512 × 32", "8192 (vLLM's default)"]),
    "budget after the dashes": (lambda w: w.extra.append("--max_num_batched_tokens=64"), "tokens.budget", ["max_num_seqs is 4 × 32", "64 (arguments after --"]),
    "context beyond the model": (lambda w: w.default(max_model_len=300000), "context.model", ["max_model_len is 300000", "262144"]),
    # the machine
    "image of the other processor": (lambda w: w.machine.update(architecture="x86_64"), "host.architecture", ["architecture is amd64", "arm64", "--platform linux/arm64"]),
    "arm64 image on amd64": (lambda w: w.machine.update(cpuinfo="vendor_id\t: GenuineIntel\n"), "host.architecture", ["architecture is arm64", "linux/amd64"]),
    "no GPU": (lambda w: w.machine.update(gpus=()), "gpu.missing", ["device is cuda", "--gpus all"]),
    "GPU without code": (lambda w: w.machine.update(gpus=(H200,)), "gpu.capability", ["compute capability is 9.0 (NVIDIA H200)", "12.1a"]),
    "more devices than there are": (lambda w: w.default(tensor_parallel=2), "gpu.count", ["tensor_parallel is 2", "at most 1"]),
    "no vLLM": (lambda w: w.machine.update(vllm_version=None), "vllm.missing", ["vllm is not installed"]),
    "FlashInfer of two versions": (lambda w: w.machine.update(flashinfer={"flashinfer-python": "0.6.4", "flashinfer-cubin": "0.6.3"}), "flashinfer.versions", ["flashinfer-cubin 0.6.3", "one version"]),
    "no plugin": (lambda w: w.machine.update(plugins={}), "plugin.missing", ["aeon_ddtree is missing", "vllm.general_plugins"]),
    "another plugin of that name": (lambda w: w.machine.update(plugins={"aeon_ddtree": "old:register"}), "plugin.missing", ["is old:register"]),
    "no home": (lambda w: w.machine.update(home=None), "cache.home", ["HOME is not set"]),
    "home that cannot be written": (_unwritable(".triton", ".cache/vllm"), "cache.unwritable", ["TRITON_CACHE_DIR is /home/aeon/.triton", "12345"]),
    "flashinfer's folder": (_unwritable(".cache/flashinfer"), "cache.unwritable", ["FLASHINFER_WORKSPACE_BASE", "/home/aeon/.cache/flashinfer"]),
    "user without a name": (lambda w: w.machine.update(user=None), "cache.user", ["USER is no name"]),
    "disk full": (lambda w: w.machine.update(disk=defaultdict(lambda: 1 << 20)), "host.disk", ["/home/aeon/.cache/vllm is 1 MiB free"]),
    "port in use": (_refuse_bind(errno.EADDRINUSE), "port.taken", ["port is 8000", "--port"]),
    "privileged port": (_refuse_bind(errno.EACCES), "port.refused", ["port is 8000", "Permission denied"]),
    "no such address": (_refuse_bind(errno.EADDRNOTAVAIL), "port.host", ["host is 127.0.0.1", "--host"]),
}  # fmt: skip


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_a_broken_set_up_is_refused_in_one_line(world, name):
    spoil, code, parts = CASES[name]
    spoil(world)
    with pytest.raises(Refusal) as refused:
        before_start(world.resolved(), {}, machine=world.made_machine())
    line = str(refused.value)
    assert line.endswith(f"[{code}]") and "\n" not in line, line
    for part in (*parts, ", expected ", "; "):
        assert part in line, line


@pytest.mark.parametrize("name", CASES)
def test_doctor_finds_the_same_and_exits_with_2(world, name, monkeypatch, capsys):
    spoil, code, _ = CASES[name]
    spoil(world)
    for variable, value in world.machine.get("environ", {}).items():
        monkeypatch.setenv(variable, value)
    arguments = ["doctor", "--recipe", str(world.file()), "--mode", world.mode, "--json"]
    arguments += ["--", *world.extra] if world.extra else []
    with pytest.raises(SystemExit) as ended:
        cli.cli.main(arguments, obj=world.made_machine(), standalone_mode=False)
    assert ended.value.code == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["passed"] is False
    found = {
        finding["code"]: finding for row in answer["checks"] for finding in row["findings"] if not finding["warning"]
    }
    assert code in found, found
    assert found[code]["cure"] and found[code]["file"] and found[code]["expected"]


CODES = re.compile(
    r'"((?:drafter|quantisation|memory|tokens|context|gpu|host|vllm|plugin|flashinfer|cache|port)[.][a-z-]+)"'
)
ONLY_WARNINGS = {
    "memory.crowded",
    "memory.cuda-free",
    "memory.explicit-cache",
    "quantisation.backend",
    "context.drafter",
    "vllm.version",
    "host.shared-memory",
}
# test_memory_plan has the first; the others are refused where values are read, unless they come after the dashes.
ELSEWHERE = {"memory.kv-space", "tokens.range", "context.range", "port.range"}


def test_the_table_has_every_code():
    """Codes written out in the checks, so that none goes untested; those of a model's files begin with their field."""
    assert len(CASES) >= 40
    folder = Path(cli.__file__).parent / "preflight"
    files = [file for file in folder.glob("*.py") if file.name != "machine.py"]  # which has file names of that form
    written = {code for file in files for code in CODES.findall(file.read_text(encoding="utf-8"))}
    assert len(written) > 30
    assert written - {code for _, code, _ in CASES.values()} == ONLY_WARNINGS | ELSEWHERE
