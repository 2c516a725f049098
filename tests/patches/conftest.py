# SPDX-License-Identifier: Apache-2.0
"""A small tree that looks like vLLM, and a series of two patches for it whose hunks touch the same file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "engine"))

from small_series import Case, make_case


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """An untouched tree in `tree`, the series in `series`."""
    return make_case(tmp_path)
