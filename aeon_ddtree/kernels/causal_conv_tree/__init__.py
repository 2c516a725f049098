# SPDX-License-Identifier: Apache-2.0
"""Short causal convolution over a tree of rows: each row's window runs up its own ancestor path.

    y_i = act(bias + sum_{m = 0}^{K-1} weight[:, K-1-m] · x at the m-th ancestor of i)

where the ancestors above the root are the committed window, newest first.
"""

from __future__ import annotations

from torch import Tensor

from aeon_ddtree.kernels.causal_conv_tree import reference
from aeon_ddtree.kernels.checks import Shapes, check_parents, check_path, check_slots, check_width, require

__all__ = ["causal_conv_chain", "causal_conv_tree", "conv_commit"]


def _check_inputs(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, has_state: Tensor | None,
    activation: str | None,
) -> Shapes:  # fmt: skip
    shapes = Shapes()
    shapes("x", x, "R W C", "float")
    shapes("weight", weight, "C K", "float")
    require(2 <= shapes["K"] <= 4, f"weight has {shapes['K']} taps, expected 2 to 4 in its last dimension")
    shapes.bind("K-1", shapes["K"] - 1, "weight")
    shapes("conv_state", conv_state, "S K-1 C", "float")
    shapes("bias", bias, "C", "float", optional=True)
    shapes("slots", slots, "R", "int")
    shapes("has_state", has_state, "R", "bool", optional=True)
    require(activation in (None, "silu"), f"activation is {activation!r}, expected 'silu' or None")
    return shapes


def causal_conv_tree(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, parent: Tensor, *,
    has_state: Tensor | None = None, activation: str | None = "silu",
) -> Tensor:  # fmt: skip
    """Convolution of every row along its own path. Reads the committed windows, writes nothing.

    x [R, W, C]; conv_state [S, K−1, C], oldest input first; weight [C, K], the last tap for the row itself; K 2 to 4;
    bias [C] or None; slots int [R], `request -> window slot`, negative = padding request (output 0); parent int [R, W],
    −1 for row 0 and padding rows (output 0); has_state bool [R]: False means a zero window. Sums in fp32 (fp64 for
    fp64 x). Returns y [R, W, C] in x.dtype. ValueError names the argument at fault.
    """
    shapes = _check_inputs(x, conv_state, weight, bias, slots, has_state, activation)
    shapes("parent", parent, "R W", "int")
    check_width("x", shapes["W"])
    check_parents(parent)
    check_slots(slots, shapes["S"])
    return reference.tree(x, conv_state, weight, bias, slots, parent, has_state, activation)


def conv_commit(
    conv_state: Tensor, slots: Tensor, x: Tensor, path: Tensor, path_len: Tensor, *, has_state: Tensor | None = None
) -> None:
    """Commit a path in place: the window becomes the last K−1 inputs of (old window, x along the path).

    conv_state [S, K−1, C]; x [R, W, C] as given to `causal_conv_tree`; path int [R, P], rows root first, −1 padded;
    path_len int [R], root counted, 0 = leave this slot untouched. The old window is read whole before it is written.
    """
    shapes = Shapes()
    shapes("conv_state", conv_state, "S K-1 C", "float")
    shapes("slots", slots, "R", "int")
    shapes("x", x, "R W C", "float")
    shapes("path", path, "R P", "int")
    shapes("path_len", path_len, "R", "int")
    shapes("has_state", has_state, "R", "bool", optional=True)
    check_path(path, path_len, shapes["W"])
    check_slots(slots, shapes["S"], path_len > 0)
    reference.commit(conv_state, slots, x, path, path_len, has_state)


def causal_conv_chain(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, length: Tensor, *,
    has_state: Tensor | None = None, activation: str | None = "silu",
) -> Tensor:  # fmt: skip
    """Prefill and plain decoding: a chain of length[r] inputs per request; its window is updated in place.

    Arguments as `causal_conv_tree` with W = L of any size; length int [R], 0 = leave the slot untouched. Positions at
    or beyond the length give 0. Returns y [R, L, C] in x.dtype; same sums in the same order as the tree.
    """
    shapes = _check_inputs(x, conv_state, weight, bias, slots, has_state, activation)
    shapes("length", length, "R", "int")
    check_slots(slots, shapes["S"], length > 0)
    return reference.chain(x, conv_state, weight, bias, slots, length, has_state, activation)
