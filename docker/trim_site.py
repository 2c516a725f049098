#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make the CPU image's environment smaller: trim_site.py SITE_PACKAGES MODULE...

Removes what is there to build against (headers, static libraries, CMake files) and, where torch is a CUDA build, those
of its CUDA libraries that importing every MODULE does not load: without a GPU nothing asks for them later. Prints what
went, in MiB.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

# What remains to be used on a CPU needs no compiler: recipes run eagerly there.
BUILD_ONLY = (
    "torch/include",
    "torch/share/cmake",
    "torch/bin/[!t]*",  # torch_shm_manager stays
    "torch/lib/*.a",
    "nvidia/**/include",
    "nvidia/**/*.a",
)
MAPPED = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
for line in open("/proc/self/maps"):
    path = line.split(maxsplit=5)[5:]
    if path:
        print(path[0].strip())
"""


def size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; links count nothing."""
    if path.is_symlink():
        return 0
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def loaded(modules: list[str]) -> set[Path]:
    """Files that a process has mapped after importing `modules`. Raises CalledProcessError when one does not import."""
    answer = subprocess.run([sys.executable, "-c", MAPPED, *modules], check=True, stdout=subprocess.PIPE, text=True)
    return {Path(line).resolve() for line in answer.stdout.splitlines() if line.startswith("/")}


def trim(site: Path, modules: list[str]) -> int:
    """Removes files below `site`; returns how many bytes went."""
    gone = 0
    for pattern in BUILD_ONLY:
        for path in sorted(site.glob(pattern)):
            if path.exists():
                gone += size(path)
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    cuda = [*site.glob("nvidia/**/*.so*"), *site.glob("torch/lib/*cuda*.so*"), *site.glob("torch/lib/*nvrtc*.so*")]
    if cuda:
        kept = loaded(modules)
        for library in sorted(set(cuda)):
            if library.resolve() not in kept:
                gone += size(library)
                library.unlink()
        loaded(modules)
    return gone


def main() -> int:
    if len(sys.argv) < 3 or not Path(sys.argv[1]).is_dir():
        print("trim_site: usage: trim_site.py SITE_PACKAGES MODULE...", file=sys.stderr)
        return 2
    site = Path(os.path.abspath(sys.argv[1]))
    before = size(site)
    gone = trim(site, sys.argv[2:])
    print(f"trim_site: {before >> 20} MiB, {gone >> 20} MiB of them removed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
