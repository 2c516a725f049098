# SPDX-License-Identifier: Apache-2.0
"""The truth about the pair that the engines of `conftest` serve."""

from __future__ import annotations

from typing import Any

import pytest
import step_checks as checks


@pytest.fixture(scope="session")
def truth(pair: Any) -> checks.Truth:
    """fp64 truth, and three prompts: 20 tokens of code, a single token, 33 tokens of arithmetic."""
    return checks.Truth.of(pair.target, pair.drafter, [pair.prompts[i] for i in (0, 80, 41)], (20, 1, 33))
