# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: nothing of the user's environment may change what a test sees."""

import os

import pytest
from hypothesis import settings

# On a machine with two busy cores an example may take any time; what it may take in all is pytest's timeout.
settings.register_profile("aeon-ddtree", deadline=None)
settings.load_profile("aeon-ddtree")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if variable.startswith("DDTREE_") or variable == "VLLM_PLUGINS":
            monkeypatch.delenv(variable)
