# SPDX-License-Identifier: Apache-2.0
"""docker/check_cubins.py on objects that nvcc 13 builds here: with and without code for sm_121."""

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from image_tools import cuobjdump, nvcc

KERNEL = '#include <cuda_fp16.h>\nextern "C" __global__ void scale(float* x) { x[threadIdx.x] *= 2.0f; }\n'
GENCODE = {
    "sm121a": ["-gencode", "arch=compute_121a,code=sm_121a"],
    "sm80": ["-gencode", "arch=compute_80,code=sm_80"],
    "sm90_and_121": ["-gencode", "arch=compute_90,code=sm_90", "-gencode", "arch=compute_121a,code=sm_121a"],
    "ptx": ["-gencode", "arch=compute_80,code=compute_80"],
}


pytestmark = [
    pytest.mark.skipif(nvcc() is None, reason="no nvcc of CUDA 13 here"),
    pytest.mark.skipif(cuobjdump() is None, reason="no cuobjdump here"),
]


@pytest.fixture(scope="module")
def objects(tmp_path_factory) -> dict[str, Path]:
    """name -> shared library (host code, and device code as GENCODE says); "host" has none."""
    folder = tmp_path_factory.mktemp("cubins")
    source = folder / "kernel.cu"
    source.write_text(KERNEL)
    made = {}
    for name, gencode in GENCODE.items():
        made[name] = folder / f"{name}.so"
        command = [str(nvcc()), *gencode, "-shared", "-Xcompiler", "-fPIC", "-o", str(made[name]), str(source)]
        subprocess.run(command, check=True, capture_output=True)
    made["host"] = folder / "host.so"
    (folder / "host.c").write_text("int one(void) { return 1; }\n")
    host = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", str(made["host"]), str(folder / "host.c")]
    subprocess.run(host, check=True, capture_output=True)
    return made


@pytest.fixture
def check(script):
    def call(*arguments: str | Path):
        return script("docker/check_cubins.py", "--cuobjdump", str(cuobjdump()), "--arch", "sm_121", *arguments)

    return call


@pytest.mark.parametrize("name", ["sm121a", "sm90_and_121"])
def test_passes_with_code_for_the_gpu(check, objects, name):
    done = check(objects[name])
    assert done.returncode == 0, done.stderr
    assert "sm_121" in done.stdout


@pytest.mark.parametrize("name, held", [("sm80", "sm_80"), ("ptx", "PTX for sm_80")])
def test_fails_without(check, objects, name, held):
    done = check(objects["sm121a"], objects[name])
    assert done.returncode == 1
    assert f"{objects[name]} holds" in done.stderr and held in done.stderr and "sm_121" in done.stderr
    assert str(objects["sm121a"]) not in done.stderr


def test_ptx_is_enough_where_it_is_allowed(check, objects):
    assert check("--may-jit", "ptx*", objects["ptx"], objects["sm121a"]).returncode == 0
    assert check("--may-jit", "sm80*", objects["sm80"], objects["sm121a"]).returncode == 1


def test_host_code_is_passed_over_but_not_enough(check, objects):
    assert check(objects["host"], objects["sm121a"]).returncode == 0
    done = check(objects["host"])
    assert done.returncode == 1 and "none of 1 files" in done.stderr


def test_required_libraries(check, objects):
    assert check("--require", "sm121a*", objects["sm121a"]).returncode == 0
    done = check("--require", "_moe_C*", objects["sm121a"])
    assert done.returncode == 1 and "_moe_C*" in done.stderr
    done = check("--require", "host*", objects["sm121a"], objects["host"])
    assert done.returncode == 1


def test_wheels_and_folders_are_looked_into(check, objects, tmp_path):
    for name, code in (("sm121a", 0), ("sm80", 1)):
        wheel = tmp_path / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.write(objects[name], "package/_C.abi3.so")
            archive.writestr("package/__init__.py", "")
        done = check("--require", "_C.*so", wheel)
        assert done.returncode == code
        assert "package/_C.abi3.so" in done.stdout
        folder = tmp_path / name / "deep"
        folder.mkdir(parents=True)
        shutil.copy(objects[name], folder / "lib.so")
        assert check(tmp_path / name).returncode == code


def test_what_is_not_there_or_no_binary(check, objects, script, tmp_path):
    assert check(tmp_path / "nothing.so").returncode == 2
    (tmp_path / "text.so").write_text("not a library")
    assert check(tmp_path / "text.so").returncode == 2
    done = script("docker/check_cubins.py", "--cuobjdump", "no-such-tool", "--arch", "sm_121", objects["sm121a"])
    assert done.returncode == 2 and "no-such-tool" in done.stderr
