# SPDX-License-Identifier: Apache-2.0
"""Where the project is, and which of CUDA's tools are here."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def nvcc() -> str | None:
    """An nvcc of CUDA 13, or None."""
    found = shutil.which("nvcc")
    if found is None:
        return None
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    return found if re.search(r"release 1[3-9]\.", said) else None


def cuobjdump() -> str | None:
    spec = importlib.util.find_spec("triton")
    bundled = Path(str(spec.origin)).parent / "backends/nvidia/bin/cuobjdump" if spec else None
    return shutil.which("cuobjdump") or (str(bundled) if bundled and bundled.is_file() else None)
