# SPDX-License-Identifier: Apache-2.0
"""Short causal convolution over a tree of rows: each row's window runs up its own ancestor path.

    y_i = act(bias + sum_{m = 0}^{K-1} weight[:, K-1-m] · x at the m-th ancestor of i)

where the ancestors above the root are the committed window, newest first.

On a CUDA device this is Triton (`triton.py`), except that fp64 tensors go to the reference, which is plain PyTorch and
runs on any device. Elsewhere it is always the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aeon_ddtree.kernels.causal_conv_tree import reference
from aeon_ddtree.kernels.checks import (
    Shapes,
    check_commit,
    check_layout,
    check_parents,
    check_slots,
    check_width,
    require,
)
from aeon_ddtree.kernels.dispatch import takes_triton

__all__ = ["causal_conv_chain", "causal_conv_tree", "conv_commit", "conv_commits"]


def _on_triton(*tensors: Tensor | None) -> bool:
    wide = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return tensors[0] is not None and takes_triton(tensors[0]) and not wide


def _check_layouts(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        check_layout(name, tensor, 1)


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
    if _on_triton(x, conv_state, weight, bias):
        from aeon_ddtree.kernels.causal_conv_tree import triton

        _check_layouts(x=x, bias=bias, slots=slots, parent=parent, has_state=has_state)
        return triton.tree(x, conv_state, weight, bias, slots, parent, has_state, activation)
    return reference.tree(x, conv_state, weight, bias, slots, parent, has_state, activation)


def conv_commit(
    conv_state: Tensor, slots: Tensor, x: Tensor, path: Tensor, path_len: Tensor, *, has_state: Tensor | None = None
) -> None:
    """Commit a path in place: the window becomes the last K−1 inputs of (old window, x along the path).

    conv_state [S, K−1, C]; x [R, W, C] as given to `causal_conv_tree`; path int [R, P], rows root first, −1 padded;
    path_len int [R], root counted, 0 = leave this slot untouched. The old window is read whole before it is written.
    """
    conv_commits([conv_state], slots, [x], path, path_len, has_state=has_state)


def conv_commits(
    conv_states: Sequence[Tensor], slots: Tensor, xs: Sequence[Tensor], path: Tensor, path_len: Tensor, *,
    has_state: Tensor | None = None,
) -> None:  # fmt: skip
    """`conv_commit` of all layers: conv_states[l] with xs[l]; one launch on CUDA.

    Layers share shapes, dtypes and strides. Before a CUDA graph capture, call it once with the same tensors (their
    addresses go to the device as a table, which is kept).
    """
    require(len(xs) == len(conv_states), f"xs holds {len(xs)} layers, expected {len(conv_states)} as in conv_states")
    shapes = Shapes()
    for layer, (state, x) in enumerate(zip(conv_states, xs)):
        tag = f"[{layer}]" if len(xs) > 1 else ""
        shapes(f"conv_state{tag}", state, "S K-1 C", "float")
        shapes(f"x{tag}", x, "R W C", "float")
        alike, first = (
            (one.dtype, one.stride(), two.dtype, two.stride()) for one, two in ((state, x), (conv_states[0], xs[0]))
        )
        require(alike == first, f"conv_state{tag} and x{tag} have {alike}, expected {first} as in the first layer")
    if not xs:
        return
    check_commit(shapes, slots, path, path_len, has_state)
    if _on_triton(conv_states[0], xs[0]):
        from aeon_ddtree.kernels.causal_conv_tree import triton

        taps = shapes["K-1"]
        require(1 <= taps <= 3, f"conv_state keeps {taps} inputs, expected 1 to 3 (2 to 4 taps)")
        _check_layouts(x=xs[0], slots=slots, path=path, path_len=path_len, has_state=has_state)
        triton.commit(conv_states, slots, xs, path, path_len, has_state)
        return
    for state, x in zip(conv_states, xs):
        reference.commit(state, slots, x, path, path_len, has_state)


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
    if _on_triton(x, conv_state, weight, bias):
        from aeon_ddtree.kernels.causal_conv_tree import triton

        _check_layouts(x=x, bias=bias, slots=slots, has_state=has_state)
        return triton.chain(x, conv_state, weight, bias, slots, length, has_state, activation)
    return reference.chain(x, conv_state, weight, bias, slots, length, has_state, activation)
