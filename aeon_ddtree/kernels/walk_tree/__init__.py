# SPDX-License-Identifier: Apache-2.0
"""The walk: which path of a verified tree the target's own samples follow."""

from __future__ import annotations

from torch import Tensor

from aeon_ddtree.kernels.checks import Shapes, check_parents, check_width, require
from aeon_ddtree.kernels.dispatch import takes_triton
from aeon_ddtree.kernels.walk_tree import reference

__all__ = ["walk_tree"]


def walk_tree(
    token: Tensor, parent: Tensor, num_nodes: Tensor, sampled: Tensor, *, max_len: int
) -> tuple[Tensor, Tensor, Tensor]:
    """From the root follow the child whose token equals the row's sample; the first miss is the bonus.

    token, sampled int [R, W] (token drafted at a row; token sampled after it); parent int [R, W], `row -> parent row`,
    −1 for row 0 and padding; num_nodes int [R], rows 1 … num_nodes are nodes, the rest is padding and never accepted.
    Among children with the same token the lowest row counts. max_len = P >= 1: longest path, root included.

    Returns path int64 [R, P] (rows, root first, −1 padded), path_len int64 [R] (root counted, so at least 1), bonus
    int64 [R] (the sample after the last row of the path).
    """
    shapes = Shapes()
    shapes("token", token, "R W", "int")
    shapes("parent", parent, "R W", "int")
    shapes("num_nodes", num_nodes, "R", "int")
    shapes("sampled", sampled, "R W", "int")
    check_width("token", shapes["W"])
    require(max_len >= 1, f"max_len is {max_len}, expected at least 1, the root")
    check_parents(parent)
    if takes_triton(token):
        from aeon_ddtree.kernels.walk_tree import triton

        return triton.walk(token, parent, num_nodes, sampled, max_len)
    return reference.walk(token, parent, num_nodes, sampled, max_len)
