# SPDX-License-Identifier: Apache-2.0
"""A good set-up, a 27B pair on a DGX Spark, whose every part a test can spoil."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_models as made
import yaml
from spark import spark

from aeon_entrypoints.preflight import Machine
from aeon_entrypoints.recipe import load_recipe
from aeon_entrypoints.resolve import Resolved, resolve

PATCHED = "def dflash_sliding_windows(config):\n"


class World:
    """A Spark with a 27B pair mounted, a recipe and a machine; a case spoils any of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.target, self.drafter = made.write_27b(root)
        self.vllm = root / "vllm"
        (self.vllm / "model_executor" / "models").mkdir(parents=True)
        self.dflash_source.write_text(PATCHED)
        self.recipe: dict[str, Any] = {
            "recipe_version": 1, "name": "pair", "description": "made up",
            "model": str(self.target), "drafter": str(self.drafter),
            "defaults": {"device": "cuda", "host": "127.0.0.1", "port": 8000, "max_model_len": 32768,
                         "max_num_seqs": 4, "max_num_batched_tokens": 4096, "gpu_memory_utilization": 0.65},
            "vllm": {"quantization": "modelopt"},
            "env": {"VLLM_NVFP4_GEMM_BACKEND": "flashinfer-cutlass"},
            "modes": {"baseline": {}, "dflash": {}, "ddtree": {"ddtree": {"budget": 31}}},
        }  # fmt: skip
        self.machine: dict[str, Any] = {}
        self.mode = "ddtree"
        self.extra: list[str] = []

    @property
    def dflash_source(self) -> Path:
        return self.vllm / "model_executor" / "models" / "qwen3_dflash.py"

    @property
    def shard(self) -> Path:
        return self.target / "model-00002-of-00004.safetensors"

    @property
    def index(self) -> Path:
        return self.target / "model.safetensors.index.json"

    def edit(self, file: Path, change: Callable[[dict[str, Any]], object]) -> None:
        content = json.loads(file.read_text())
        change(content)
        made.write_json(file, content)

    def draft(self, change: Callable[[dict[str, Any]], object]) -> None:
        self.edit(self.drafter / "config.json", change)

    def goal(self, change: Callable[[dict[str, Any]], object]) -> None:
        self.edit(self.target / "config.json", change)

    def quant(self, change: Callable[[dict[str, Any]], object]) -> None:
        self.edit(self.target / "hf_quant_config.json", lambda content: change(content["quantization"]))

    def default(self, **values: Any) -> None:
        self.recipe["defaults"] |= values

    def file(self) -> Path:
        file = self.root / "pair.yaml"
        file.write_text(yaml.safe_dump(self.recipe))
        return file

    def resolved(self) -> Resolved:
        file = self.file()
        return resolve(self.mode, load_recipe(file), file, {}, self.machine.get("environ", {}), self.extra)

    def made_machine(self) -> Machine:
        return spark(self.vllm, **self.machine)
