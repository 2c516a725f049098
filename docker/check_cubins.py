#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Assert that compiled libraries hold machine code for a GPU: check_cubins.py --arch sm_121 PATH... [options]

PATH is an object or shared library, a wheel, or a folder; below folders and in wheels every `*.so` is looked at. Each
that holds any device code must hold a cubin for ARCH itself (sm_121, or its variants sm_121a and sm_121f); host-only
libraries are passed over. Published wheels lack sm_121 and fail only when a kernel is first called, hence the check.

  --may-jit GLOB   libraries that may hold PTX instead, which the driver compiles (file name; may be given again)
  --require GLOB   a library of this name must exist and hold device code (may be given again)
  --cuobjdump CMD  the tool [cuobjdump on PATH, or below CUDA_HOME]

Exit code 0: all do. 1: one line for each that does not. 2: nothing to look at, or no tool.
"""

import argparse
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NO_CODE = ("does not contain device code", "No kernel found")
ARCH = re.compile(r"\.sm_(\d+[a-z]?)\.(?:cubin|ptx)\b")


@dataclass(frozen=True)
class Library:
    """A file's device code. cubins, ptx: names such as sm_121a, in order, each once."""

    path: str
    cubins: tuple[str, ...]
    ptx: tuple[str, ...]

    def machine_code_for(self, arch: str) -> bool:
        return any(re.fullmatch(re.escape(arch) + "[a-z]?", name) for name in self.cubins)

    def complaint(self, arch: str, may_jit: bool) -> str:
        """One line, or '' when the library is as it should be."""
        if self.machine_code_for(arch) or (may_jit and self.ptx):
            return ""
        found = ", ".join(self.cubins) or "no cubin"
        found += f" and PTX for {', '.join(self.ptx)}" if self.ptx else ""
        return f"{self.path} holds {found}, expected {arch}; build with TORCH_CUDA_ARCH_LIST=12.1a"


class ToolError(Exception):
    """cuobjdump is missing, or could not read a file."""


def find_tool(named: str | None) -> str:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    for candidate in (named,) if named else ("cuobjdump", f"{home}/bin/cuobjdump"):
        if found := shutil.which(candidate):
            return found
    raise ToolError(f"found no {named or 'cuobjdump'}; install CUDA's cuobjdump, or name it with --cuobjdump")


def listing(tool: str, what: str, file: Path) -> tuple[str, ...]:
    """Architectures of the cubins (what="elf") or the PTX (what="ptx") in `file`. Raises ToolError."""
    answer = subprocess.run([tool, f"--list-{what}", str(file)], capture_output=True, text=True, check=False)
    text = answer.stdout + answer.stderr
    if answer.returncode != 0 and not any(phrase in text for phrase in NO_CODE):
        raise ToolError(f"{tool} cannot read {file}: {' '.join(text.split())[:300]}")
    return tuple(dict.fromkeys(f"sm_{arch}" for arch in ARCH.findall(answer.stdout)))


def shared_objects(path: Path, scratch: Path) -> Iterator[tuple[str, Path]]:
    """(name to show, file) for everything to look at. Raises ToolError for a path that is not there."""
    if path.is_dir():
        yield from ((str(file), file) for file in sorted(path.rglob("*.so")) if file.is_file())
    elif path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for name in sorted(wheel.namelist()):
                if name.endswith(".so"):
                    yield f"{path.name}:{name}", Path(wheel.extract(name, scratch))
    elif path.is_file():
        yield str(path), path
    else:
        raise ToolError(f"{path} does not exist, expected a library, a wheel or a folder")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Assert that compiled libraries hold machine code for a GPU.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--arch", required=True)
    parser.add_argument("--may-jit", action="append", default=[], metavar="GLOB")
    parser.add_argument("--require", action="append", default=[], metavar="GLOB")
    parser.add_argument("--cuobjdump")
    options = parser.parse_args(arguments)
    libraries: list[Library] = []
    looked_at = 0
    try:
        tool = find_tool(options.cuobjdump)
        with tempfile.TemporaryDirectory() as scratch:
            for path in options.paths:
                for name, file in shared_objects(path, Path(scratch)):
                    looked_at += 1
                    library = Library(name, listing(tool, "elf", file), listing(tool, "ptx", file))
                    if library.cubins or library.ptx:
                        libraries.append(library)
    except ToolError as error:
        print(f"check_cubins: {error}", file=sys.stderr)
        return 2

    def matches(library: Library, globs: list[str]) -> bool:
        return any(fnmatch.fnmatch(Path(library.path).name, glob) for glob in globs)

    complaints = [library.complaint(options.arch, matches(library, options.may_jit)) for library in libraries]
    for glob in options.require:
        if not any(matches(library, [glob]) for library in libraries):
            complaints.append(f"no library named {glob} holds device code, expected one; look into the build's log")
    if not libraries:
        complaints.append(f"none of {looked_at} files holds device code, expected {options.arch}")
    for library in libraries:
        jit = "" if library.machine_code_for(options.arch) else " (compiled by the driver at load)"
        print(f"{library.path}: {', '.join(library.cubins) or 'PTX only'}{jit if library.ptx else ''}")
    complaints = [line for line in complaints if line]
    for line in complaints:
        print(f"check_cubins: {line}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
