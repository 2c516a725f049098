# SPDX-License-Identifier: Apache-2.0
"""Where the Triton kernels run: on the GPU if there is one, else in Triton's interpreter.

Triton decides for the interpreter when it is imported, and an interpreted Triton must not leak into the engine tests of
the same process. So test_*_triton.py is collected only with a GPU or with TRITON_INTERPRET=1; test_interpreter.py runs
the files in child processes otherwise.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from aeon_ddtree.kernels import dispatch

collect_ignore_glob: list[str] = []
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob.append("test_*_triton.py")


@pytest.fixture
def device() -> Iterator[str]:
    """The device whose tensors go to the Triton kernels: "cuda", or "cpu" with the interpreter switched on."""
    if torch.cuda.is_available():
        yield "cuda"
        return
    dispatch.interpret_on_cpu(True)
    yield "cpu"
    dispatch.interpret_on_cpu(False)
