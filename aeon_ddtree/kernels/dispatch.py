# SPDX-License-Identifier: Apache-2.0
"""Which implementation a call takes: Triton for tensors on a CUDA device, plain PyTorch for all others.

`DDTREE_KERNELS` says otherwise: "reference" takes plain PyTorch on every device (parity and debugging), "triton"
refuses tensors on another device. Tensors on the device "meta" go to Triton too: so launches are recorded where there
is no device (`bench/variants.py`).
"""

from __future__ import annotations

import os
from functools import lru_cache

import torch
from torch import Tensor

VARIABLE = "DDTREE_KERNELS"
CHOICES = ("reference", "triton")

_interpret = False
_pretended: tuple[int, int] | None = None


@lru_cache(maxsize=1)
def asked() -> str | None:
    """What `DDTREE_KERNELS` says, read once per process; ValueError if it is none of CHOICES."""
    value = os.environ.get(VARIABLE) or None
    if value is not None and value not in CHOICES:
        raise ValueError(f"{VARIABLE} is {value!r}, expected {' or '.join(CHOICES)}; unset it to go by device")
    return value


def interpret_on_cpu(enabled: bool) -> None:
    """Test hook: send CPU tensors through the Triton kernels too, run by Triton's interpreter.

    Triton reads TRITON_INTERPRET when it is first imported, so the variable must be 1 from the start of the process;
    RuntimeError if it is not.
    """
    global _interpret
    if enabled and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("TRITON_INTERPRET is not 1: set it before Triton is imported, at the start of the process")
    _interpret = enabled


def _triton_device(device: torch.device) -> bool:
    return device.type in ("cuda", "meta") or _interpret


def takes_triton(tensor: Tensor) -> bool:
    """Whether this call goes to the Triton kernel: by the device of its tensors, unless `DDTREE_KERNELS` decides.

    ValueError where Triton is asked for and the tensors are not on a CUDA device.
    """
    choice = asked()
    if choice == "reference":
        return False
    if choice == "triton" and not _triton_device(tensor.device):
        raise ValueError(f"{VARIABLE} is triton, but a kernel got tensors on {tensor.device}: unset it or use CUDA")
    return _triton_device(tensor.device)


def describe(device: torch.device) -> str:
    """For people: which kernels run on this device, and whether the environment said so. ValueError as above."""
    choice = asked()
    triton = takes_triton(torch.empty(0, device=device))
    name = "Triton (kernels/*/triton*.py)" if triton else "PyTorch references (kernels/*/reference.py)"
    return f"{name} on {device}" + (f", as {VARIABLE}={choice} says" if choice else "")


@lru_cache(maxsize=8)
def _traits(index: int | None) -> tuple[int, int]:
    if index is None:
        return 12, 0
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, properties.major * 10 + properties.minor


def pretend(traits: tuple[int, int] | None) -> None:
    """What `device_traits` says of tensors on the device "meta"; None ends it."""
    global _pretended
    _pretended = traits


def device_traits(tensor: Tensor) -> tuple[int, int]:
    """(multiprocessors, compute capability as 90, 121, …) of a tensor's device, for launchers to cut their work by.

    Tensors in Triton's interpreter get (12, 0), recorded ones what `pretend` was told (RuntimeError if nothing).
    """
    if tensor.is_meta:
        if _pretended is None:
            raise RuntimeError("a kernel got a tensor on the device meta, expected a device with data")
        return _pretended
    return _traits(tensor.device.index if tensor.is_cuda else None)
