# SPDX-License-Identifier: Apache-2.0
"""The walk: from the root, follow the child whose token equals the sample; the first miss is the bonus."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from aeon_ddtree.kernels.walk_tree import walk_tree
from aeon_ddtree.tree.draft_tree import DraftTree


@dataclass(frozen=True)
class Walk:
    """The accepted path of R trees.

    path      [R, P] int64  rows, root first, -1 after the end
    path_len  [R]    int64  rows on the path, the root counted (>= 1)
    bonus     [R]    int64  the token sampled at the path's last row
    """

    path: Tensor
    path_len: Tensor
    bonus: Tensor


def walk(tree: DraftTree, sampled: Tensor, max_len: int) -> Walk:
    """Walk every tree along `sampled` [R, W], the target's token after each row; at most `max_len` = P rows."""
    return Walk(*walk_tree(tree.token, tree.parent, tree.num_nodes, sampled, max_len=max_len))
