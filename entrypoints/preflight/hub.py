# SPDX-License-Identifier: Apache-2.0
"""Models named by a Hugging Face id: where the cache lies, and whether it has them. huggingface_hub is not imported."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from .finding import Finding
from .machine import Machine

TRUE = {"1", "on", "yes", "true"}


def is_offline(environ: Mapping[str, str]) -> str | None:
    """The variable that forbids the network, None when it is allowed."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if environ.get(name, "").lower() in TRUE:
            return name
    return None


def hub_cache(machine: Machine) -> Path:
    """As the hub's library has it: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub."""
    environ = machine.environ
    home = machine.home or Path("/")
    if named := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(named).expanduser()
    if named := environ.get("HF_HOME"):
        return Path(named).expanduser() / "hub"
    cache = environ.get("XDG_CACHE_HOME")
    return (Path(cache).expanduser() if cache else home / ".cache") / "huggingface" / "hub"


def cached_snapshot(repository: str, revision: str | None, machine: Machine | None = None) -> Path | None:
    """Folder of the cached snapshot of `revision` (a commit, branch or tag; None for main), or None."""
    root = hub_cache(machine or Machine()) / f"models--{repository.replace('/', '--')}"
    wanted = revision or "main"
    try:
        wanted = (root / "refs" / wanted).read_text(encoding="utf-8").strip()
    except OSError:
        pass  # a commit's own name
    folder = root / "snapshots" / wanted
    return folder if os.path.lexists(folder / "config.json") else None


def on_hub(reference: Path | str, revision: str | None, field: str, origin: str, machine: Machine) -> Iterator[Finding]:
    """A hub's id: cached where the network is forbidden; a word of warning where it will be fetched."""
    if not isinstance(reference, str) or cached_snapshot(reference, revision, machine) is not None:
        return
    root = Path("/", reference.partition("/")[0])
    if root.is_dir():  # models/x where /models/x was meant: the hub would be asked for it
        expected = "a folder that exists, or an id of the Hugging Face hub"
        cure = f"write /{reference} if that folder is mounted ({root} is here), or mount it"
        yield Finding(origin, field, f"{reference}, which does not exist", expected, cure, f"{field}.path")
        return
    got = f"{reference}, which is neither a folder here nor in the cache {hub_cache(machine)}"
    if offline := is_offline(machine.environ):
        expected = f"a mounted folder or a cached model, as {offline} forbids the network"
        cure = f"mount it and give its path with --{field}, or run `aeon-ddtree download` with the network"
        yield Finding(origin, field, got, expected, cure, f"{field}.offline")
    else:
        expected = "a folder (without one it is fetched from the Hugging Face hub)"
        cure = f"if a mount was meant, correct the path of --{field}; else `aeon-ddtree download` fetches it beforehand"
        yield Finding(origin, field, got, expected, cure, f"{field}.not-cached", warning=True)
