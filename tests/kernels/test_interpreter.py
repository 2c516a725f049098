# SPDX-License-Identifier: Apache-2.0
"""Runs each test_*_triton.py in a child process under Triton's interpreter, where there is no GPU (see conftest.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FILES = sorted(Path(__file__).parent.glob("test_*_triton.py"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the files run on it, in this process")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this process already interprets")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_in_the_interpreter(file: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
