# SPDX-License-Identifier: Apache-2.0
"""Runs the scripts that the Dockerfile's stages call, as the stages do."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from image_tools import ROOT

Script = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def script() -> Script:
    """script(path, *arguments, env={...}, cwd=None): runs a script of the project; its exit code is not an error."""

    def call(name: str, *arguments: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None):
        command = [str(ROOT / name), *map(str, arguments)]
        environ = {**os.environ, **(env or {})}
        return subprocess.run(command, capture_output=True, text=True, env=environ, cwd=cwd, timeout=300, check=False)

    return call
