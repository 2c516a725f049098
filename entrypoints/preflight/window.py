# SPDX-License-Identifier: Apache-2.0
"""Sliding-window layers of a drafter: fields that agree with each other, and a vLLM that honours them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .drafter import is_number
from .finding import Finding, Skipped
from .machine import Machine
from .models import read_json

KINDS = ("full_attention", "sliding_attention")
SOURCE = "model_executor/models/qwen3_dflash.py"
MARK = "def dflash_sliding_windows("  # which the patch adds; the stock drafter builds all its layers alike
PATCH = "patches/vllm/0001-dflash-sliding-window.patch"


def sliding_layers(draft: Mapping[str, Any]) -> int:
    kinds = draft.get("layer_types")
    return kinds.count(KINDS[1]) if isinstance(kinds, list) else 0


def sliding_window(drafter: Path) -> Iterator[Finding]:
    """Raises Refusal on unreadable JSON."""
    file = drafter / "config.json"
    draft = read_json(file)
    kinds, layers, window = draft.get("layer_types"), draft.get("num_hidden_layers"), draft.get("sliding_window")
    code, again = "drafter.window", "copy the drafter again"
    if kinds is None:
        if draft.get("use_sliding_window") is True:
            cure = "name each layer's kind, or set use_sliding_window to false"
            yield Finding(str(file), "layer_types", "missing", "the kind of every layer", cure, code)
        return
    if not isinstance(kinds, list) or not all(kind in KINDS for kind in kinds):
        yield Finding(str(file), "layer_types", kinds, f"a list of {' and '.join(KINDS)}", again, code)
        return
    if is_number(layers) and len(kinds) != layers:
        got, expected = f"a list of {len(kinds)}", f"{layers} entries (num_hidden_layers)"
        yield Finding(str(file), "layer_types", got, expected, again, code)
    count = sliding_layers(draft)
    if not count:
        return
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        expected = f"a number of tokens, as {count} layers are {KINDS[1]}"
        yield Finding(str(file), "sliding_window", window, expected, again, code)
    if draft.get("use_sliding_window") is False:
        expected = f"true, as {count} layers are {KINDS[1]}"
        yield Finding(str(file), "use_sliding_window", "false", expected, again, code)


def window_patch(drafter: Path, max_model_len: int, machine: Machine) -> Iterator[Finding]:
    """Whether the installed vLLM, by its source, honours windows that the context reaches beyond.

    Up to a context of one window, full attention is the same thing. Raises Refusal on unreadable JSON.
    """
    file = drafter / "config.json"
    draft = read_json(file)
    count, window = sliding_layers(draft), draft.get("sliding_window")
    if not count or (isinstance(window, int) and max_model_len <= window):
        return
    if machine.vllm_folder is None:
        raise Skipped("vLLM is not installed")
    try:
        source = (machine.vllm_folder / SOURCE).read_text(encoding="utf-8")
    except OSError:
        source = ""
    if MARK not in source:
        got = f"{count} × {KINDS[1]} of {window} tokens, which the installed vLLM would run as full attention"
        cure = f"apply {PATCH} (scripts/apply_patches), use this project's image, or give --max-model-len {window}"
        yield Finding(str(file), "layer_types", got, "a vLLM with the patch for windows", cure, "drafter.window-patch")
