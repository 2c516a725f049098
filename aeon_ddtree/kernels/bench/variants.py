# SPDX-License-Identifier: Apache-2.0
"""Which compiled variants the launchers ask for, and what they come to, without a device.

A case is prepared on PyTorch's device "meta" and called once. Its launcher runs as always; Triton specialises every
launch for a pretended device, and instead of compiling hands its description to a hook. So there is no second list of
variants that could drift from what the launchers do. Descriptions compile in other processes, also into Triton's cache.

`python -m aeon_ddtree.kernels.bench.variants CAPABILITY MULTIPROCESSORS` fills the cache for all cases of the bench.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from aeon_ddtree.kernels import dispatch
from aeon_ddtree.kernels.bench.case import Case, Source


@dataclass(frozen=True)
class Variant:
    """A compiled kernel to be: its function, and Triton's own description of signature, constants and options."""

    module: str
    kernel: str
    capability: int
    description: str


@dataclass
class Wanted:
    """A variant and the cases that launch it."""

    variant: Variant
    cases: list[Case] = field(default_factory=list)

    @property
    def hot(self) -> bool:
        return any(case.hot for case in self.cases)

    def label(self) -> str:
        """Where it is needed, in short: kernel of the case, models, widths, batches."""
        kernels = sorted({case.kernel for case in self.cases})
        models = sorted({case.model.name for case in self.cases})
        widths = sorted({case.width for case in self.cases})
        batches = sorted({case.batch for case in self.cases})
        spans = [f"W={','.join(map(str, widths))}", f"R={','.join(map(str, batches))}"]
        return " ".join(["+".join(kernels), "+".join(models), *spans])


@dataclass(frozen=True)
class Compiled:
    """What became of a variant. registers a thread; spills in bytes a thread; shared memory in bytes a block."""

    registers: int = 0
    spills: int = 0
    shared: int = 0
    warps: int = 0
    seconds: float = 0.0
    error: str | None = None


class _Driver:
    """Stands where Triton looks for a GPU's driver: enough to specialise and to compile."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return -self._capability  # Triton keeps what it specialised by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _pretending(capability: int, processors: int) -> Iterator[None]:
    runtime, driver = triton.knobs.runtime, triton.runtime.driver
    before = driver._active
    driver.set_active(_Driver(capability))
    dispatch.pretend((processors, capability))
    try:
        yield
    finally:
        dispatch.pretend(None)
        runtime.jit_cache_hook = None
        driver.set_active(before)


def record(cases: Iterable[Case], capability: int, processors: int) -> list[Wanted]:
    """The variants that these cases launch on a device of this compute capability (90, 121, …)."""
    found: dict[Variant, Wanted] = {}
    launched: list[Variant] = []

    def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        name = fn.jit_function.fn.__qualname__
        launched.append(Variant(fn.module, name, capability, compile["specialization_data"]))
        return True  # "compiled already": Triton leaves it at that

    with _pretending(capability, processors):
        triton.knobs.runtime.jit_cache_hook = hook
        for case in cases:
            launched.clear()
            case.prepare(Source("meta"), case).calls[0]()
            if not launched:
                raise RuntimeError(f"{case.label}: nothing was launched, expected Triton on the device meta")
            for variant in launched:
                wanted = found.setdefault(variant, Wanted(variant))
                if case not in wanted.cases:
                    wanted.cases.append(case)
    return list(found.values())


def compile_variant(variant: Variant) -> Compiled:
    """In this process. Errors of the compiler are an answer, not an exception."""
    started = time.perf_counter()
    function = getattr(importlib.import_module(variant.module), variant.kernel)
    try:
        with _pretending(variant.capability, 1):
            kernel = function.preload(variant.description)
        registers, stack = _resources(kernel.asm["cubin"])
        spills = _spills(kernel.asm["ptx"], variant.capability) if stack else 0
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        return Compiled(error=f"{type(error).__name__}: {lines[-1][:200]}", seconds=time.perf_counter() - started)
    return Compiled(registers, spills, kernel.metadata.shared, kernel.metadata.num_warps, time.perf_counter() - started)


def compile_all(wanted: Iterable[Wanted], workers: int | None = None) -> list[Compiled]:
    """In as many processes as there are cores, or `workers`."""
    variants = [each.variant for each in wanted]
    context = multiprocessing.get_context("fork")
    count = workers or len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(count, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(compile_variant, variants))


def _tool(tool: str, capability: int) -> str:
    """A program of the CUDA toolkit that the Triton wheel carries."""
    tools = triton.knobs.nvidia
    if tool == "ptxas":
        return (tools.ptxas_blackwell if capability >= 100 else tools.ptxas).path
    return getattr(tools, tool).path


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack and local memory) of the one kernel in a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [_tool("cuobjdump", 0), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    if found is None:
        raise RuntimeError(f"cuobjdump said {said[-100:]!r}, expected a line with REG, STACK and LOCAL")
    return int(found[1]), int(found[2]) + int(found[3])


def _spills(ptx: str, capability: int) -> int:
    """Bytes of spill stores, or of loads where those are more."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        said = subprocess.run(
            [_tool("ptxas", capability), "-v", f"--gpu-name=sm_{capability}a", file.name, "-o", os.devnull],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    found = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    if not found:
        raise RuntimeError(f"ptxas said {said[-100:]!r}, expected a line on spills")
    return max(int(number) for pair in found for number in pair)


def main(capability: int, processors: int) -> int:
    from aeon_ddtree.kernels.bench.plan import all_cases

    wanted = record(all_cases(), capability, processors)
    errors = [f"{w.label()}: {c.error}" for w, c in zip(wanted, compile_all(wanted)) if c.error]
    print("\n".join(errors), file=sys.stderr, end="\n" if errors else "")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
