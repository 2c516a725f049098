# SPDX-License-Identifier: Apache-2.0
"""Tree convolution and window commit on CUDA: one launch per layer, one launch for the windows of all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aeon_ddtree.kernels.addresses import address_table

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class ConvConfig(NamedTuple):
    """Rows and channels per program, and warps."""

    rows: int = 8
    channels: int = 128
    warps: int = 4


@triton.jit(do_not_specialize=["width", "parent_req"])
def conv_kernel(
    x, conv_state, weight, bias, slots, has_state, parent, out, width, channels,
    x_req, x_row, s_slot, s_tap, s_channel, w_channel, w_tap, parent_req,
    TAPS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    FLAGS: tl.constexpr,
):  # fmt: skip
    """One program per (block of channels, block of rows, request): each row walks TAPS − 1 steps up its path.

    A place is a row, or, below zero, −1 for the newest input of the committed window, −2 for the one before, …
    """
    req = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    in_channels = channel < channels
    slot = tl.load(slots + req).to(tl.int64)
    live = slot >= 0
    known = live
    if FLAGS:
        known = live & (tl.load(has_state + req) != 0)
    parent += req * parent_req
    x += req * x_req + channel[None, :]
    window = conv_state + tl.maximum(slot, 0) * s_slot + channel[None, :] * s_channel
    above = tl.load(parent + row, mask=row < width, other=-1).to(tl.int32)
    above = tl.where((above >= 0) & (above < row), above, -1)
    real = ((row == 0) | (above >= 0)) & (row < width) & live

    place = row
    total = tl.zeros([ROWS, CHANNELS], dtype=tl.float32)
    for m in tl.static_range(TAPS):
        if m == 1:
            place = above
        if m > 1:
            up = tl.load(parent + place, mask=real & (place >= 0), other=-1).to(tl.int32)
            up = tl.where((up >= 0) & (up < place), up, -1)
            place = tl.where(place >= 0, up, place - 1)
        tap = tl.load(weight + channel * w_channel + (TAPS - 1 - m) * w_tap, mask=in_channels, other=0.0)
        from_row = (real & (place >= 0))[:, None] & in_channels[None, :]
        value = tl.load(x + place[:, None] * x_row, mask=from_row, other=0.0).to(tl.float32)
        if m > 0:
            from_window = (real & (place < 0))[:, None] & in_channels[None, :] & known
            past = tl.load(window + (place[:, None] + TAPS - 1) * s_tap, mask=from_window, other=0.0).to(tl.float32)
            value = tl.where((place < 0)[:, None], past, value)
        total += value * tap.to(tl.float32)[None, :]
    if BIAS:
        total += tl.load(bias + channel, mask=in_channels, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total * tl.sigmoid(total)
    total = tl.where(real[:, None], total, 0.0)
    at = (req * width + row)[:, None] * channels + channel[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(row < width)[:, None] & in_channels[None, :])


@triton.jit
def _line(window, x, path, place, channel, known, inside, width, x_row, s_tap, s_channel, PAST: tl.constexpr):
    """The input at `place` of (old window, x along the path)."""
    old = tl.load(window + place * s_tap + channel * s_channel, mask=inside & known & (place < PAST), other=0.0)
    on_path = place >= PAST
    row = tl.load(path + place - PAST, mask=on_path, other=0)
    row = tl.minimum(tl.maximum(row, 0), width - 1).to(tl.int64)
    new = tl.load(x + row * x_row + channel, mask=inside & on_path, other=0.0)
    return tl.where(on_path, new.to(old.dtype), old)


@triton.jit(do_not_specialize=["steps", "width", "path_req"])
def commit_kernel(
    table, slots, has_state, path, path_len, steps, width, channels, x_req, x_row, s_slot, s_tap, s_channel, path_req,
    PAST: tl.constexpr, CHANNELS: tl.constexpr, FLAGS: tl.constexpr, X: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """One program per (block of channels, request, layer). table [L, 2]: addresses of the windows and of x."""
    req = tl.program_id(1).to(tl.int64)
    table += tl.program_id(2) * 2
    length = tl.minimum(tl.load(path_len + req).to(tl.int32), steps)
    slot = tl.load(slots + req).to(tl.int64)
    if (length <= 0) | (slot < 0):
        return
    known = True
    if FLAGS:
        known = tl.load(has_state + req) != 0
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    window = tl.load(table).to(tl.pointer_type(STATE)) + slot * s_slot
    x = tl.load(table + 1).to(tl.pointer_type(X)) + req * x_req
    path += req * path_req
    # All reads come before the first write.
    first = _line(window, x, path, length, channel, known, inside, width, x_row, s_tap, s_channel, PAST)
    second = first
    third = first
    if PAST > 1:
        second = _line(window, x, path, length + 1, channel, known, inside, width, x_row, s_tap, s_channel, PAST)
    if PAST > 2:
        third = _line(window, x, path, length + 2, channel, known, inside, width, x_row, s_tap, s_channel, PAST)
    window += channel * s_channel
    tl.store(window, first, mask=inside)
    if PAST > 1:
        tl.store(window + s_tap, second, mask=inside)
    if PAST > 2:
        tl.store(window + 2 * s_tap, third, mask=inside)


def tree(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, parent: Tensor,
    has_state: Tensor | None, activation: str | None, config: ConvConfig | None = None,
) -> Tensor:  # fmt: skip
    """See `causal_conv_tree`, which has checked dtypes and strides. Takes any width."""
    requests, width, channels = x.shape
    out = torch.empty(requests, width, channels, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    config = config or ConvConfig()
    rows = min(config.rows, triton.next_power_of_2(width))
    wide = min(config.channels, triton.next_power_of_2(channels))
    conv_kernel[(triton.cdiv(channels, wide), triton.cdiv(width, rows), requests)](
        x, conv_state, weight, bias, slots, has_state, parent, out, width, channels,
        *x.stride()[:2], *conv_state.stride(), *weight.stride(), parent.stride(0),
        TAPS=weight.shape[1], ROWS=rows, CHANNELS=wide, BIAS=bias is not None, SILU=activation == "silu",
        FLAGS=has_state is not None, num_warps=config.warps,
    )  # fmt: skip
    return out


def commit(
    conv_states: Sequence[Tensor], slots: Tensor, xs: Sequence[Tensor], path: Tensor, path_len: Tensor,
    has_state: Tensor | None,
) -> None:  # fmt: skip
    """See `conv_commits`, which has checked dtypes and strides: all layers share them."""
    state, x = conv_states[0], xs[0]
    requests, width, channels = x.shape
    if not requests or not channels or not path.shape[1]:
        return
    wide = min(1024, triton.next_power_of_2(channels))
    commit_kernel[(triton.cdiv(channels, wide), requests, len(xs))](
        address_table(list(zip(conv_states, xs, strict=True))), slots, has_state, path, path_len, path.shape[1], width,
        channels, *x.stride()[:2], *state.stride(), path.stride(0),
        PAST=state.shape[1], CHANNELS=wide, FLAGS=has_state is not None, X=_DTYPES[x.dtype], STATE=_DTYPES[state.dtype],
    )  # fmt: skip


def chain(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, length: Tensor,
    has_state: Tensor | None, activation: str | None,
) -> Tensor:  # fmt: skip
    """See `causal_conv_chain`: a chain-shaped tree of any length, then its commit."""
    requests, total, _ = x.shape
    row = torch.arange(total, device=x.device)
    length = length.long().clamp(0, total)
    parent = torch.where(row < length[:, None], row - 1, -1)
    mine = torch.where(length > 0, slots.long(), -1)
    out = tree(x, conv_state, weight, bias, mine, parent, has_state, activation)
    commit([conv_state], mine, [x], row.expand(requests, -1), length, has_state)
    return out
