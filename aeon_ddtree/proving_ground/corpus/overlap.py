# SPDX-License-Identifier: Apache-2.0
"""Does a held-out text share a long token n-gram with the training text?"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

LENGTH = 12
_MULTIPLIER = np.uint64(6364136223846793005)


def _hashes(tokens: np.ndarray, length: int) -> np.ndarray:
    """uint64 rolling hashes of all windows of `length` tokens; 64 bits over 1e7 windows: false hits near 1e-5."""
    count = len(tokens) - length + 1
    if count <= 0:
        return np.zeros(0, dtype=np.uint64)
    value = np.zeros(count, dtype=np.uint64)
    for i in range(length):
        value = value * _MULTIPLIER + tokens[i : i + count].astype(np.uint64) + np.uint64(1)
        value ^= value >> np.uint64(29)
    return value


def ngrams(arrays: Iterable[np.ndarray], length: int = LENGTH) -> np.ndarray:
    """Sorted unique hashes of every window of `length` tokens in `arrays`."""
    return np.unique(np.concatenate([_hashes(a, length) for a in arrays]))


def shared(tokens: np.ndarray, known: np.ndarray, length: int = LENGTH) -> int:
    """How many windows of `tokens` occur in `known` (from `ngrams`)."""
    mine = _hashes(np.asarray(tokens), length)
    if not len(known) or not len(mine):
        return 0
    at = np.minimum(np.searchsorted(known, mine), len(known) - 1)
    return int((known[at] == mine).sum())
