# SPDX-License-Identifier: Apache-2.0
"""A case of the bench, and where its inputs come from."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aeon_ddtree.kernels.bench.shapes import Model
from aeon_ddtree.kernels.compare import tolerance, worst

_BEYOND_CACHE = 192 << 20
"""Bytes that the calls of a case touch between two uses of the same input: an H200's L2 holds 50 MB."""
ACCEPTED = 8
"""Rows of every request that commits take."""

Call = Callable[[], Any]


@dataclass
class Ready:
    """A prepared case.

    calls   one per set of inputs, timed as one graph; every call is `units` layers
    moved   bytes that one unit must move, whatever the kernel
    check   None, or what is wrong with the answers of calls[0]; run before anything is timed
    stock   makes the stock kernel's calls, each one unit of the same work, by label; the fastest label counts
    """

    calls: Sequence[Call]
    moved: int
    check: Callable[[], str | None]
    units: int = 1
    stock: Callable[[], dict[str, Sequence[Call]]] | None = None


@dataclass(frozen=True)
class Case:
    """kernel: the operation's name; prepare makes its inputs; hot: runs in every step of decoding."""

    kernel: str
    model: Model
    width: int
    batch: int
    prepare: Callable[[Source, Case], Ready] = field(repr=False)
    context: int = 0
    hot: bool = True

    @property
    def label(self) -> str:
        context = f" context {self.context}" if self.context else ""
        return f"{self.kernel} {self.model.name} W={self.width} R={self.batch}{context}"


class Source:
    """Inputs on one device, from a seed. On the device "meta" nothing has values, and one set is enough."""

    def __init__(self, device: torch.device | str, seed: int = 0) -> None:
        self.device = torch.device(device)
        self._real = self.device.type != "meta"
        self._generator = torch.Generator(self.device).manual_seed(seed) if self._real else None
        self._host = torch.Generator().manual_seed(seed)
        self._trees = random.Random(seed)
        self._pools: dict[Any, Tensor] = {}

    def normal(self, *size: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        out = torch.empty(*size, dtype=dtype, device=self.device)
        return out.normal_(0, scale, generator=self._generator) if self._real else out

    def integers(self, low: int, high: int, *size: int) -> Tensor:
        """int64, low … high − 1."""
        return torch.randint(low, high, size, generator=self._host).to(self.device)

    def permutation(self, count: int, *size: int) -> Tensor:
        """Different numbers below `count`, int64."""
        if not self._real:
            return torch.empty(size, dtype=torch.int64, device=self.device)
        mixed = torch.randperm(count, generator=self._generator, device=self.device)
        return mixed[: math.prod(size)].reshape(size)

    def values(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device)

    def full(self, size: Sequence[int] | int, value: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full((size,) if isinstance(size, int) else tuple(size), value, dtype=dtype, device=self.device)

    def trees(self, requests: int, width: int) -> Tensor:
        """parent int64 [R, W]: deep and bushy trees, all rows in use."""
        rng = self._trees
        rows = [
            [-1] + [max(0, i - rng.randint(1, 3)) if rng.random() < 0.5 else rng.randrange(i) for i in range(1, width)]
            for _ in range(requests)
        ]
        return self.values(rows)

    def sets(self, bytes_of_one: int, low: int, high: int) -> int:
        """How many sets of inputs keep the cache from answering."""
        return min(high, max(low, -(-_BEYOND_CACHE // max(1, bytes_of_one)))) if self._real else 1

    def pool(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        """A large buffer that cases share."""
        if key not in self._pools:
            self._pools[key] = make()
        return self._pools[key]

    def drop_pools(self) -> None:
        self._pools.clear()


def off(name: str, got: Tensor, truth: Tensor, exact: bool = False) -> str | None:
    """What is wrong with an answer, or None."""
    allowed = 0.0 if exact else tolerance(got.dtype, truth)
    error = worst(got, truth)
    return None if error <= allowed else f"{name} is off by {error:.3g}, expected at most {allowed:.3g}"


def first(*complaints: str | None) -> str | None:
    return next((each for each in complaints if each), None)
