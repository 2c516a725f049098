# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule over a tree of rows, from one committed state that verification only reads.

    S_i = exp(g_i) S_parent(i) + u_i k_i^T,   u_i = beta_i (v_i − exp(g_i) S_parent(i) k_i),   o_i = scale · S_i q_i

with g = −exp(A_log) · softplus(a + dt_bias), beta = sigmoid(b), and q, k divided by sqrt(sum of squares + 1e-6)
(Yang et al., "Gated Delta Networks", 2024; conventions of Qwen3.5 in transformers). No node state is ever formed: the
rule unrolls to one unit-triangular system over the window (the WY form), solved per head.

On a CUDA device this is Triton (`triton.py`), except that fp64 tensors and heads wider than 256 go to the reference,
which is plain PyTorch and runs on any device. Elsewhere it is always the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
from aeon_ddtree.kernels.gated_delta_tree import reference
from aeon_ddtree.kernels.gated_delta_tree.reference import TreeFactors

__all__ = ["TreeFactors", "fold_state", "fold_states", "gated_delta_chain", "gated_delta_tree"]

# Wider heads do not fit into the shared memory of a GB10 (99 KiB per block).
_MAX_HEAD = 256


def _check_inputs(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor,
    slots: Tensor, has_state: Tensor | None,
) -> Shapes:  # fmt: skip
    shapes = Shapes()
    shapes("q", q, "R W Hk Dk", "float")
    shapes("k", k, "R W Hk Dk", "float")
    shapes("v", v, "R W Hv Dv", "float")
    shapes("a", a, "R W Hv", "float")
    shapes("b", b, "R W Hv", "float")
    shapes("A_log", a_log, "Hv", "float")
    shapes("dt_bias", dt_bias, "Hv", "float")
    shapes("state", state, "S Hv Dv Dk", "recurrent")
    shapes("slots", slots, "R", "int")
    shapes("has_state", has_state, "R", "bool", optional=True)
    heads, key_heads = shapes["Hv"], shapes["Hk"]
    require(heads % key_heads == 0, f"v has {heads} heads, expected a multiple of the {key_heads} heads of k")
    return shapes


def _on_triton(head: int, *tensors: Tensor) -> bool:
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return takes_triton(tensors[0]) and not wide and head <= _MAX_HEAD


def _check_state_layout(name: str, state: Tensor) -> None:
    check_layout(name, state, state.shape[3], 1)
    require(state.data_ptr() % 16 == 0, f"{name} starts at an address not divisible by 16, expected an aligned tensor")


def _check_rows_layout(
    q: Tensor, k: Tensor, v: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, slots: Tensor,
    has_state: Tensor | None,
) -> None:  # fmt: skip
    for name, tensor in (("q", q), ("k", k), ("v", v), ("A_log", a_log), ("dt_bias", dt_bias), ("slots", slots)):
        check_layout(name, tensor, 1)
    require(k.dtype == q.dtype, f"k has dtype {k.dtype}, expected {q.dtype} like q: convert it first")
    check_layout("has_state", has_state, 1)
    _check_state_layout("state", state)


def gated_delta_tree(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    state: Tensor, slots: Tensor, parent: Tensor, *, has_state: Tensor | None = None, scale: float | None = None,
    ancestors: Tensor | None = None, factors: TreeFactors | None = None,
) -> tuple[Tensor, TreeFactors]:  # fmt: skip
    """Outputs of every row of R trees, and the factors from which any path can later be committed.

    q, k [R, W, Hk, Dk], v [R, W, Hv, Dv], a, b [R, W, Hv] (raw projections), A_log, dt_bias [Hv];
    state [S, Hv, Dv, Dk] fp32/bf16/fp64, read only; slots int [R], `request -> state slot`, negative = padding request
    (output 0); parent int [R, W], `row -> parent row`, −1 for row 0 and padding rows (output 0);
    has_state bool [R]: False starts from a zero state whatever the slot holds; scale defaults to Dk**-0.5;
    ancestors bool [R, W, W]: `ancestor_mask(parent)` if the caller has it already (one mask serves every layer);
    factors: written in place and returned if given (contiguous), else allocated.
    Head h of v uses head h // (Hv // Hk) of q and k. W at most 128.

    Returns (out [R, W, Hv, Dv] in v.dtype, TreeFactors). ValueError names the argument at fault.
    """
    shapes = _check_inputs(q, k, v, a, b, A_log, dt_bias, state, slots, has_state)
    shapes("parent", parent, "R W", "int")
    if ancestors is not None:
        shapes.bind("W'", shapes["W"], "q")
        shapes("ancestors", ancestors, "R W W'", "bool")
    check_width("q", shapes["W"])
    check_parents(parent)
    check_slots(slots, shapes["S"])
    if factors is not None:
        _check_factors(shapes, "factors", factors)
    if _on_triton(max(shapes["Dk"], shapes["Dv"]), q, k, v, a, b, A_log, dt_bias, state):
        from aeon_ddtree.kernels.gated_delta_tree import triton

        _check_rows_layout(q, k, v, A_log, dt_bias, state, slots, has_state)
        check_layout("parent", parent, 1)
        check_layout("ancestors", ancestors, shapes["W"], 1)
        if factors is not None:
            _check_factors_layout("factors", factors)
        return triton.tree(
            q, k, v, a, b, A_log, dt_bias, state, slots, parent, has_state, scale, ancestors, factors
        )  # fmt: skip
    out, made = reference.tree(q, k, v, a, b, A_log, dt_bias, state, slots, parent, has_state, scale, ancestors)
    if factors is None:
        return out, made
    for target, source in zip(factors, made):
        target.copy_(source)
    return out, factors


