# SPDX-License-Identifier: Apache-2.0
"""Which implementation a call takes: Triton for tensors on a CUDA device, plain PyTorch for all others."""

from __future__ import annotations

import os

from torch import Tensor

_interpret = False


def interpret_on_cpu(enabled: bool) -> None:
    """Test hook: send CPU tensors through the Triton kernels too, run by Triton's interpreter.

    Triton reads TRITON_INTERPRET when it is first imported, so the variable must be 1 from the start of the process;
    RuntimeError if it is not.
    """
    global _interpret
    if enabled and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("TRITON_INTERPRET is not 1: set it before Triton is imported, at the start of the process")
    _interpret = enabled


def takes_triton(tensor: Tensor) -> bool:
    """Whether this call goes to the Triton kernel: its tensors are on a CUDA device, or a test interprets."""
    return tensor.is_cuda or _interpret
