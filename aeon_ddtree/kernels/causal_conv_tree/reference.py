# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch tree convolution. Inputs are laid out as [committed window (K−1), rows (W)], the "line" below."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aeon_ddtree.kernels.ancestors import real_rows, safe_parent
from aeon_ddtree.kernels.scatter import gather_slots, write_active


def _finish(y: Tensor, bias: Tensor | None, activation: str | None, real: Tensor, dtype: torch.dtype) -> Tensor:
    if bias is not None:
        y = y + bias.to(y.dtype)
    if activation == "silu":
        y = F.silu(y)
    return y.masked_fill(~real[..., None], 0).to(dtype)


def tree(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, parent: Tensor,
    has_state: Tensor | None, activation: str | None,
) -> Tensor:  # fmt: skip
    """See `causal_conv_tree`."""
    requests, width, channels = x.shape
    taps = weight.shape[1]
    past = taps - 1
    dtype = torch.promote_types(x.dtype, torch.float32)
    slots, parent = slots.long(), safe_parent(parent)
    real = real_rows(parent) & (slots >= 0)[:, None]
    line = torch.cat([gather_slots(conv_state, slots, has_state).to(dtype), x.to(dtype)], dim=1)
    weight = weight.to(dtype)

    # line place -> place one step back along the path. Rows without a parent go back into the window's newest input.
    back = torch.where(parent >= 0, parent + past, past - 1)
    older = torch.arange(-1, past - 1, device=x.device).clamp(min=0).expand(requests, past)
    back = torch.cat([older, back], dim=1)
    place = torch.arange(past, past + width, device=x.device).expand(requests, width)
    base = torch.arange(requests, device=x.device)[:, None] * (past + width)
    flat = line.reshape(-1, channels)
    y = line[:, past:] * weight[:, past]
    for m in range(1, taps):
        place = back.gather(1, place)
        y = y + flat[base + place] * weight[:, past - m]
    return _finish(y, bias, activation, real, x.dtype)


def _commit_line(conv_state: Tensor, slots: Tensor, line: Tensor, taken: Tensor) -> None:
    """New window = the K−1 inputs of `line` [R, K−1 + P, C] that end `taken` [R] inputs after the old window."""
    past = conv_state.shape[1]
    place = taken.clamp(min=0)[:, None] + torch.arange(past, device=line.device)
    new = line.gather(1, place[..., None].expand(-1, -1, line.shape[-1]))
    write_active(conv_state, slots, (taken > 0) & (slots >= 0), new)


def commit(
    conv_state: Tensor, slots: Tensor, x: Tensor, path: Tensor, path_len: Tensor, has_state: Tensor | None
) -> None:
    """See `conv_commit`."""
    slots, path, path_len = slots.long(), path.long(), path_len.long()
    rows = path.clamp(0, x.shape[1] - 1)[..., None].expand(-1, -1, x.shape[-1])
    old = gather_slots(conv_state, slots, has_state)
    _commit_line(conv_state, slots, torch.cat([old, x.gather(1, rows).to(old.dtype)], dim=1), path_len)


def chain(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, length: Tensor,
    has_state: Tensor | None, activation: str | None,
) -> Tensor:  # fmt: skip
    """See `causal_conv_chain`."""
    total, taps = x.shape[1], weight.shape[1]
    past = taps - 1
    dtype = torch.promote_types(x.dtype, torch.float32)
    slots = slots.long()
    length = torch.where(slots >= 0, length.long(), 0).clamp(0, total)
    real = torch.arange(total, device=x.device) < length[:, None]
    old = gather_slots(conv_state, slots, has_state)
    line = torch.cat([old.to(dtype), x.to(dtype)], dim=1)
    weight = weight.to(dtype)
    y = line[:, past:] * weight[:, past]
    for m in range(1, taps):
        y = y + line[:, past - m : past - m + total] * weight[:, past - m]
    _commit_line(conv_state, slots, line, length)
    return _finish(y, bias, activation, real, x.dtype)
