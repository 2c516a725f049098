# SPDX-License-Identifier: Apache-2.0
"""Checks before anything loads: small functions that yield failures. None imports torch, vLLM or transformers."""

import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .failure import Failure, Refusal
from .settings import TREE_BY_NAME

UNSAFE_VARIABLE = "DDTREE_UNSAFE_FULL_BRANCH_RESEARCH"
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def unsafe_mode(mode: str, environ: Mapping[str, str]) -> Iterator[Failure]:
    """The unpromoted branch policy starts only for those who say that they know."""
    if mode == "unsafe-full-branch" and environ.get(UNSAFE_VARIABLE) != "1":
        got = environ.get(UNSAFE_VARIABLE) or "not set"
        cure = f"set {UNSAFE_VARIABLE}=1 if this is research, or use the mode ddtree"
        yield Failure("environment", UNSAFE_VARIABLE, got, "1 for the mode unsafe-full-branch", cure)


def prefix_caching(mode: str, enabled: bool, origin: str) -> Iterator[Failure]:
    """A restored prefix has no drafter context, and one state slot no snapshots: in no mode until that is proven."""
    if enabled:
        yield Failure(origin, "prefix_caching", "true", f"false under {mode} (not proven lossless yet)", "remove it")


def tree_ranges(options: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[Failure]:
    """Ranges that do not need the engine's own judgement, so that the message can name where the value came from."""
    for name, low, high in (("budget", 1, 127), ("top_k", 1, None), ("root_leaves", 0, None)):
        value = options.get(name)
        if isinstance(value, int) and (value < low or (high is not None and value > high)):
            expected = f"{low} to {high}" if high is not None else f"at least {low}"
            yield Failure(
                origins[name],
                name,
                value,
                expected,
                f"give another value, for instance {TREE_BY_NAME[name].flag} {max(low, 15)}",
            )


def engine_options(options: Mapping[str, Any], horizon: int | None, place: str) -> Iterator[Failure]:
    """The engine's own judgement on the object in --additional-config; with the drafter's horizon where it is known."""
    from aeon_ddtree.engine.options import DDTreeOptions, OptionsError

    try:
        parsed = DDTreeOptions.from_mapping(dict(options))
        if horizon is not None and parsed.mode != "plain":
            parsed.policy(horizon)
    except OptionsError as error:
        raise Refusal(f"{place}: {' '.join(str(error).split())}") from None
    yield from ()


def model_folder(folder: Path | str, field: str, origin: str) -> Iterator[Failure]:
    """A folder with a config.json and every weight file its index lists. Hugging Face ids are left to the download."""
    if isinstance(folder, str):
        return
    cure = f"mount or download the {field} there, or give another with --{field}"
    if not folder.is_dir():
        yield Failure(
            origin,
            field,
            f"{folder}, which {'is a file' if folder.exists() else 'does not exist'}",
            "a folder with a model",
            cure,
        )
    elif not any(folder.iterdir()):
        yield Failure(origin, field, f"{folder}, which is empty", "a folder with a model", cure)
    elif not (folder / "config.json").is_file():
        yield Failure(str(folder), "config.json", "missing", "a model's configuration", cure)
    elif not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        yield Failure(str(folder), "weights", "missing", "at least one .safetensors file", cure)
    else:
        for index in folder.glob("*.index.json"):
            shards = sorted(set(read_json(index).get("weight_map", {}).values()))
            for shard in shards:
                if not (folder / shard).is_file():
                    yield Failure(
                        str(index), shard, "missing", f"all {len(shards)} files of the index", "copy the model again"
                    )
                    break


def read_json(file: Path) -> dict[str, Any]:
    """Raises Refusal when `file` is not a JSON object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refusal(f"{file}: not readable as JSON ({error}); copy the model again") from None
    if not isinstance(content, dict):
        raise Refusal(f"{file}: holds {type(content).__name__}, expected a JSON object; copy the model again")
    return content


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language part of a configuration: multimodal models nest it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def drafter_fits(target: Path | str, drafter: Path | str) -> Iterator[Failure]:
    """A DFlash drafter against its target, by configuration: vocabulary, hidden size, layer ids, mask id, block size.

    Source: the DFlash reference; a layer id i names the hidden state after layer i, counted from 0.
    """
    if isinstance(target, str) or isinstance(drafter, str):
        return
    goal, file = text_config(read_json(target / "config.json")), drafter / "config.json"
    draft = read_json(file)
    dflash = draft.get("dflash_config")
    cure = "use the drafter that was trained for this target"
    if not isinstance(dflash, dict):
        yield Failure(
            str(file), "dflash_config", "missing", "a DFlash drafter's configuration", "give a DFlash drafter"
        )
        return
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if not isinstance(goal.get(name), int):
            yield Failure(str(target / "config.json"), name, goal.get(name), "a whole number", "copy the target again")
            return
    vocabulary, hidden, layers = goal["vocab_size"], goal["hidden_size"], goal["num_hidden_layers"]
    if draft.get("vocab_size") != vocabulary:
        yield Failure(str(file), "vocab_size", draft.get("vocab_size"), f"{vocabulary} as in the target", cure)
    # The drafter reads the target's hidden states; unless it names their size apart, its own is meant.
    size_field = "target_hidden_size" if draft.get("target_hidden_size") is not None else "hidden_size"
    if draft.get(size_field) != hidden:
        yield Failure(str(file), size_field, draft.get(size_field), f"{hidden} as in the target", cure)
    yield from _layer_ids(file, dflash.get("target_layer_ids"), layers, cure)
    mask = dflash.get("mask_token_id", draft.get("mask_token_id"))
    if not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < vocabulary:
        yield Failure(str(file), "dflash_config.mask_token_id", mask, f"an id from 0 to {vocabulary - 1}", cure)
    if block_size(draft) is None:
        yield Failure(str(file), "block_size", draft.get("block_size"), "a whole number, at least 2", cure)


def _layer_ids(file: Path, ids: Any, layers: Any, cure: str) -> Iterator[Failure]:
    field = "dflash_config.target_layer_ids"
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        yield Failure(str(file), field, ids, "a list of layer numbers", cure)
    elif min(ids) < 0 or max(ids) >= layers:
        yield Failure(str(file), field, ids, f"numbers from 0 to {layers - 1} (the target has {layers} layers)", cure)
    elif len(set(ids)) != len(ids):
        yield Failure(str(file), field, ids, "different layers", cure)


def block_size(draft_config: Mapping[str, Any]) -> int | None:
    """Positions of a block, the bonus included; the horizon is one less. None when the configuration does not say."""
    size = draft_config.get("block_size")
    return size if isinstance(size, int) and not isinstance(size, bool) and size >= 2 else None


def drafter_horizon(drafter: Path | str | None) -> int | None:
    """Positions the drafter predicts: its block less the bonus. None while its configuration is not at hand."""
    if isinstance(drafter, Path) and (drafter / "config.json").is_file():
        block = block_size(read_json(drafter / "config.json"))
        return None if block is None else block - 1
    return None


def chain_length(value: int, origin: str, longest: int | None) -> Iterator[Failure]:
    """The chain cannot be longer than what the drafter predicts."""
    if value < 1 or (longest is not None and value > longest):
        expected = "at least 1" if longest is None else f"1 to {longest} (the drafter's block, less the bonus)"
        yield Failure(origin, "horizon", value, expected, "leave it out to use the drafter's own")


def port_free(host: str, port: int, origin: str) -> Iterator[Failure]:
    """Binds the port for a moment, as the server will."""
    field = "port"
    if not 0 <= port <= 65535:
        yield Failure(origin, field, port, "0 to 65535", "give another with --port")
        return
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        yield Failure(
            origin, "host", host, "an address of this machine", f"give another with --host ({error.strerror})"
        )
    except OSError as error:
        got = f"{port}, which cannot be bound on {host} ({os.strerror(error.errno or 0)})"
        yield Failure(origin, field, got, "a free port", "stop what listens there or give another with --port")
