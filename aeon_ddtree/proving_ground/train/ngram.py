# SPDX-License-Identifier: Apache-2.0
"""The baseline to beat: an interpolated Kneser-Ney 5-gram over the same tokens (Chen & Goodman 1999, one discount)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ORDER = 5
_BITS = np.uint64(12)
_TOKEN = np.uint64(4095)


def _windows(tokens: np.ndarray, order: int) -> np.ndarray:
    """Each window of `order` tokens as one uint64, 12 bits a token, the last token in the low bits (exact, no hash)."""
    count = len(tokens) - order + 1
    value = np.zeros(count, dtype=np.uint64)
    for i in range(order):
        value = (value << _BITS) | tokens[i : i + count].astype(np.uint64)
    return value


@dataclass
class _Level:
    grams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    kinds: np.ndarray
    discount: float


class KneserNey:
    """Interpolated Kneser-Ney over uint16 tokens below 4096."""

    def __init__(self, tokens: np.ndarray, vocabulary: int, order: int = ORDER) -> None:
        if vocabulary > 4096:
            raise ValueError(f"vocabulary is {vocabulary}, at most 4096 fits 12 bits a token")
        self.vocabulary = vocabulary
        self.levels: list[_Level] = []
        grams, counts = np.unique(_windows(tokens, order), return_counts=True)
        for n in range(order, 0, -1):
            ones, twos = int((counts == 1).sum()), int((counts == 2).sum())
            contexts, first = np.unique(grams >> _BITS, return_index=True)
            kinds = np.diff(np.append(first, len(grams)))
            totals = np.add.reduceat(counts, first)
            self.levels.append(_Level(grams, counts, contexts, totals, kinds, ones / max(1, ones + 2 * twos)))
            if n > 1:
                # Lower orders count in how many contexts a gram was seen, not how often.
                keep = np.uint64((1 << (12 * (n - 1))) - 1)
                grams, counts = np.unique(grams & keep, return_counts=True)
        self.levels.reverse()

    def log2_probabilities(self, tokens: np.ndarray) -> np.ndarray:
        """log2 p of tokens[4:], each given the four before it."""
        order = len(self.levels)
        full = _windows(tokens, order)
        p = np.full(len(full), 1.0 / self.vocabulary)
        for n, level in enumerate(self.levels, 1):
            gram = full & np.uint64((1 << (12 * n)) - 1)
            count = _lookup(level.grams, level.counts, gram)
            total = _lookup(level.contexts, level.totals, gram >> _BITS)
            kinds = _lookup(level.contexts, level.kinds, gram >> _BITS)
            seen = total > 0
            safe = np.maximum(total, 1)
            mixed = (np.maximum(count - level.discount, 0) + level.discount * kinds * p) / safe
            p = np.where(seen, mixed, p)
        return np.log2(p)


def _lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0).astype(np.float64)
