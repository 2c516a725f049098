# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule over a tree of rows, from one committed state that verification only reads.

    S_i = exp(g_i) S_parent(i) + u_i k_i^T,   u_i = beta_i (v_i − exp(g_i) S_parent(i) k_i),   o_i = scale · S_i q_i

with g = −exp(A_log) · softplus(a + dt_bias), beta = sigmoid(b), and q, k divided by sqrt(sum of squares + 1e-6)
(Yang et al., "Gated Delta Networks", 2024; conventions of Qwen3.5 in transformers). No node state is ever formed: the
rule unrolls to one unit-triangular system over the window (the WY form), solved per head.
"""

from __future__ import annotations

from torch import Tensor

from aeon_ddtree.kernels.checks import Shapes, check_parents, check_path, check_slots, check_width, require
from aeon_ddtree.kernels.gated_delta_tree import reference
from aeon_ddtree.kernels.gated_delta_tree.reference import TreeFactors

__all__ = ["TreeFactors", "fold_state", "gated_delta_chain", "gated_delta_tree"]


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
    shapes("state", state, "S Hv Dv Dk", "state")
    shapes("slots", slots, "R", "int")
    shapes("has_state", has_state, "R", "bool", optional=True)
    heads, key_heads = shapes["Hv"], shapes["Hk"]
    require(heads % key_heads == 0, f"v has {heads} heads, expected a multiple of the {key_heads} heads of k")
    return shapes


def gated_delta_tree(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    state: Tensor, slots: Tensor, parent: Tensor, *, has_state: Tensor | None = None, scale: float | None = None,
    ancestors: Tensor | None = None,
) -> tuple[Tensor, TreeFactors]:  # fmt: skip
    """Outputs of every row of R trees, and the factors from which any path can later be committed.

    q, k [R, W, Hk, Dk], v [R, W, Hv, Dv], a, b [R, W, Hv] (raw projections), A_log, dt_bias [Hv];
    state [S, Hv, Dv, Dk] fp32/fp64, read only; slots int [R], `request -> state slot`, negative = padding request
    (output 0); parent int [R, W], `row -> parent row`, −1 for row 0 and padding rows (output 0);
    has_state bool [R]: False starts from a zero state whatever the slot holds; scale defaults to Dk**-0.5;
    ancestors bool [R, W, W]: `ancestor_mask(parent)` if the caller has it already (one mask serves every layer).
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
    return reference.tree(q, k, v, a, b, A_log, dt_bias, state, slots, parent, has_state, scale, ancestors)


def fold_state(
    state: Tensor, slots: Tensor, factors: TreeFactors, path: Tensor, path_len: Tensor, *,
    has_state: Tensor | None = None,
) -> None:  # fmt: skip
    """Commit a path in place: state[slots[r]] becomes the state after rows path[r, :path_len[r]].

    state [S, Hv, Dv, Dk] fp32/fp64; slots int [R]; path int [R, P], rows root first, −1 padded; path_len int [R],
    root counted, 0 = leave this slot untouched; has_state as given to `gated_delta_tree`. Every other slot keeps its
    bytes. Slots of requests with path_len > 0 must differ from each other.
    """
    shapes = Shapes()
    shapes("state", state, "S Hv Dv Dk", "state")
    shapes("slots", slots, "R", "int")
    shapes("factors.u", factors.u, "R W Hv Dv", "state")
    shapes("factors.k", factors.k, "R W Hk Dk", "state")
    shapes("factors.c", factors.c, "R W Hv", "state")
    shapes("path", path, "R P", "int")
    shapes("path_len", path_len, "R", "int")
    shapes("has_state", has_state, "R", "bool", optional=True)
    check_path(path, path_len, shapes["W"])
    check_slots(slots, shapes["S"], path_len > 0)
    reference.fold(state, slots, factors, path, path_len, has_state)


def gated_delta_chain(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    state: Tensor, slots: Tensor, length: Tensor, *, has_state: Tensor | None = None, chunk: int = 64,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Prefill and plain decoding: a chain of length[r] tokens per request, committed in place.

    Arguments as `gated_delta_tree` with W = L of any size; length int [R], 0 = leave the slot untouched. Positions at
    or beyond the length give 0. Works chunk by chunk (`chunk` rows, 1 to 128). Returns out [R, L, Hv, Dv] in v.dtype.
    """
    shapes = _check_inputs(q, k, v, a, b, A_log, dt_bias, state, slots, has_state)
    shapes("length", length, "R", "int")
    check_width("chunk", chunk)
    check_slots(slots, shapes["S"], length > 0)
    return reference.chain(q, k, v, a, b, A_log, dt_bias, state, slots, length, has_state, chunk, scale)
