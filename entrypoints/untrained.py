# SPDX-License-Identifier: Apache-2.0
"""A drafter that has learnt nothing, for a target that has none: `drafter: untrained:HORIZON` in a recipe.

Its drafts are arbitrary, so hardly any is accepted; what is served says what the target says all the same, and that is
what a proving ground is to show. It is made from the target's configuration, into the user's cache, before a start.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import preflight
from .failure import Refusal

PREFIX = "untrained:"
LAYERS, HEAD, SPREAD, SEED = 1, 64, 0.02, 7


def horizon_of(reference: str, origin: str) -> int | None:
    """HORIZON of `untrained:HORIZON`, None for any other reference. Raises Refusal when it is no number."""
    if not reference.startswith(PREFIX):
        return None
    number = reference.removeprefix(PREFIX)
    if not number.isdecimal() or not 1 <= int(number) <= 127:
        raise Refusal(f"{origin}: drafter is {reference}, expected untrained:HORIZON from 1 to 127; correct it")
    return int(number)


def place(target: Path | str, revision: str | None, horizon: int) -> Path:
    """Where the drafter of this target lies, or will."""
    key = hashlib.sha256(json.dumps([str(target), revision, horizon]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return cache / "aeon-ddtree" / "untrained" / key


def _target_config(target: Path | str, revision: str | None) -> dict[str, Any]:
    """The target's configuration; of a hub id from the cache, or fetched. Raises Refusal."""
    file: Path | None = target / "config.json" if isinstance(target, Path) else None
    if isinstance(target, str):
        snapshot = preflight.cached_snapshot(target, revision)
        file = None if snapshot is None else snapshot / "config.json"
        if file is None or not file.is_file():
            from huggingface_hub import hf_hub_download

            try:
                file = Path(hf_hub_download(target, "config.json", revision=revision))
            except Exception as error:
                why = " ".join(str(error).split())[:200]
                raise Refusal(
                    f"model {target}: config.json cannot be fetched ({why}); mount the model and give its folder with "
                    "--model, or allow the network"
                ) from None
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file is not None else None
    except (OSError, ValueError) as error:
        raise Refusal(f"{file}: cannot be read ({error}); copy the model again") from None
    if not isinstance(content, dict):
        raise Refusal(f"{file}: holds {type(content).__name__}, expected a JSON object; copy the model again")
    text = content.get("text_config")
    return text if isinstance(text, dict) else content


def configuration(goal: Mapping[str, Any], horizon: int) -> dict[str, Any]:
    """A DFlash drafter's configuration for a target's. Raises Refusal when the target's says too little."""
    wanted = ("hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings")
    for name in wanted:
        if not isinstance(goal.get(name), int):
            raise Refusal(f"config.json of the target: {name} is {goal.get(name)!r}, expected a whole number")
    hidden, vocabulary, layers, longest = (goal[name] for name in wanted)
    # A layer id names the hidden state after that layer, counted from 0; the last one's goes to the output instead.
    ids = sorted({max(0, round(part * (layers - 2) / 3)) for part in range(4)})
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": vocabulary, "hidden_size": hidden,
        "intermediate_size": 2 * hidden, "num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": HEAD, "attention_bias": False,
        "attention_dropout": 0.0, "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": longest,
        "max_window_layers": LAYERS, "use_sliding_window": False, "sliding_window": None, "tie_word_embeddings": False,
        "rope_parameters": rope, "rope_theta": rope["rope_theta"], "num_target_layers": layers,
        "block_size": horizon + 1, "use_cache": True, "dtype": "float16",
        # The last row of the vocabulary: padding in most models, and any row will do for a drafter without knowledge.
        "dflash_config": {"mask_token_id": vocabulary - 1, "target_layer_ids": ids},
    }  # fmt: skip


def _weights(config: Mapping[str, Any]) -> dict[str, Any]:
    """name -> float16 array, as a checkpoint names them."""
    import numpy

    noise, hidden, wide = numpy.random.default_rng(SEED), config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * HEAD
    shapes = {"fc": (hidden, hidden * len(config["dflash_config"]["target_layer_ids"]))}
    norms = {"hidden_norm": hidden, "norm": hidden}
    for layer in range(LAYERS):
        attention, mlp = f"layers.{layer}.self_attn.", f"layers.{layer}.mlp."
        shapes |= {attention + f"{name}_proj": (heads, hidden) for name in "qkv"}
        shapes |= {attention + "o_proj": (hidden, heads), mlp + "down_proj": (hidden, wide)}
        shapes |= {mlp + f"{name}_proj": (wide, hidden) for name in ("gate", "up")}
        norms |= {attention + "q_norm": HEAD, attention + "k_norm": HEAD}
        norms |= {f"layers.{layer}.{name}_layernorm": hidden for name in ("input", "post_attention")}
    made = {f"{name}.weight": noise.normal(0, SPREAD, shape).astype("float16") for name, shape in shapes.items()}
    return made | {f"{name}.weight": numpy.ones(size, "float16") for name, size in norms.items()}


def make(target: Path | str, revision: str | None, horizon: int) -> Path:
    """The drafter's folder, written unless it is there already and fits. Raises Refusal."""
    folder = place(target, revision, horizon)
    config = configuration(_target_config(target, revision), horizon)
    text = json.dumps(config, indent=2)
    try:
        if (folder / "config.json").read_text(encoding="utf-8") == text:
            return folder
    except OSError:
        pass
    from safetensors.numpy import save_file

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as half:
            new = Path(half) / "new"
            new.mkdir()
            save_file(_weights(config), new / "model.safetensors", metadata={"format": "pt"})
            (new / "config.json").write_text(text, encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            new.rename(folder)
    except OSError as error:
        raise Refusal(
            f"{folder}: cannot be written ({error.strerror}); mount a folder that can be written at "
            f"{folder.parents[2]}, or set XDG_CACHE_HOME to one"
        ) from None
    return folder
