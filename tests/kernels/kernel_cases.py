# SPDX-License-Identifier: Apache-2.0
"""Trees, shapes and paths for the kernel tests, and hypothesis strategies over them."""

from __future__ import annotations

import random

import torch
from hypothesis import strategies as st
from torch import Tensor

WIDTHS = (1, 9, 17, 33, 65, 127)
SHAPES = ("random", "chain", "star", "comb", "binary", "padded")
SENTINEL = 0x5A5A5A5A


def parents(shape: str, width: int, seed: int = 0) -> list[int]:
    """`row -> parent row` of one window: row 0 has −1, padding rows (shape "padded") have −1."""
    rng = random.Random(seed)
    if shape == "chain":  # also the deepest tree of this width
        return [i - 1 for i in range(width)]
    if shape == "star":
        return [-1] + [0] * (width - 1)
    if shape == "comb":  # a spine with one leaf per spine node
        return [-1, 0, 0, *(i - 2 if i % 2 else i - 3 for i in range(3, width))][:width]
    if shape == "binary":
        return [(i - 1) // 2 if i else -1 for i in range(width)]
    used = rng.randint(1, width) if shape == "padded" else width
    # Half the draws take a recent row, so that deep and bushy trees both come up.
    pick = [max(0, i - rng.randint(1, 3)) if rng.random() < 0.5 else rng.randrange(i) for i in range(1, used)]
    return [-1, *pick, *[-1] * (width - used)]


def forest(width: int, seed: int = 0, shapes: tuple[str, ...] = SHAPES) -> Tensor:
    """One window of every shape, int64 [len(shapes), width]."""
    return torch.tensor([parents(shape, width, seed + n) for n, shape in enumerate(shapes)])


def path_to(parent: list[int] | Tensor, row: int) -> list[int]:
    """Rows from the root to `row`, by following pointers one at a time."""
    out = []
    while row >= 0:
        out.append(row)
        row = int(parent[row])
    return out[::-1]


def num_rows(parent: Tensor) -> int:
    """Rows in use of one window: the root and all rows with a parent."""
    return 1 + int((parent >= 0).sum())


def pack_paths(paths: list[list[int]], length: int) -> tuple[Tensor, Tensor]:
    """Lists of rows -> path [R, length] −1 padded, path_len [R]."""
    packed = [rows + [-1] * (length - len(rows)) for rows in paths]
    return torch.tensor(packed).reshape(len(paths), length), torch.tensor([len(rows) for rows in paths])


@st.composite
def random_parents(draw: st.DrawFn, max_width: int = 24) -> list[int]:
    """Any tree with any amount of padding behind it."""
    used = draw(st.integers(1, max_width))
    pointers = [draw(st.integers(0, i - 1)) for i in range(1, used)]
    return [-1, *pointers, *[-1] * draw(st.integers(0, 4))]


def poison_int(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """A buffer whose cells carry a recognisable bit pattern (a finite float), to see which cells were written."""
    return torch.full(shape, SENTINEL, dtype=torch.int32).view(torch.float32).to(dtype)
