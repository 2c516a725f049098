# SPDX-License-Identifier: Apache-2.0
"""Made-up models on disk: true configurations and safetensors headers over sparse files, so that 27B takes no space."""

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SIZES = {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1}
Shape = tuple[str, tuple[int, ...]]


def write_safetensors(file: Path, tensors: Mapping[str, Shape]) -> None:
    """tensors: name -> (dtype, shape). The data are a hole in the file."""
    entries, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = SIZES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(file, 8 + len(header) + end)


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")


def drafter_tensors(config: Mapping[str, Any], target_hidden: int) -> dict[str, Shape]:
    hidden, ids = config["hidden_size"], config["dflash_config"]["target_layer_ids"]
    layers = {
        f"layers.{layer}.mlp.up_proj.weight": ("BF16", (config.get("intermediate_size", hidden), hidden))
        for layer in range(config["num_hidden_layers"])
    }
    return {"fc.weight": ("BF16", (hidden, len(ids) * target_hidden))} | layers


KINDS_27B = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(64)]
TARGET_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
        "layer_types": KINDS_27B, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
        "linear_conv_kernel_dim": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
        "dtype": "bfloat16",
    },
}  # fmt: skip
DRAFTER_27B = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3",
    "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 5,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 2048, "use_sliding_window": True,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
    "num_target_layers": 64, "block_size": 16, "dtype": "bfloat16",
    "dflash_config": {"target_layer_ids": [1, 16, 31, 46, 61], "mask_token_id": 248070},
}  # fmt: skip
NVFP4 = {
    "producer": {"name": "modelopt", "version": "0.37.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
}


def write_27b(root: Path) -> tuple[Path, Path]:
    """A pair of the size and shape of Qwen3.6-27B in NVFP4 and its drafter: (target, drafter)."""
    target, drafter = root / "aeon-xs", root / "dflash-drafter"
    target.mkdir(parents=True)
    drafter.mkdir()
    write_json(target / "config.json", TARGET_27B)
    write_json(target / "hf_quant_config.json", NVFP4)
    write_json(target / "tokenizer.json", {})
    hidden, mlp = 5120, 17408
    names: dict[str, str] = {}
    for number in range(4):
        shard: dict[str, Shape] = {}
        for layer in range(16 * number, 16 * number + 16):
            prefix = f"model.language_model.layers.{layer}"
            # Two 4-bit values in a byte, and one scale in 8 bits for 16 of them.
            for name, shape in (
                ("mlp.gate_proj", (mlp, hidden)),
                ("mlp.up_proj", (mlp, hidden)),
                ("mlp.down_proj", (hidden, mlp)),
                ("mixer.in_proj", (16384, hidden)),
                ("mixer.out_proj", (hidden, 6144)),
            ):
                shard[f"{prefix}.{name}.weight"] = ("U8", (shape[0], shape[1] // 2))
                shard[f"{prefix}.{name}.weight_scale"] = ("F8_E4M3", (shape[0], shape[1] // 16))
        if number == 0:
            shard["model.language_model.embed_tokens.weight"] = ("BF16", (248320, hidden))
        if number == 3:
            shard["lm_head.weight"] = ("BF16", (248320, hidden))
        file = f"model-{number + 1:05}-of-00004.safetensors"
        write_safetensors(target / file, shard)
        names |= dict.fromkeys(shard, file)
    write_json(target / "model.safetensors.index.json", {"metadata": {}, "weight_map": names})
    write_json(drafter / "config.json", DRAFTER_27B)
    write_safetensors(drafter / "model.safetensors", drafter_tensors(DRAFTER_27B, hidden))
    return target, drafter
