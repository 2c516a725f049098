# SPDX-License-Identifier: Apache-2.0
"""The draft tree: its arrays, how it is built, and the policy that says which tree to build."""

from aeon_ddtree.tree.building import (
    TOPOLOGIES,
    Candidates,
    build_tree_from,
    chain_tree,
    draft_candidates,
    register_topology,
    root_tree,
)
from aeon_ddtree.tree.draft_tree import DraftTree
from aeon_ddtree.tree.policy import MAX_BUDGET, TreePolicy

__all__ = [
    "MAX_BUDGET",
    "TOPOLOGIES",
    "Candidates",
    "DraftTree",
    "TreePolicy",
    "build_tree_from",
    "chain_tree",
    "draft_candidates",
    "register_topology",
    "root_tree",
]
