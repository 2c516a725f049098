# SPDX-License-Identifier: Apache-2.0
"""patches/vllm on real vLLM: always the installed one, and the source tree (of the pin) that AEON_VLLM_SOURCE names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patched_vllm import ROOT, SERIES, apply_patches, copy_package, installed
from small_series import state

NAMES = [line for line in (SERIES / "series").read_text().splitlines() if line and not line.startswith("#")]


def copy_source(folder: Path) -> Path:
    """The Python files of AEON_VLLM_SOURCE."""
    source = os.environ.get("AEON_VLLM_SOURCE")
    if not source:
        pytest.skip("AEON_VLLM_SOURCE is not set: it names a folder with vLLM's source (vllm/ inside)")
    assert (Path(source) / "vllm/__init__.py").is_file(), f"AEON_VLLM_SOURCE={source}: holds no vllm/__init__.py"
    for file in (Path(source) / "vllm").rglob("*.py"):
        into = folder / file.relative_to(source)
        into.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, into)
    return folder


@pytest.mark.parametrize("copy", [copy_package, copy_source])
def test_applies_and_stays(copy, tmp_path: Path) -> None:
    tree = copy(tmp_path / "tree")
    before = state(tree)
    assert apply_patches(tree, "--check").returncode == 0
    assert state(tree) == before
    done = apply_patches(tree)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "".join(f"apply_patches: {name}: applied\n" for name in NAMES)
    after = state(tree)
    touched = {path for path in after if after[path][0] != before.get(path, ("",))[0]}
    assert touched == {
        "vllm/config/speculative.py",
        "vllm/model_executor/models/qwen3_dflash.py",
        "vllm/transformers_utils/configs/eagle.py",
        "vllm/v1/spec_decode/dflash.py",
        "vllm/v1/spec_decode/llm_base_proposer.py",
        "vllm/v1/worker/gpu_model_runner.py",
    }
    assert after.keys() == before.keys()
    again = apply_patches(tree)
    assert again.returncode == 0 and again.stdout.count(": already applied\n") == len(NAMES)
    assert state(tree) == after


@pytest.mark.parametrize("copy", [copy_package, copy_source])
def test_every_hunk_is_needed(copy, tmp_path: Path) -> None:
    """Each file of the series reverted alone is noticed."""
    tree, clean = copy(tmp_path / "tree"), copy(tmp_path / "clean")
    assert apply_patches(tree).returncode == 0
    changed = [
        path for path in sorted((tree / "vllm").rglob("*.py")) if _content(path) != _content(_twin(path, tree, clean))
    ]
    assert len(changed) == 6
    for path in changed:
        mine = path.read_text()
        path.write_text(_content(_twin(path, tree, clean)))
        before = state(tree)
        assert apply_patches(tree).returncode == 1
        assert state(tree) == before
        path.write_text(mine)
    assert apply_patches(tree, "--check").returncode == 0


def _twin(path: Path, tree: Path, other: Path) -> Path:
    return other / path.relative_to(tree)


def _content(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_form_of_the_patches() -> None:
    """git format-patch form, little context, each described in the README's table."""
    readme = (ROOT / "patches/README.md").read_text()
    for number, name in enumerate(NAMES, 1):
        text = (SERIES / name).read_text()
        assert name.startswith(f"{number:04d}-") and f"`{name}`" in readme
        assert text.startswith("From 0000000000000000000000000000000000000000 ")
        info = subprocess.run(
            ["git", "mailinfo", os.devnull, os.devnull], input=text, capture_output=True, text=True, check=False
        )
        assert info.returncode == 0 and "Subject: " in info.stdout
        hunk_heads = [line for line in text.splitlines() if line.startswith("@@ ")]
        context = [line for line in text.splitlines() if line.startswith(" ")]
        assert hunk_heads and len(context) <= 3 * len(hunk_heads)


# -- what a patched vLLM does by itself, without this project's plugin


@pytest.fixture(scope="module")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copy_package(tmp_path_factory.mktemp("patched"))
    assert apply_patches(folder).returncode == 0
    return folder


@pytest.fixture(scope="module")
def unpatched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_package(tmp_path_factory.mktemp("unpatched"))


def ask(folder: Path, code: str) -> dict:
    """Run `code` with the vLLM of `folder` and no plugin; it sets `answer`."""
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    program = f"{code}\nimport json, vllm\nprint('ANSWER', json.dumps(answer | {{'vllm': vllm.__file__}}))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert done.returncode == 0 and found, done.stderr
    answer = json.loads(found[0].removeprefix("ANSWER "))
    assert Path(answer.pop("vllm")).is_relative_to(folder)
    return answer


LAYERS = """
from types import SimpleNamespace
answer = {}

from vllm.v1.worker.gpu_model_runner import GPUModelRunner
def aux_layers(**config):
    draft = SimpleNamespace(hf_config=SimpleNamespace(**config))
    runner = SimpleNamespace(speculative_config=SimpleNamespace(draft_model_config=draft))
    return GPUModelRunner._get_eagle3_aux_layers_from_config(runner)
answer["dflash"] = aux_layers(dflash_config={"target_layer_ids": [1, 3, 6]})
answer["speculators"] = aux_layers(
    eagle_aux_hidden_state_layer_ids=[2, 4], dflash_config={"target_layer_ids": [2, 4]})
answer["none"] = aux_layers(dflash_config={})
"""

