#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write down what an image was made from: build_id.py --flavour NAME --out FOLDER [--fact KEY=VALUE]... [--patches DIR]

FOLDER/build.json   every fact: those given, versions of the installed distributions, a digest of the patches
FOLDER/build-id     the first 16 hex digits of the SHA-256 over those facts; equal inputs give equal ids
FOLDER/banner       the line that a server prints when it starts
"""

import argparse
import hashlib
import importlib.metadata as metadata
import json
import platform
import sys
from pathlib import Path

NAMED = ("aeon-ddtree", "vllm", "torch", "triton", "transformers", "flashinfer-python")
PRODUCTION = "production: the stable chain image (flat DFlash, k = 15); ddtree commits flat until its pair is promoted"


def patches_digest(folder: Path) -> dict[str, str]:
    """name -> SHA-256 of each patch that `folder`/series names, in order. Raises OSError when one is missing."""
    lines = (folder / "series").read_text(encoding="utf-8").splitlines()
    names = [line.split("#", 1)[0].strip() for line in lines]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names if name}


def collect(flavour: str, facts: dict[str, str], patches: Path | None) -> dict[str, object]:
    """All facts, JSON-ready, in a fixed order."""
    distributions = {}
    for distribution in metadata.distributions():
        distributions[distribution.metadata["Name"].lower().replace("_", "-")] = distribution.version
    return {
        "flavour": flavour,
        **dict(sorted(facts.items())),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "patches": patches_digest(patches) if patches else {},
        "distributions": dict(sorted(distributions.items())),
    }


def banner(build: dict[str, object], build_id: str) -> str:
    """Two lines: what this is, and which image serves production."""
    distributions = build["distributions"]
    assert isinstance(distributions, dict)
    versions = ", ".join(f"{name} {distributions[name]}" for name in NAMED if name in distributions)
    revision = str(build.get("revision", ""))[:12] or "unknown"
    patches = build["patches"]
    count = len(patches) if isinstance(patches, dict) else 0
    first = f"build {build_id} ({build['flavour']}, revision {revision}): {versions}; {count} patches"
    return f"aeon-ddtree: {first}\naeon-ddtree: {PRODUCTION}\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write down what an image was made from.")
    parser.add_argument("--flavour", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fact", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--patches", type=Path)
    options = parser.parse_args(arguments)
    facts = dict(fact.partition("=")[::2] for fact in options.fact)
    try:
        build = collect(options.flavour, facts, options.patches)
    except OSError as error:
        print(f"build_id: {error}; expected every patch that the series names", file=sys.stderr)
        return 1
    text = json.dumps(build, indent=2)
    build_id = hashlib.sha256(text.encode()).hexdigest()[:16]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "build.json").write_text(text + "\n", encoding="utf-8")
    (options.out / "build-id").write_text(build_id + "\n", encoding="utf-8")
    (options.out / "banner").write_text(banner(build, build_id), encoding="utf-8")
    print(build_id)
    return 0


if __name__ == "__main__":
    sys.exit(main())
