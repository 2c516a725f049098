# SPDX-License-Identifier: Apache-2.0
"""Argument checks shared by the kernels: every failure is a `ValueError` that names the argument.

Shapes, dtypes and devices are always checked; they cost no device work. Values (is a parent before its child, is a slot
used twice) would need a host synchronisation, so they are checked only with `DDTREE_CHECK=1` or `enable_checks(True)`.
"""

from __future__ import annotations

import os
from functools import lru_cache

import torch
from torch import Tensor

MAX_WIDTH = 128

_override: bool | None = None
_KINDS = {
    "float": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    "state": (torch.float32, torch.float64),
    "recurrent": (torch.float32, torch.bfloat16, torch.float64),
    "int": (torch.int32, torch.int64),
    "bool": (torch.bool,),
}


@lru_cache(maxsize=1)
def _enabled_by_environment() -> bool:
    return os.environ.get("DDTREE_CHECK", "0") == "1"


def checks_enabled() -> bool:
    """Whether value checks (which synchronise with the device) run; the environment is read once."""
    return _enabled_by_environment() if _override is None else _override


def enable_checks(enabled: bool | None) -> None:
    """Turn value checks on or off for this process; None goes back to what `DDTREE_CHECK` says."""
    global _override
    _override = enabled


def reads_are_free(tensor: Tensor) -> bool:
    """Whether the host may look at values without waiting for a device: work can then be sized by what is there.

    Looked up through the module, so that tests can have the CPU take the path of a device.
    """
    return tensor.device.type == "cpu"


class Shapes:
    """Binds dimension names to sizes over one call's arguments, so that a mismatch names the argument.

    >>> shapes = Shapes(); shapes("q", q, "R W H D", "float"); shapes("slots", slots, "R", "int"); shapes["R"]
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._owners: dict[str, str] = {}
        self._device: torch.device | None = None

    def __getitem__(self, dim: str) -> int:
        return self._sizes[dim]

    def bind(self, dim: str, size: int, owner: str) -> None:
        """Fix a dimension that follows from the others, for example K − 1."""
        self._sizes[dim], self._owners[dim] = size, owner

    def __call__(self, name: str, tensor: Tensor | None, dims: str, kind: str, *, optional: bool = False) -> None:
        if tensor is None:
            if optional:
                return
            raise ValueError(f"{name} is None, expected a tensor [{dims}]")
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}, expected a tensor [{dims}]")
        if tensor.dtype not in _KINDS[kind]:
            wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in _KINDS[kind])
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected one of {wanted}: convert it first")
        names = dims.split()
        if tensor.ndim != len(names):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {len(names)} dimensions [{dims}]")
        for dim, size in zip(names, tensor.shape, strict=True):
            if self._sizes.setdefault(dim, size) != size:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, expected [{dims}] with {dim} = {self._sizes[dim]} "
                    f"as in {self._owners[dim]}"
                )
            self._owners.setdefault(dim, name)
        if self._device is None:
            self._device = tensor.device
        elif tensor.device != self._device:
            raise ValueError(f"{name} is on {tensor.device}, expected {self._device} like the first argument: move it")


def check_layout(name: str, tensor: Tensor | None, *inner: int) -> None:
    """The innermost strides a device kernel relies on, as wanted sizes: `check_layout("q", q, 1)` for packed rows.

    Dimensions of size 1 have no stride worth the name.
    """
    if tensor is None:
        return
    start = tensor.ndim - len(inner)
    for dim, wanted in enumerate(inner, start):
        if tensor.shape[dim] > 1 and tensor.stride(dim) != wanted:
            raise ValueError(
                f"{name} has strides {tensor.stride()}, expected {inner} in its last dimensions: make it contiguous"
            )


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless the condition, known on the host, holds."""
    if not condition:
        raise ValueError(message)


def check_width(name: str, width: int) -> None:
    """A verify window has 1 to 128 rows (budget at most 127)."""
    require(1 <= width <= MAX_WIDTH, f"{name} has {width} rows, expected 1 to {MAX_WIDTH}: lower the budget")


def check_parents(parent: Tensor) -> None:
    """Value check: row 0 has parent −1 and every other row a parent before it, or −1 for padding."""
    if not checks_enabled():
        return
    row = torch.arange(parent.shape[1], device=parent.device)
    bad = (parent >= row) | (parent < -1)
    if bool(bad.any()):
        r, i = (int(x) for x in bad.nonzero()[0])
        raise ValueError(f"parent[{r}, {i}] is {int(parent[r, i])}, expected -1 or an earlier row (0 to {i - 1})")


def check_slots(slots: Tensor, num_slots: int, active: Tensor | None = None) -> None:
    """Value check: slots are below num_slots, and no two requests that write share one (negative = padding)."""
    if not checks_enabled():
        return
    used = slots >= 0 if active is None else (slots >= 0) & active
    if bool((slots[used] >= num_slots).any()):
        raise ValueError(f"slots holds {int(slots.max())}, expected values below {num_slots}, the number of states")
    if slots[used].unique().numel() != slots[used].numel():
        raise ValueError(f"slots holds a slot twice among active requests: {slots.tolist()}; each needs its own")


def check_commit(shapes: Shapes, slots: Tensor, path: Tensor, path_len: Tensor, has_state: Tensor | None) -> None:
    """What a commit is given beside its layers: slots, path_len, has_state [R], path [R, P]; shapes knows W and S."""
    shapes("slots", slots, "R", "int")
    shapes("path", path, "R P", "int")
    shapes("path_len", path_len, "R", "int")
    shapes("has_state", has_state, "R", "bool", optional=True)
    check_path(path, path_len, shapes["W"])
    check_slots(slots, shapes["S"], path_len > 0)


def check_path(path: Tensor, path_len: Tensor, width: int) -> None:
    """Value check: a non-empty path starts at row 0, ascends, and stays inside the window."""
    if not checks_enabled():
        return
    step = torch.arange(path.shape[1], device=path.device)
    inside = step < path_len[:, None]
    bad = inside & ((path < 0) | (path >= width) | ((step == 0) & (path != 0)))
    bad[:, 1:] |= inside[:, 1:] & (path[:, 1:] <= path[:, :-1])
    if bool(bad.any()) or bool((path_len > path.shape[1]).any()):
        r = int((bad.any(1) | (path_len > path.shape[1])).nonzero()[0])
        raise ValueError(
            f"path[{r}] is {path[r].tolist()} with path_len {int(path_len[r])}, expected ascending rows "
            f"from 0 below {width}"
        )
