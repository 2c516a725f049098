# SPDX-License-Identifier: Apache-2.0
"""A DGX Spark, and other computers, as `Machine` sees them: every fact given, none looked up."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from aeon_entrypoints.preflight import Gpu, Machine

GIB = 1 << 30
GB10 = Gpu("NVIDIA GB10", capability=(12, 1), unified=True)
H200 = Gpu("NVIDIA H200", total=140 * GIB, free=139 * GIB, capability=(9, 0))


def meminfo(total: float, available: float) -> str:
    """Both in GiB."""
    return f"MemTotal: {int(total * 1024**2)} kB\nMemFree: 1 kB\nMemAvailable: {int(available * 1024**2)} kB\n"


def spark(vllm: Path | None = None, **changes: Any) -> Machine:
    """An idle one, in this project's image; vllm: folder of a patched vLLM."""
    facts: dict[str, Any] = {
        "meminfo": meminfo(121.7, 117.0),
        "memory_limit": None,
        "architecture": "aarch64",
        "cpuinfo": "processor : 0\nCPU implementer\t: 0x41\n",
        "gpus": (GB10,),
        "cuda_architectures": "12.1a",
        "vllm_version": "0.20.2rc1.dev166+gf6490a284",
        "vllm_folder": vllm,
        "flashinfer": {"flashinfer-python": "0.6.4", "flashinfer-jit-cache": "0.6.4+cu130"},
        "plugins": {"aeon_ddtree": "aeon_ddtree.engine.register:register"},
        "user": "aeon",
        "home": Path("/home/aeon"),
        "disk": defaultdict(lambda: 900 * GIB),
        "unwritable": defaultdict(lambda: None),
        "unbindable": defaultdict(lambda: None),
    }
    return Machine(changes.pop("environ", {}), **facts | changes)
