# SPDX-License-Identifier: Apache-2.0
"""A model's folder: there, readable and complete. Only configurations, indexes and headers are read."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..failure import Refusal
from .finding import Finding
from .headers import Broken, Tensor, read_header

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model")
NUMBERED = re.compile(r"(.*-)(\d{5})-of-(\d{5})(\.\w+)")
AGAIN = "copy the model again"


def model_folder(folder: Path | str, field: str, origin: str) -> Iterator[Finding]:
    """Everything that keeps the model in `folder` from loading, as far as its files show. A hub's id says nothing yet.

    field: "model" or "drafter"; origin: where the path was given.
    """
    if isinstance(folder, str):
        return
    cure = f"mount or download the {field} there, or give another with --{field}"
    # os.path answers False, where pathlib raises, behind a folder that this user may not enter.
    if os.path.islink(folder) and not os.path.exists(folder):
        yield from _link(folder, folder, field)
    elif not os.path.isdir(folder):
        got = f"{folder}, which {'is a file' if os.path.exists(folder) else _absence(folder)}"
        yield Finding(origin, field, got, "a folder with a model", cure, f"{field}.path")
    elif not os.access(folder, os.R_OK | os.X_OK):
        got = f"{folder}, which user {os.getuid()} cannot read"
        yield Finding(origin, field, got, "a readable folder", "correct its permissions", f"{field}.unreadable")
    elif not any(folder.iterdir()):
        got = f"{folder}, which is empty"
        yield Finding(origin, field, got, "a folder with a model", cure, f"{field}.empty")
    else:
        yield from _files(folder, field, cure)


def _absence(folder: Path) -> str:
    try:
        folder.stat()
    except PermissionError:
        return f"user {os.getuid()} cannot reach"
    except OSError:
        pass
    return "does not exist"


def _files(folder: Path, field: str, cure: str) -> Iterator[Finding]:
    links = [finding for file in sorted(folder.iterdir()) for finding in _link(folder, file, field)]
    yield from links
    if any(not finding.warning for finding in links):
        return
    config = folder / "config.json"
    if not config.is_file():
        yield Finding(str(folder), "config.json", "missing", "a model's configuration", cure, f"{field}.config-missing")
        return
    try:
        content = read_json(config)
    except Refusal as refusal:
        yield Finding(str(config), "config.json", f"not readable as JSON ({refusal.__cause__ or 'no object'})",
                      "a JSON object", AGAIN, f"{field}.config-invalid")  # fmt: skip
        return
    names = content.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        got = content.get("architectures", "missing")
        yield Finding(
            str(config),
            "architectures",
            got,
            "a list with the name of the model's class",
            AGAIN,
            f"{field}.architecture",
        )
        return
    yield from _weights(folder, field, cure)
    if field == "model" and not any((folder / name).is_file() for name in TOKENIZERS):
        yield Finding(
            str(folder), "tokenizer.json", "missing", "a tokenizer", AGAIN, f"{field}.tokenizer", warning=True
        )


def _link(folder: Path, file: Path, field: str) -> Iterator[Finding]:
    """A link that leads nowhere, or (a warning) out of the folder, which is what a mount of it alone would lose."""
    if not file.is_symlink():
        return
    target = Path(os.path.normpath(file.parent / os.readlink(file)))
    inside = file != folder and target.is_relative_to(folder)
    got = f"a link to {target}"
    if not file.exists():
        if inside:
            yield Finding(str(folder), file.name, got, "a link to a file that exists", AGAIN, f"{field}.link-broken")
        else:
            cure = f"mount the folder that holds {target} too (for the Hugging Face cache: the whole cache), or copy "
            cure += "the model with its links followed (cp -L)"
            expected = "a file inside the mount: that target is not there"
            yield Finding(str(folder), file.name, got, expected, cure, f"{field}.link-outside")
    elif not inside and file != folder and not target.is_relative_to(_hub_root(folder)):
        cure = "mount the link's target too when this folder goes into a container"
        yield Finding(
            str(folder), file.name, got, "a file inside the folder", cure, f"{field}.link-outside", warning=True
        )


def _hub_root(folder: Path) -> Path:
    """The Hugging Face cache keeps files in blobs/ beside snapshots/: links between the two are its own."""
    return folder.parent.parent if folder.parent.name == "snapshots" else folder


def _weights(folder: Path, field: str, cure: str) -> Iterator[Finding]:
    files = sorted(file for pattern in WEIGHTS for file in folder.glob(pattern))
    indexes = sorted(folder.glob("*.index.json"))
    for index in indexes:
        yield from _index(folder, index, field)
    if not files and not indexes:
        yield Finding(str(folder), "weights", "missing", "at least one .safetensors file", cure, f"{field}.weights")
    if not indexes:
        yield from _numbered(folder, [file.name for file in files], field)
    for file in files:
        try:
            if file.suffix == ".safetensors":
                if not read_header(file):
                    raise Broken("shard-empty", "a file without tensors", "tensors")
            elif file.stat().st_size == 0:
                raise Broken("shard-empty", "an empty file", "weights")
        except Broken as broken:
            yield Finding(str(folder), file.name, broken.got, broken.expected, AGAIN, f"{field}.{broken.what}")
        except PermissionError:
            got = f"not readable by user {os.getuid()}"
            yield Finding(
                str(folder), file.name, got, "a readable file", "correct its permissions", f"{field}.unreadable"
            )
        except OSError as error:
            got = f"not readable ({error.strerror})"
            yield Finding(str(folder), file.name, got, "a readable file", AGAIN, f"{field}.unreadable")


def _index(folder: Path, index: Path, field: str) -> Iterator[Finding]:
    """The index against the files: each is there, and holds the tensors that the index promises."""
    try:
        entries = read_json(index).get("weight_map")
    except Refusal:
        yield Finding(str(index), "", "not readable as JSON", "an index of weights", AGAIN, f"{field}.index-invalid")
        return
    if not isinstance(entries, dict) or not entries or not all(isinstance(name, str) for name in entries.values()):
        got = "missing" if entries is None else "no map" if not isinstance(entries, dict) else "empty or damaged"
        expected = "a map from tensors to files"
        yield Finding(str(index), "weight_map", got, expected, AGAIN, f"{field}.index-invalid")
        return
    shards: dict[str, set[str]] = {}
    for tensor, shard in entries.items():
        shards.setdefault(shard, set()).add(tensor)
    for shard, promised in sorted(shards.items()):
        file = folder / shard
        if Path(shard).name != shard:
            expected = "names of files beside the index"
            yield Finding(str(index), f"weight_map: {shard}", "a path", expected, AGAIN, f"{field}.index-invalid")
        elif not os.path.isfile(file):
            expected = f"all {len(shards)} files of the index"
            yield Finding(str(index), shard, "missing", expected, AGAIN, f"{field}.shard-missing")
        elif file.suffix == ".safetensors":
            try:
                absent = sorted(promised - set(read_header(file)))
            except (Broken, OSError):
                continue  # said by the file's own check
            if absent:
                got = f"a file without {absent[0]}" + (f" and {len(absent) - 1} more" if len(absent) > 1 else "")
                expected = "the tensors that the index promises"
                yield Finding(str(index), shard, got, expected, AGAIN, f"{field}.index-tensors")


def _numbered(folder: Path, names: list[str], field: str) -> Iterator[Finding]:
    """Files "-00001-of-00003" say themselves how many there are."""
    for name in names:
        if match := NUMBERED.fullmatch(name):
            start, _, count, end = match.groups()
            for number in range(1, int(count) + 1):
                wanted = f"{start}{number:05}-of-{count}{end}"
                if wanted not in names:
                    expected = f"all {int(count)} files"
                    yield Finding(str(folder), wanted, "missing", expected, AGAIN, f"{field}.shard-missing")
            return


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the safetensors files in `folder`; those of damaged files are left out."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            found |= read_header(file)
        except (Broken, OSError):
            continue
    return found


def read_json(file: Path) -> dict[str, Any]:
    """Raises Refusal when `file` is not a JSON object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal(f"{file}: not readable as JSON ({error}); copy the model again") from error
    if not isinstance(content, dict):
        raise Refusal(f"{file}: holds {type(content).__name__}, expected a JSON object; copy the model again")
    return content


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language part of a configuration: multimodal models nest it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config
