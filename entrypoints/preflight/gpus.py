# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine, without CUDA: by NVML where nvidia-ml-py is installed, else by the driver's files."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

UNIFIED = re.compile(r"GB10\b|Thor|Orin|Tegra", re.IGNORECASE)  # share the host's memory


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    total, free: bytes of its own memory, None where the driver does not say (unified memory answers Not Supported);
    capability: (major, minor), None when unknown; unified: it uses the host's memory.
    """

    name: str
    total: int | None = None
    free: int | None = None
    capability: tuple[int, int] | None = None
    unified: bool = False


def find(
    environ: Mapping[str, str], driver: Path = Path("/proc/driver/nvidia/gpus"), dev: Path = Path("/dev")
) -> tuple[Gpu, ...]:
    """All GPUs, or none. A GPU that only its device file shows is named by that file."""
    if environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return ()
    found = tuple(_by_nvml())
    if not found:
        found = tuple(_by_driver(driver))
    if not found:
        files = [*dev.glob("nvidia[0-9]*"), *dev.glob("nvhost-gpu")]
        found = tuple(Gpu(str(file), unified=file.name == "nvhost-gpu") for file in sorted(files))
    return found


def _by_nvml() -> Iterator[Gpu]:
    try:
        import pynvml
    except ImportError:
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name, memory, capability = "unnamed GPU", None, None
            # Each of these may be Not Supported on its own.
            with contextlib.suppress(pynvml.NVMLError):
                given = pynvml.nvmlDeviceGetName(handle)
                name = given.decode() if isinstance(given, bytes) else given
            with contextlib.suppress(pynvml.NVMLError):
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            with contextlib.suppress(pynvml.NVMLError):
                capability = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle))
            if memory is None or UNIFIED.search(name):
                yield Gpu(name, None, None, capability, unified=True)
            else:
                yield Gpu(name, int(memory.total), int(memory.free), capability)
    except pynvml.NVMLError:
        return
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _by_driver(folder: Path) -> Iterator[Gpu]:
    for file in sorted(folder.glob("*/information")):
        with contextlib.suppress(OSError):
            named = re.search(r"^Model:\s*(.+)$", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
            name = named.group(1).strip() if named else "unnamed GPU"
            yield Gpu(name, unified=bool(UNIFIED.search(name)))
