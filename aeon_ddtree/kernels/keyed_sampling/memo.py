# SPDX-License-Identifier: Apache-2.0
"""Noise rows already computed, for the CPU: drafting, verification and the next step ask for the same ones."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from aeon_ddtree.kernels.keyed_sampling.philox import gumbel_of, uniform

_BYTES = 64 << 20


class NoiseMemo:
    """The last Gumbel rows of one vocabulary by (seed, index), oldest overwritten first. Only ever saves time.

    rows: how many to hold; by default as many as fit in 64 MiB (248320 tokens: 67 rows, 3000 tokens: 5592).
    """

    def __init__(self, vocab: int, rows: int | None = None) -> None:
        self.vocab = vocab
        self.capacity = max(1, _BYTES // (4 * vocab)) if rows is None else rows
        self._rows = torch.empty(self.capacity, vocab)
        self._place: dict[tuple[int, int], int] = {}
        self._owner: list[tuple[int, int] | None] = [None] * self.capacity
        self._next = 0
        self._lock = threading.Lock()

    def gumbel(self, seed: Tensor, index: Tensor) -> Tensor:
        """G for int64 CPU tensors seed, index [N] -> fp32 [N, vocab], a tensor of its own."""
        with self._lock:
            return self._gumbel(seed, index)

    def _gumbel(self, seed: Tensor, index: Tensor) -> Tensor:
        keys = list(zip(seed.tolist(), index.tolist(), strict=True))
        missing = [key for key in dict.fromkeys(keys) if key not in self._place]
        if len(missing) > self.capacity:
            return gumbel_of(uniform(seed, index, self.vocab))
        # Known rows are copied out before new ones may take their places.
        out = self._rows[[self._place.get(key, 0) for key in keys]]
        if missing:
            new_seed, new_index = torch.tensor(missing, dtype=torch.int64).unbind(1)
            new = gumbel_of(uniform(new_seed, new_index, self.vocab))
            fresh = {key: n for n, key in enumerate(missing)}
            rows = [n for n, key in enumerate(keys) if key in fresh]
            out[rows] = new[[fresh[keys[n]] for n in rows]]
            self._store(missing, new)
        return out

    def _store(self, keys: list[tuple[int, int]], new: Tensor) -> None:
        places = [(self._next + n) % self.capacity for n in range(len(keys))]
        self._next = (self._next + len(keys)) % self.capacity
        for place, key in zip(places, keys, strict=True):
            old = self._owner[place]
            if old is not None:
                del self._place[old]
            self._owner[place], self._place[key] = key, place
        self._rows[places] = new


_memo: NoiseMemo | None = None


def gumbel_rows(seed: Tensor, index: Tensor, vocab: int) -> Tensor:
    """`NoiseMemo.gumbel` from the one memo of this process, which holds the vocabulary asked for last."""
    global _memo
    if _memo is None or _memo.vocab != vocab:
        _memo = NoiseMemo(vocab)
    return _memo.gumbel(seed.long(), index.long())
