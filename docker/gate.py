#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that an image must pass before it gets a name: gate.py [CHECK...] [options]

Run inside the image, without a GPU. Each check is one line, `ok NAME: what` or `FAILED NAME: why`; exit code 1 when one
fails. Checks (all, unless some are named):

  imports    torch, Triton, transformers, vLLM and its compiled modules, FlashInfer, this project's packages
  versions   vLLM is VLLM_VERSION, CUDA of torch is CUDA_VERSION (where those variables are set)
  plugin     vLLM's plugin entry point leads to this project, and its function runs
  triton     a Triton kernel compiles for ARCH down to machine code with the ptxas that is configured
  nvcc       a CUDA kernel with the headers of fp16, bf16, fp8 and fp4 compiles for ARCH with CUDA_HOME's nvcc
  caches     the folders of JIT caches can be written
"""

import argparse
import importlib
import importlib.metadata as metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

MODULES = ("torch", "triton", "transformers", "vllm", "aeon_ddtree.engine.register", "aeon_entrypoints.cli")
CUDA_MODULES = ("vllm._C", "vllm._moe_C", "flashinfer")
CACHES = ("HF_HOME", "VLLM_CACHE_ROOT", "FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR", "HOME")
KERNEL = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def add_one(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) + 1.0, mask=at < n)

source = ASTSource(fn=add_one, signature={"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}, constexprs={"BLOCK": 128})
compiled = triton.compile(source, target=GPUTarget("cuda", %d, 32))
assert compiled.asm["cubin"][:4] == bytes([0x7F]) + b"ELF"
print(len(compiled.asm["cubin"]), compiled.asm["ptx"].split(".target ")[1].split()[0].rstrip(","))
"""
CUDA_SOURCE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
__global__ void add_one(float* x) { x[threadIdx.x] = __half2float(__float2half(x[threadIdx.x])) + 1.0f; }
"""


class Failed(Exception):
    """A check did not pass; the text says why, and what to do."""


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1][:300]


def imports(modules: list[str]) -> str:
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise Failed(f"{name} does not import: {type(error).__name__}: {' '.join(str(error).split())}") from error
    return f"{len(modules)} modules"


def versions() -> str:
    import torch

    wanted, got = os.environ.get("VLLM_VERSION"), metadata.version("vllm")
    if wanted and got.partition("+")[0] != wanted.partition("+")[0]:
        raise Failed(f"vllm is {got}, expected {wanted}; the wheel of another build was installed")
    cuda = os.environ.get("CUDA_VERSION", "")
    if cuda and not cuda.startswith(str(torch.version.cuda)):
        raise Failed(f"torch was built for CUDA {torch.version.cuda}, expected {cuda}; install the matching wheel")
    return f"vllm {got}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def plugin() -> str:
    entry_points = [p for p in metadata.entry_points(group="vllm.general_plugins") if p.name == "aeon_ddtree"]
    if len(entry_points) != 1:
        raise Failed(f"{len(entry_points)} entry points aeon_ddtree in vllm.general_plugins, expected 1")
    try:
        entry_points[0].load()()
    except Exception as error:
        raise Failed(f"{entry_points[0].value}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    return entry_points[0].value


def triton(arch: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.py")
        file.write_text(KERNEL % arch, encoding="utf-8")
        environ = {**os.environ, "TRITON_CACHE_DIR": folder}
        answer = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, env=environ, check=False)
    if answer.returncode != 0:
        raise Failed(f"no kernel for sm_{arch}: {last_line(answer.stderr)}; set TRITON_PTXAS_PATH to CUDA 13's ptxas")
    size, target = answer.stdout.split()
    return f"{size} bytes of machine code for {target}"


def nvcc(arch: int) -> str:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
        source.write_text(CUDA_SOURCE, encoding="utf-8")
        command = [f"{home}/bin/nvcc", "-cubin", f"-arch=sm_{arch}a", "-o", str(cubin), str(source)]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise Failed(f"{command[0]}: {error.strerror}; set CUDA_HOME") from error
        if answer.returncode != 0:
            raise Failed(f"no kernel for sm_{arch}a: {last_line(answer.stderr)}; {home} lacks a tool or header")
        return f"{cubin.stat().st_size} bytes of machine code with {home}/bin/nvcc"


def caches() -> str:
    checked = []
    for name in CACHES:
        if folder := os.environ.get(name):
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    checked.append(name)
            except OSError as error:
                raise Failed(f"{name} is {folder}: {error.strerror}; mount one that this user may write") from error
    return ", ".join(checked) or "none is set"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Checks that an image must pass before it gets a name.")
    parser.add_argument("checks", nargs="*", metavar="CHECK")
    parser.add_argument("--arch", type=int, default=121, help="compute capability, without a dot [121]")
    parser.add_argument("--module", action="append", default=[], help="modules to import instead of the image's")
    options = parser.parse_args(arguments)
    known: dict[str, Callable[[], str]] = {
        "imports": lambda: imports(options.module or [*MODULES, *CUDA_MODULES]),
        "versions": versions,
        "plugin": plugin,
        "triton": lambda: triton(options.arch),
        "nvcc": lambda: nvcc(options.arch),
        "caches": caches,
    }
    if unknown := [name for name in options.checks if name not in known]:
        parser.error(f"unknown check {', '.join(unknown)}; known: {', '.join(known)}")
    failures = 0
    for name in options.checks or known:
        try:
            print(f"ok {name}: {known[name]()}", flush=True)
        except Failed as failure:
            failures += 1
            print(f"FAILED {name}: {failure}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
