# SPDX-License-Identifier: Apache-2.0
"""The registry of topologies. Imports no torch: options are checked before anything heavy is loaded.

To add a topology: write a builder with the signature of `building.best_first`, and add a line here that says where it
is. `TreePolicy(topology=NAME)` then accepts the name and `building.build_tree_from` calls the builder.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

TOPOLOGIES: dict[str, str] = {
    "best_first": "aeon_ddtree.tree.building:best_first",
    "root_leaves": "aeon_ddtree.tree.building:root_leaves",
}
"""name -> "module:function" of the builder."""


def topology_builder(name: str) -> Callable[..., Any]:
    """The builder of the topology called `name`; ValueError if there is none."""
    if name not in TOPOLOGIES:
        raise ValueError(f"topology={name!r}: expected one of {', '.join(sorted(TOPOLOGIES))}")
    module, _, function = TOPOLOGIES[name].partition(":")
    return getattr(importlib.import_module(module), function)
