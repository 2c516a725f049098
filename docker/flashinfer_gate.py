#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check that FlashInfer's three distributions are of one version: flashinfer_gate.py VERSION [--import]

flashinfer-python, flashinfer-cubin and flashinfer-jit-cache come from different indexes; when one lags behind, kernels
are compiled on first use, or loading them fails. A local version (+cu130) does not count. With --import, FlashInfer's
own check at import must pass too. Exit code 1, one line each, when they differ.
"""

import argparse
import importlib
import importlib.metadata as metadata
import sys

TRIO = ("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache")


def complaints(expected: str) -> list[str]:
    """One line for each distribution that is missing or has another public version than `expected`."""
    found = []
    for name in TRIO:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            found.append(f"{name} is missing, expected {expected}")
            continue
        if version.partition("+")[0] != expected:
            found.append(f"{name} is {version}, expected {expected}")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check that FlashInfer's three distributions are of one version.")
    parser.add_argument("version")
    parser.add_argument("--import", dest="load", action="store_true", help="import FlashInfer as well")
    options = parser.parse_args(arguments)
    lines = complaints(options.version)
    if options.load and not lines:
        try:
            importlib.import_module("flashinfer")
        except Exception as error:  # its own version check raises RuntimeError, a missing library OSError
            lines.append(f"flashinfer does not import: {type(error).__name__}: {' '.join(str(error).split())}")
    for line in lines:
        print(f"flashinfer_gate: {line}; install all three of one version", file=sys.stderr)
    if not lines:
        print(f"flashinfer_gate: {', '.join(TRIO)} are {options.version}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
