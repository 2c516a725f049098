# SPDX-License-Identifier: Apache-2.0
"""Facts as they are found on a real machine, in a driver's files, through NVML and inside a control group."""

import os
import socket
import sys
import types
from pathlib import Path

import pytest
from preflight_world import World
from spark import GIB, meminfo

from aeon_entrypoints.preflight import Machine, gpus, headers, host, port_free
from aeon_entrypoints.preflight.situation import Situation


def test_this_machine_is_known():
    machine = Machine()
    assert machine.memory is not None and 0 < machine.memory.available <= machine.memory.total
    assert machine.architecture and machine.plugins["aeon_ddtree"]
    assert machine.disk[Path("/no/such/folder")] > 0
    assert machine.unwritable[Path("/proc/version/x")] == "/proc/version is a file"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_of_somebody_else():
    assert "cannot be written" in (Machine().unwritable[Path("/root/.triton")] or "")


def test_the_least_of_host_and_container():
    given = {"meminfo": meminfo(100, 50)}
    assert Machine(memory_limit=None, **given).memory.available == 50 * GIB
    assert Machine(memory_limit=80 * GIB, **given).memory.available == 50 * GIB
    limited = Machine(memory_limit=8 * GIB, **given).memory
    assert (limited.available, limited.origin) == (8 * GIB, "the container's memory limit")
    assert Machine(meminfo="MemTotal: 5 kB\n").memory is None


def test_what_the_build_has_code_for():
    assert Machine({}, build_facts='{"arch": "12.1a"}').cuda_architectures == "12.1a"
    assert Machine({"TORCH_CUDA_ARCH_LIST": "9.0"}, build_facts="").cuda_architectures == "9.0"
    assert Machine({}, build_facts="{}").cuda_architectures == ""


class NotSupported(Exception):
    pass


def nvml(name="NVIDIA GB10", memory=None, capability=(12, 1), broken=False):
    """A driver's library as nvidia-ml-py shows it; memory None answers Not Supported, as on a GB10."""

    def refuse(*_):
        raise NotSupported

    module = types.ModuleType("pynvml")
    module.NVMLError = NotSupported
    module.nvmlInit = refuse if broken else lambda: None
    module.nvmlShutdown = lambda: None
    module.nvmlDeviceGetCount = lambda: 1
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetName = lambda _: name
    info = types.SimpleNamespace(total=(memory or 0) * GIB, free=GIB)
    module.nvmlDeviceGetMemoryInfo = refuse if memory is None else lambda _: info
    module.nvmlDeviceGetCudaComputeCapability = refuse if capability is None else lambda _: capability
    return module


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        (nvml(), gpus.Gpu("NVIDIA GB10", None, None, (12, 1), unified=True)),
        (nvml(memory=122), gpus.Gpu("NVIDIA GB10", None, None, (12, 1), unified=True)),
        (nvml(capability=None), gpus.Gpu("NVIDIA GB10", unified=True)),
        (nvml(b"NVIDIA H200", 140, (9, 0)), gpus.Gpu("NVIDIA H200", 140 * GIB, GIB, (9, 0))),
    ],
)
def test_nvml(monkeypatch, library, expected):
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert gpus.find({}) == (expected,)
    assert gpus.find({"CUDA_VISIBLE_DEVICES": ""}) == ()


@pytest.mark.parametrize("library", [None, nvml(broken=True)], ids=["absent", "without driver"])
def test_the_drivers_files_without_nvml(monkeypatch, tmp_path, library):
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert gpus.find({}, tmp_path / "driver", tmp_path / "dev") == ()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert [gpu.name for gpu in gpus.find({}, tmp_path / "driver", tmp_path / "dev")] == [str(tmp_path / "dev/nvidia0")]
    (tmp_path / "driver" / "0000:01:00.0").mkdir(parents=True)
    (tmp_path / "driver" / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA GB10\nIRQ: 1\n")
    assert gpus.find({}, tmp_path / "driver", tmp_path / "dev") == (gpus.Gpu("NVIDIA GB10", unified=True),)


def test_ports():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert [finding.code for finding in port_free("127.0.0.1", port, "x")] == ["port.taken"]
    assert list(port_free("127.0.0.1", port, "x")) == []
    assert [finding.code for finding in port_free("127.0.0.1", 65536, "x")] == ["port.range"]
    assert [finding.code for finding in port_free("256.0.0.1", 0, "x")] == ["port.host"]


def test_a_header_is_read_again_once_the_file_changes(tmp_path):
    import made_models as made

    file = tmp_path / "a.safetensors"
    made.write_safetensors(file, {"a": ("F32", (2, 3))})
    assert headers.read_header(file) == {"a": headers.Tensor("F32", (2, 3), 24)}
    made.write_safetensors(file, {"long name": ("BF16", (5,))})
    assert list(headers.read_header(file)) == ["long name"]


@pytest.mark.parametrize(
    ("extra", "name", "value"),
    [
        (["--quantization", "fp8"], "quantization", "fp8"),
        (["-q", "fp8"], "quantization", "fp8"),
        (["--kv_cache_dtype=fp8"], "kv-cache-dtype", "fp8"),
        (["--enforce-eager"], "enforce-eager", True),
        (["--enforce-eager", "--seed", "1"], "enforce-eager", True),
        (["--no-enforce-eager", "--seed", "1"], "enforce-eager", False),
        (["--seed", "-1"], "seed", "-1"),
    ],
)
def test_flags_after_the_dashes_win(tmp_path, extra, name, value):
    world = World(tmp_path)
    world.recipe["vllm"] = {"quantization": "modelopt", "enforce-eager": True}
    world.extra = extra
    assert Situation(world.resolved(), world.made_machine()).flag(name).value == value


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        ("12.1a", (12, 1), True),
        ("12.1a", (12, 0), False),
        ("12.0", (12, 1), True),
        ("12.0f", (12, 1), True),
        ("12.1", (12, 0), False),
        ("9.0", (10, 0), False),
        ("9.0+PTX", (12, 1), True),
        ("9.0a", (9, 0), True),
        ("nonsense", (9, 0), False),
    ],
)
def test_which_code_runs_where(built, capability, runs):
    """CUDA's rule: cubins run on later minors of their major; `a` on that one alone; `f` in the family; PTX upwards."""
    assert host._covers(built, capability) is runs
