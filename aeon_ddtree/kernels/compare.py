# SPDX-License-Identifier: Apache-2.0
"""How far an answer may be from the truth: what the bench and the replay hold kernels to."""

from __future__ import annotations

import torch
from torch import Tensor

# Of the truth's largest entry. bf16 and fp16: one rounding of the answer and one of weights inside a product; fp32: a
# few hundred roundings, which also leaves room for three-part TF32 products.
_SHARE = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1e-4, torch.float64: 1e-9}


def tolerance(dtype: torch.dtype, truth: Tensor) -> float:
    """The largest absolute error allowed to an answer of this dtype; 0 for integers and flags."""
    if dtype not in _SHARE or not truth.numel():
        return 0.0
    return _SHARE[dtype] * max(float(truth.double().abs().max()), 1e-3)


def worst(got: Tensor, truth: Tensor) -> float:
    """The largest absolute error; infinite where a shape, a NaN or an infinity differs."""
    if got.shape != truth.shape:
        return float("inf")
    if not got.numel():
        return 0.0
    a, b = got.double(), truth.double()
    same = (a == b) | (a.isnan() & b.isnan())
    error = torch.where(same, 0.0, (a - b).abs())
    return float(torch.where(error.isnan(), float("inf"), error).max())
