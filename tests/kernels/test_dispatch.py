# SPDX-License-Identifier: Apache-2.0
"""DDTREE_KERNELS: who runs, and that nothing falls back in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from aeon_ddtree.kernels import dispatch
from aeon_ddtree.kernels.ancestors import ancestor_mask

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets the variable as at the start of a process."""

    def set_it(value: str) -> None:
        monkeypatch.setenv(dispatch.VARIABLE, value)
        dispatch.asked.cache_clear()

    set_it("")
    yield set_it
    monkeypatch.undo()
    dispatch.asked.cache_clear()


def test_by_device(asked: Callable[[str], None]) -> None:
    assert dispatch.takes_triton(torch.empty(1, device=META)) and not dispatch.takes_triton(torch.empty(1))
    assert dispatch.describe(CPU) == "PyTorch references (kernels/*/reference.py) on cpu"
    assert dispatch.describe(META).startswith("Triton (kernels/*/triton*.py) on meta")


def test_references_everywhere(asked: Callable[[str], None]) -> None:
    asked("reference")
    assert not dispatch.takes_triton(torch.empty(1, device=META))
    assert dispatch.describe(META).endswith("on meta, as DDTREE_KERNELS=reference says")


def test_triton_or_nothing(asked: Callable[[str], None]) -> None:
    asked("triton")
    with pytest.raises(ValueError, match="DDTREE_KERNELS is triton, but a kernel got tensors on cpu"):
        ancestor_mask(torch.tensor([[-1, 0]]))
    with pytest.raises(ValueError, match="DDTREE_KERNELS is triton"):
        dispatch.describe(CPU)


def test_any_other_word(asked: Callable[[str], None]) -> None:
    asked("torch")
    for call in (lambda: ancestor_mask(torch.tensor([[-1]])), lambda: dispatch.describe(CPU)):
        with pytest.raises(ValueError, match="DDTREE_KERNELS is 'torch', expected reference or triton"):
            call()


def test_traits(asked: Callable[[str], None]) -> None:
    assert dispatch.device_traits(torch.empty(1)) == (12, 0)
    with pytest.raises(RuntimeError, match="on the device meta"):
        dispatch.device_traits(torch.empty(1, device=META))
    dispatch.pretend((48, 121))
    try:
        assert dispatch.device_traits(torch.empty(1, device=META)) == (48, 121)
    finally:
        dispatch.pretend(None)
