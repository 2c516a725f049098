# SPDX-License-Identifier: Apache-2.0
"""A DFlash drafter against its target: by both configurations and by the shapes in the drafter's own files.

Source: the DFlash reference; a layer id i names the hidden state after layer i, counted from 0.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..failure import Refusal
from .finding import Finding
from .models import read_json, tensors, text_config

ARCHITECTURE = "DFlashDraftModel"
OTHER = "use the drafter that was trained for this target"
LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")
SECTION = "dflash_config"


def is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def block_size(draft_config: Mapping[str, Any]) -> int | None:
    """Positions of a block, the bonus included; the horizon is one less. None when the configuration does not say."""
    size = draft_config.get("block_size")
    return size if isinstance(size, int) and not isinstance(size, bool) and size >= 2 else None


def drafter_horizon(drafter: Path | str | None) -> int | None:
    """Positions the drafter predicts: its block less the bonus. None while its configuration cannot be read."""
    if not isinstance(drafter, Path) or not os.path.isfile(drafter / "config.json"):
        return None
    try:
        block = block_size(read_json(drafter / "config.json"))
    except Refusal:
        return None  # said by the check of its folder
    return None if block is None else block - 1


def drafter_fits(target: Path | str, drafter: Path | str) -> Iterator[Finding]:
    """Architecture, vocabulary, hidden size, layers, mask id and block size. Raises Refusal on unreadable JSON."""
    if isinstance(target, str) or isinstance(drafter, str):
        return
    whole = read_json(target / "config.json")
    goal, file = text_config(whole), drafter / "config.json"
    draft = read_json(file)
    dflash = draft.get(SECTION)
    names = draft.get("architectures")
    if isinstance(names, list) and ARCHITECTURE not in names:
        yield Finding(
            str(file), "architectures", names, f"[{ARCHITECTURE!r}]", "give a DFlash drafter", "drafter.method"
        )
        return
    if not isinstance(dflash, dict):
        expected = "a DFlash drafter's configuration"
        yield Finding(str(file), SECTION, "missing", expected, "give a DFlash drafter", "drafter.method")
        return
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if not is_number(goal.get(name)):
            place, again = str(target / "config.json"), "copy the target again"
            yield Finding(place, name, goal.get(name), "a whole number", again, "model.config-field")
            return
    vocabulary, hidden, layers = goal["vocab_size"], goal["hidden_size"], goal["num_hidden_layers"]
    kinds = goal.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and len(kinds) == layers):
        place, expected = str(target / "config.json"), f"a list of {layers} kinds (num_hidden_layers)"
        yield Finding(place, "layer_types", kinds, expected, "copy the target again", "model.config-field")
        return
    if draft.get("vocab_size") != vocabulary:
        expected = f"{vocabulary} as in the target"
        yield Finding(str(file), "vocab_size", draft.get("vocab_size"), expected, OTHER, "drafter.vocabulary")
    # The drafter reads the target's hidden states; unless it names their size apart, its own is meant.
    size_field = "target_hidden_size" if draft.get("target_hidden_size") is not None else "hidden_size"
    if draft.get(size_field) != hidden:
        expected = f"{hidden} as in the target"
        yield Finding(str(file), size_field, draft.get(size_field), expected, OTHER, "drafter.hidden-size")
    meant = draft.get("num_target_layers")
    if meant is not None and meant != layers:
        expected = f"{layers} as in the target"
        yield Finding(str(file), "num_target_layers", meant, expected, OTHER, "drafter.target-layers")
    ids = dflash.get("target_layer_ids")
    yield from _layer_ids(file, ids, layers)
    yield from _mask(file, draft, dflash, vocabulary)
    if block_size(draft) is None:
        got = draft.get("block_size", "missing")
        yield Finding(str(file), "block_size", got, "a whole number, at least 2", OTHER, "drafter.block-size")
    if isinstance(ids, list):
        yield from _shapes(drafter, draft, len(ids), hidden)


def _layer_ids(file: Path, ids: Any, layers: int) -> Iterator[Finding]:
    field, code = f"{SECTION}.target_layer_ids", "drafter.layer-ids"
    if not isinstance(ids, list) or not ids or not all(map(is_number, ids)):
        yield Finding(str(file), field, ids, "a list of layer numbers", OTHER, code)
    elif min(ids) < 0 or max(ids) >= layers:
        expected = f"numbers from 0 to {layers - 1} (the target has {layers} layers)"
        yield Finding(str(file), field, ids, expected, OTHER, code)
    elif len(set(ids)) != len(ids):
        yield Finding(str(file), field, ids, "different layers", OTHER, code)


def _mask(file: Path, draft: Mapping[str, Any], dflash: Mapping[str, Any], vocabulary: int) -> Iterator[Finding]:
    field, code, mask = f"{SECTION}.mask_token_id", "drafter.mask-id", dflash.get("mask_token_id")
    expected = f"an id from 0 to {vocabulary - 1}"
    if "mask_token_id" not in dflash and "mask_token_id" in draft:
        cure = f"move it from the top level, where it is not read, into {SECTION}"
        yield Finding(str(file), field, "missing (None)", expected, cure, "drafter.mask-place")
    elif not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < vocabulary:
        yield Finding(str(file), field, mask, expected, OTHER, code)


def _shapes(folder: Path, draft: Mapping[str, Any], num_ids: int, hidden: int) -> Iterator[Finding]:
    """`fc` takes the listed layers' hidden states side by side, and each of the drafter's layers has weights."""
    found = tensors(folder)
    if not found:  # weights in another format, or damaged, which the folder's check says
        return
    fc = next((tensor for name, tensor in found.items() if name in ("fc.weight", "model.fc.weight")), None)
    if fc is None:
        yield Finding(str(folder), "fc.weight", "missing", "the projection of a DFlash drafter", OTHER, "drafter.fc")
    elif len(fc.shape) != 2 or fc.shape[1] != num_ids * hidden:
        expected = f"{num_ids * hidden} columns ({num_ids} target layers of {hidden})"
        yield Finding(str(folder), "fc.weight", f"of shape {list(fc.shape)}", expected, OTHER, "drafter.fc")
    elif is_number(draft.get("hidden_size")) and fc.shape[0] != draft["hidden_size"]:
        expected = f"{draft['hidden_size']} rows (hidden_size)"
        yield Finding(str(folder), "fc.weight", f"of shape {list(fc.shape)}", expected, OTHER, "drafter.fc")
    layers = {int(match.group(1)) for name in found if (match := LAYER.match(name))}
    count: Any = draft.get("num_hidden_layers")
    if (layers or is_number(count)) and (len(layers) != count or max(layers, default=-1) != len(layers) - 1):
        place, given = str(folder / "config.json"), draft.get("num_hidden_layers", "missing")
        got = f"{given}, and the weights have {len(layers)} layers"
        yield Finding(place, "num_hidden_layers", got, f"{len(layers)}", "copy the drafter again", "drafter.layers")
