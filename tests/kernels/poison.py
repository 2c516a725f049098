# SPDX-License-Identifier: Apache-2.0
"""Memory that nothing wrote is made to show: NaN in floats, the largest value in integers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, every `torch.empty` comes filled with NaN or the largest integer, so an unwritten output differs."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        yield
    finally:
        torch.use_deterministic_algorithms(before)