WINDOWS = """
import torch
import vllm.model_executor.models.qwen3_dflash as model
from vllm.model_executor.layers.attention import Attention

kinds = ["sliding_attention", "full_attention"]
def windows(**config):
    try:
        return model.dflash_sliding_windows(SimpleNamespace(num_hidden_layers=2, **config))
    except ValueError as error:
        return str(error)
answer["mixed"] = windows(layer_types=kinds, sliding_window=2048, use_sliding_window=True)
answer["no layer_types"] = windows()
answer["switched off"] = windows(layer_types=kinds, sliding_window=2048, use_sliding_window=False)
answer["too few"] = windows(layer_types=kinds[:1], sliding_window=2048)

def built(window, bounds):
    def init(self, *args, **kwargs):
        torch.nn.Module.__init__(self)
        self.impl = SimpleNamespace(sliding_window=bounds)
        self.sliding_window = window
    Attention.__init__, original = init, Attention.__init__
    try:
        return model.DFlashAttention()
    finally:
        Attention.__init__ = original
answer["bounds"] = [built(w, b).impl.sliding_window for w, b in ((9, (8, 0)), (None, (-1, -1)), (9, 9))]
layer = built(9, (8, 0))
layer.kv_cache_dtype, layer.attn_type, layer.num_kv_heads, layer.head_size = "auto", "decoder", 2, 4
layer.head_size_v, layer.kv_cache_torch_dtype = 4, torch.float32
config = SimpleNamespace(cache_config=SimpleNamespace(block_size=16))
answer["spec"] = type(layer.get_kv_cache_spec(config)).__name__
answer["window kept"] = layer.sliding_window
"""


def test_layers_by_themselves(overlay: Path) -> None:
    """Auxiliary layers, windows by configuration, and bounds that let a block see its later positions."""
    answer = ask(overlay, LAYERS + WINDOWS)
    assert answer["dflash"] == [2, 4, 7]
    assert answer["speculators"] == [2, 4], "a speculators checkpoint counts as vLLM does"
    assert answer["none"] is None
    assert answer["mixed"] == [2048, None]
    assert answer["no layer_types"] == [None, None]
    assert "use_sliding_window must be true" in answer["switched off"]
    assert "each of 2 layers" in answer["too few"]
    assert answer["bounds"] == [[8, -1], [-1, -1], 9]
    assert answer["spec"] == "FullAttentionSpec" and answer["window kept"] == 9


def test_layers_of_an_unpatched_vllm(unpatched: Path) -> None:
    """What the patch is for: the wrong auxiliary layers, and no word of windows."""
    answer = ask(
        unpatched, LAYERS + "import vllm.model_executor.models.qwen3_dflash as model\nanswer['n'] = dir(model)"
    )
    assert answer["dflash"] == [1, 3, 6]
    assert "dflash_sliding_windows" not in answer["n"]


METHOD = """
from vllm.engine.arg_utils import EngineArgs
answer = {{}}
try:
    parsed = EngineArgs(model={target!r}, enforce_eager=True, max_model_len=256, speculative_config=dict(
        method="dflash_ddtree", model={drafter!r}, num_speculative_tokens=15)).create_engine_config()
    found = parsed.speculative_config
    answer |= dict(method=found.method, slots=found.max_num_new_slots_for_drafting, dflash=found.use_dflash(),
        eagle=found.use_eagle(), draft=found.draft_model_config.hf_config.architectures)
    from types import SimpleNamespace
    from vllm.v1.spec_decode.dflash import DFlashProposer
    try:
        DFlashProposer(parsed, "cpu")
    except ValueError as error:
        answer["stock"] = str(error)
except Exception as error:
    answer["error"] = str(error)
"""


def test_the_method_is_vllms_own(overlay: Path, unpatched: Path) -> None:
    """Configuration accepts it and reserves nothing; the stock proposer refuses it. Unpatched, it is unknown."""
    weights = ROOT / "aeon_ddtree/proving_ground/weights"
    code = METHOD.format(target=str(weights / "target"), drafter=str(weights / "drafter"))
    answer = ask(overlay, code)
    assert "error" not in answer, answer["error"]
    assert answer | {"stock": ""} == {
        "method": "dflash_ddtree",
        "slots": 0,
        "dflash": True,
        "eagle": True,
        "draft": ["DFlashDraftModel"],
        "stock": "",
    }
    assert "--worker-cls" in answer["stock"]
    assert "method" in ask(unpatched, code)["error"]


def test_check_of_the_installed_package() -> None:
    """In place, whichever of both it is: patched (in an image) or as released."""
    done = apply_patches(installed(), "--check")
    assert done.returncode == 0, done.stdout + done.stderr
