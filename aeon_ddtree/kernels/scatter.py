# SPDX-License-Identifier: Apache-2.0
"""Clearing, gathering and writing some of R items without asking a device which."""

from __future__ import annotations

import torch
from torch import Tensor

from aeon_ddtree.kernels import checks


def write_active(target: Tensor, slots: Tensor, active: Tensor, values: Tensor) -> None:
    """target[slots[r]] = values[r] where active[r]; nothing else changes. No host synchronisation.

    target [S, ...], slots int64 [R], active bool [R] (implies slots >= 0), values [R, ...].
    On a device, an inactive item repeats the write of the first active one (same bytes to the same place). When none
    is active, item 0 writes back what its place already holds.
    """
    if checks.reads_are_free(active):
        if not active.all():
            slots, values = slots[active], values[active]
        target.index_copy_(0, slots, values.to(target.dtype))
        return
    first = active.int().argmax()
    pick = torch.where(active, torch.arange(active.shape[0], device=active.device), first)
    place = slots.clamp(min=0)[pick]
    spread = active.any().expand(active.shape).reshape(-1, *[1] * (values.ndim - 1))
    target[place] = torch.where(spread, values[pick].to(target.dtype), target[place])


def clear(x: Tensor, blank: Tensor) -> Tensor:
    """x with zeros where blank (bool, the leading dimensions of x) says so, whatever stood there, NaN included.

    May return x itself when nothing is blank and the host can see that.
    """
    if checks.reads_are_free(blank) and not blank.any():
        return x
    return x.masked_fill(blank.reshape(*blank.shape, *[1] * (x.ndim - blank.ndim)), 0)


def gather_slots(source: Tensor, slots: Tensor, has_state: Tensor | None) -> Tensor:
    """source[slots[r]], or zeros where slots[r] < 0 or has_state[r] is False: a stale slot's content never leaks."""
    blank = slots < 0 if has_state is None else (slots < 0) | ~has_state
    return clear(source.index_select(0, slots.clamp(min=0)), blank)
