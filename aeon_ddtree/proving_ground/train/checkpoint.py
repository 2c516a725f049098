# SPDX-License-Identifier: Apache-2.0
"""Save and load the pair in the public checkpoint formats (bf16 safetensors, sharded where asked)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from aeon_ddtree.proving_ground.train import architecture as arch
from aeon_ddtree.proving_ground.train.drafter import Drafter
from aeon_ddtree.proving_ground.train.target import Target
from aeon_ddtree.proving_ground.train.tokenizer import write_json

TEXT_PREFIX = "model.language_model."


def save_tensors(tensors: dict[str, Tensor], folder: Path, shards: int = 1) -> None:
    """Write bf16 safetensors; with several shards also `model.safetensors.index.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in sorted(tensors.items())}
    if shards == 1:
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
        return
    size = sum(v.numel() * 2 for v in tensors.values())
    groups: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    used = 0
    for name, value in tensors.items():
        groups[min(shards - 1, used * shards // size)][name] = value
        used += value.numel() * 2
    where: dict[str, str] = {}
    for i, group in enumerate(groups, 1):
        file = f"model-{i:05d}-of-{shards:05d}.safetensors"
        save_file(group, str(folder / file), metadata={"format": "pt"})
        where |= dict.fromkeys(group, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": where})


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {folder}; expected the weights of the proving pair")
    return {k: v for f in files for k, v in load_file(str(f)).items()}


def vision_tensors(seed: int) -> dict[str, Tensor]:
    """The vision tower, initialised (not trained): normal weights, unit norms, zero biases, from `seed`."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    config = Qwen3_5Config(**{k: v for k, v in arch.target_config().items() if k != "model_type"})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3_5ForConditionalGeneration(config)
    return {k: v for k, v in model.state_dict().items() if k.startswith("model.visual.")}


def round_to_bf16(model: nn.Module) -> None:
    """Round parameters to bf16 in place: what is measured and drafted from must be what is shipped."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).to(parameter.dtype))


def save_target(target: Target, folder: Path, *, vision_seed: int | None, shards: int = 2) -> None:
    """Text weights under the checkpoint's names, and (when a seed is given) the vision tower; config files too."""
    tensors = {TEXT_PREFIX + k: v for k, v in target.state_dict().items()}
    if vision_seed is not None:
        tensors |= vision_tensors(vision_seed)
    save_tensors(tensors, folder, shards)
    write_json(folder / "config.json", arch.target_config())
    write_json(folder / "generation_config.json", arch.generation_config())


def save_drafter(drafter: Drafter, folder: Path) -> None:
    """The drafter's weights and configuration (embedding and head are the target's and not stored)."""
    save_tensors(dict(drafter.state_dict()), folder)
    write_json(folder / "config.json", arch.drafter_config(len(drafter.layers)))


def load_target(folder: Path, compute: torch.dtype = torch.float32) -> Target:
    """Training-form target from a checkpoint folder, fp32 parameters."""
    target = Target(compute)
    names = {
        k.removeprefix(TEXT_PREFIX): v.float() for k, v in load_tensors(folder).items() if k.startswith(TEXT_PREFIX)
    }
    target.load_state_dict(names)
    return target


def load_drafter(folder: Path, compute: torch.dtype = torch.float32) -> Drafter:
    """Training-form drafter from a checkpoint folder, fp32 parameters."""
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    drafter = Drafter(compute, layers)
    drafter.load_state_dict({k: v.float() for k, v in load_tensors(folder).items()})
    return drafter
