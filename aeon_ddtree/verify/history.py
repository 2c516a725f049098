# SPDX-License-Identifier: Apache-2.0
"""Keeping a persistent `SamplingState` up to date on the device, without a look at the emitted tokens on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from aeon_ddtree.verify.state import SamplingState


def record_emitted(state: SamplingState, slots: Tensor, emitted: Tensor, num_emitted: Tensor) -> None:
    """Append emitted tokens to the output history that `state` holds, in place.

    slots [R] int64 request -> row of `state`, distinct where >= 0; negative: left alone.
    emitted [R, P] int64, of which the first num_emitted [R] count. Writes output_len, output_counts and last_tokens,
    each only if the state has it.
    """
    steps = torch.arange(emitted.shape[1], device=emitted.device)
    count = torch.where(slots >= 0, num_emitted, 0).clamp(0, emitted.shape[1])
    used = steps < count[:, None]
    slot = slots.clamp(min=0)
    if state.output_len is not None:
        state.output_len.index_add_(0, slot, count.to(state.output_len.dtype))
    if state.output_counts is not None:
        vocab = state.output_counts.shape[1]
        flat = slot[:, None] * vocab + torch.where(used, emitted, 0)
        ones = used.to(state.output_counts.dtype)
        state.output_counts.view(-1).index_add_(0, flat.reshape(-1), ones.reshape(-1))
    if state.last_tokens is not None and state.last_tokens.shape[1] > 0:
        held = state.last_tokens.shape[1]
        both = torch.cat((state.last_tokens[slot], torch.where(used, emitted, -1)), dim=1)
        column = torch.arange(held, device=emitted.device) + count[:, None]
        shifted = both.gather(1, column) - state.last_tokens[slot]
        # Requests that are left alone may share slot 0 with a real one: adding a difference of 0 for them is safe.
        state.last_tokens.index_add_(0, slot, torch.where(count[:, None] > 0, shifted, 0))
