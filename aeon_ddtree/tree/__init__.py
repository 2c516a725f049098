# SPDX-License-Identifier: Apache-2.0
"""The draft tree: its arrays, how it is built, and the policy that says which tree to build.

Names are imported when first used, so that checking a policy does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aeon_ddtree.tree.building import (
        Candidates,
        Placement,
        build_tree_from,
        chain_tree,
        draft_candidates,
        root_tree,
    )
    from aeon_ddtree.tree.draft_tree import DraftTree
    from aeon_ddtree.tree.policy import MAX_BUDGET, TreePolicy
    from aeon_ddtree.tree.topologies import TOPOLOGIES

__all__ = [
    "MAX_BUDGET",
    "TOPOLOGIES",
    "Candidates",
    "DraftTree",
    "Placement",
    "TreePolicy",
    "build_tree_from",
    "chain_tree",
    "draft_candidates",
    "root_tree",
]

_HOME = {
    "MAX_BUDGET": "policy",
    "TreePolicy": "policy",
    "TOPOLOGIES": "topologies",
    "DraftTree": "draft_tree",
    **dict.fromkeys(
        ("Candidates", "Placement", "build_tree_from", "chain_tree", "draft_candidates", "root_tree"), "building"
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
