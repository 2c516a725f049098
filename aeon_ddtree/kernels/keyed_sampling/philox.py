# SPDX-License-Identifier: Apache-2.0
"""Philox-4x32-10 in exact int64 arithmetic: 32-bit words live in the low half of non-negative int64."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_SCALE = 2.0**-32
_LARGEST = 1.0 - 2.0**-24

# Counters per batch: on the CPU the working set should stay in cache.
_CPU_BATCH = 1 << 14
_DEVICE_BATCH = 1 << 22


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox-4x32 on four counter words and two key words, int64 in [0, 2^32), broadcast together.

    The product of two words may pass 2^63; it wraps modulo 2^64, and a shift with a mask still yields its high word.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for step in range(_ROUNDS):
        if step:
            k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c2 = ((p1 >> 32) ^ (c1 ^ k0)) & _MASK, ((p0 >> 32) ^ (c3 ^ k1)) & _MASK
        c1, c3 = p1 & _MASK, p0 & _MASK
    return c0, c1, c2, c3


def _split(value: Tensor) -> tuple[Tensor, Tensor]:
    """int [N] -> low and high words, [N, 1] each; negative values by their two's complement."""
    value = value.long()[:, None]
    return value & _MASK, (value >> 32) & _MASK


def _words(seed: Tensor, index: Tensor, quad: Tensor) -> tuple[Tensor, ...]:
    """The four words of each counter: seed, index [N], quad [1 or N, Q] -> four tensors [N, Q]."""
    index_low, index_high = _split(index)
    counter = (quad, index_low, index_high, torch.zeros_like(quad))
    return philox4x32(counter, _split(seed))


def _to_uniform(words: Tensor) -> Tensor:
    return words.float().add_(0.5).mul_(_SCALE).clamp_(max=_LARGEST)


def uniform(seed: Tensor, index: Tensor, vocab: int) -> Tensor:
    """w for every token id: [N] -> fp32 [N, vocab]. See `keyed_uniform`."""
    count, quads = seed.shape[0], -(-vocab // 4)
    out = torch.empty(count, quads, 4, dtype=torch.float32, device=seed.device)
    batch = _CPU_BATCH if seed.device.type == "cpu" else _DEVICE_BATCH
    columns = min(quads, batch)
    rows = max(1, batch // columns)
    for column in range(0, quads, columns):
        quad = torch.arange(column, min(column + columns, quads), device=seed.device)[None]
        for row in range(0, count, rows):
            part = slice(row, row + rows)
            words = _words(seed[part], index[part], quad)
            for lane, word in enumerate(words):
                out[part, column : column + columns, lane] = word
    return out.add_(0.5).mul_(_SCALE).clamp_(max=_LARGEST).flatten(1)[:, :vocab]


def uniform_at(seed: Tensor, index: Tensor, token: Tensor) -> Tensor:
    """w for chosen token ids: seed, index [N], token int64 [N, M] -> fp32 [N, M]."""
    words = torch.stack(_words(seed, index, token >> 2), dim=-1)
    return _to_uniform(words.gather(-1, (token & 3)[..., None])[..., 0])


def gumbel_of(w: Tensor) -> Tensor:
    """−log(−log1p(−w)), overwriting w."""
    return w.neg_().log1p_().neg_().log_().neg_()
