# SPDX-License-Identifier: Apache-2.0
"""A copy of the installed vLLM with patches/vllm applied, and drafters with sliding windows for it.

Functions that take a worker run inside an engine's process, through `Decoder.rpc`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
APPLY = ROOT / "scripts" / "apply_patches"
SERIES = ROOT / "patches" / "vllm"


def installed() -> Path:
    """The folder that holds the installed vllm/; the test is skipped where there is none."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("vLLM is not installed here")
    return Path(next(iter(found.submodule_search_locations))).parent


def copy_package(folder: Path) -> Path:
    """`folder`/vllm: Python files (and their byte code) copied, everything else linked to the installed package."""
    source = installed() / "vllm"
    for at, _, names in os.walk(source):
        into = folder / "vllm" / Path(at).relative_to(source)
        into.mkdir(parents=True, exist_ok=True)
        for name in names:
            if name.endswith((".py", ".pyc")):
                shutil.copy2(Path(at, name), into / name)
            else:
                (into / name).symlink_to(Path(at, name))
    return folder


def apply_patches(*arguments: Any, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(APPLY), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def patched(folder: Path) -> Path:
    """As `copy_package`, with the committed series applied."""
    done = apply_patches(copy_package(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def windowed_drafter(drafter: Path, folder: Path, window: int, kinds: list[str]) -> Path:
    """A copy of `drafter` in `folder` whose layers are of `kinds` (the last is repeated) with this window."""
    folder.mkdir(parents=True)
    config = json.loads((drafter / "config.json").read_text())
    layers = config["num_hidden_layers"]
    config |= {
        "layer_types": [*kinds, *[kinds[-1]] * layers][:layers],
        "sliding_window": window,
        "use_sliding_window": True,
    }
    for file in drafter.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def facts(worker: Any) -> dict[str, Any]:
    """What this engine made of the drafter."""
    import vllm
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner = worker.model_runner
    layers = [layer.self_attn.attn for layer in runner.drafter.model.model.layers]
    return {
        "vllm": vllm.__file__,
        "method": runner.speculative_config.method,
        "windows": [layer.impl.sliding_window for layer in layers],
        "specs": {type(layer.get_kv_cache_spec(runner.vllm_config)).__name__ for layer in layers},
        "aux_layers": list(runner.drafter.aux_layers()),
        "aux_layers_of_vllm": list(GPUModelRunner._get_eagle3_aux_layers_from_config(runner)),
    }