def _check_factors(shapes: Shapes, name: str, factors: TreeFactors) -> None:
    shapes(f"{name}.u", factors.u, "R W Hv Dv", "state")
    shapes(f"{name}.k", factors.k, "R W Hk Dk", "state")
    shapes(f"{name}.c", factors.c, "R W Hv", "state")


def _check_factors_layout(name: str, factors: TreeFactors) -> None:
    for field, tensor, dtype in zip(factors._fields, factors, (torch.float32, torch.float32, torch.float64)):
        at = f"{name}.{field}"
        require(tensor.dtype == dtype, f"{at} has dtype {tensor.dtype}, expected {dtype}")
        require(tensor.is_contiguous(), f"{at} has strides {tensor.stride()}, expected a contiguous tensor")
        require(tensor.data_ptr() % 16 == 0, f"{at} starts at an address not divisible by 16, expected an aligned one")


def fold_state(
    state: Tensor, slots: Tensor, factors: TreeFactors, path: Tensor, path_len: Tensor, *,
    has_state: Tensor | None = None,
) -> None:  # fmt: skip
    """Commit a path in place: state[slots[r]] becomes the state after rows path[r, :path_len[r]].

    state [S, Hv, Dv, Dk] fp32/bf16/fp64; slots int [R]; path int [R, P], rows root first, −1 padded; path_len int [R],
    root counted, 0 = leave this slot untouched; has_state as given to `gated_delta_tree`. Every other slot keeps its
    bytes. Slots of requests with path_len > 0 must differ from each other.
    """
    fold_states([state], slots, [factors], path, path_len, has_state=has_state)


def fold_states(
    states: Sequence[Tensor], slots: Tensor, factors: Sequence[TreeFactors], path: Tensor, path_len: Tensor, *,
    has_state: Tensor | None = None,
) -> None:  # fmt: skip
    """`fold_state` of all layers: states[l] with factors[l]; one launch on CUDA.

    Layers share shapes, dtypes and strides. Before a CUDA graph capture, call it once with the same tensors (their
    addresses go to the device as a table, which is kept).
    """
    require(len(states) == len(factors), f"factors holds {len(factors)} layers, expected {len(states)} as in states")
    shapes = Shapes()
    for layer, (state, kept) in enumerate(zip(states, factors)):
        tag = f"[{layer}]" if len(states) > 1 else ""
        shapes(f"state{tag}", state, "S Hv Dv Dk", "recurrent")
        _check_factors(shapes, f"factors{tag}", kept)
        alike = (state.dtype, state.stride(), [x.dtype for x in kept])
        first = (states[0].dtype, states[0].stride(), [x.dtype for x in factors[0]])
        require(alike == first, f"state{tag} or its factors have {alike}, expected {first} as in the first layer")
    if not states:
        return
    check_commit(shapes, slots, path, path_len, has_state)
    if _on_triton(max(shapes["Dk"], shapes["Dv"]), states[0], factors[0].u, factors[0].k):
        from aeon_ddtree.kernels.gated_delta_tree import triton

        for name, tensor in (("slots", slots), ("path", path), ("path_len", path_len), ("has_state", has_state)):
            check_layout(name, tensor, 1)
        for layer, (state, kept) in enumerate(zip(states, factors)):
            _check_state_layout(f"state[{layer}]", state)
            _check_factors_layout(f"factors[{layer}]", kept)
        triton.fold(states, slots, factors, path, path_len, has_state)
        return
    for state, kept in zip(states, factors):
        reference.fold(state, slots, kept, path, path_len, has_state)


def gated_delta_chain(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    state: Tensor, slots: Tensor, length: Tensor, *, has_state: Tensor | None = None, chunk: int = 64,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Prefill and plain decoding: a chain of length[r] tokens per request, committed in place.

    Arguments as `gated_delta_tree` with W = L of any size; length int [R], 0 = leave the slot untouched. Positions at
    or beyond the length give 0. Works chunk by chunk (`chunk` rows, 1 to 128). Returns out [R, L, Hv, Dv] in v.dtype.
    On CUDA each chunk is verified as a chain-shaped tree and folded.
    """
    shapes = _check_inputs(q, k, v, a, b, A_log, dt_bias, state, slots, has_state)
    shapes("length", length, "R", "int")
    check_width("chunk", chunk)
    check_slots(slots, shapes["S"], length > 0)
    if _on_triton(max(shapes["Dk"], shapes["Dv"]), q, k, v, a, b, A_log, dt_bias, state):
        from aeon_ddtree.kernels.gated_delta_tree import triton

        _check_rows_layout(q, k, v, A_log, dt_bias, state, slots, has_state)
        return triton.chain(q, k, v, a, b, A_log, dt_bias, state, slots, length, has_state, chunk, scale)
    return reference.chain(q, k, v, a, b, A_log, dt_bias, state, slots, length, has_state, chunk, scale)
