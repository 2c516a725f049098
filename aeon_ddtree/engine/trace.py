# SPDX-License-Identifier: Apache-2.0
"""`DDTREE_TRACE_FILE`: one JSON line per verified tree, for drawing and debugging. Synchronises; off by default."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from aeon_ddtree.tree.draft_tree import DraftTree
from aeon_ddtree.verify.walk import Walk

VARIABLE = "DDTREE_TRACE_FILE"


class Trace:
    """Appends to a file, or does nothing when there is none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @classmethod
    def from_environment(cls) -> Trace:
        name = os.environ.get(VARIABLE)
        return cls(Path(name) if name else None)

    def write(self, req_ids: Sequence[str], tree_reqs: Sequence[int], tree: DraftTree, walk: Walk) -> None:
        """A line per request with a tree: {"req_id", "token", "parent", "depth", "path", "bonus"}; rows in use only."""
        if self._path is None or not tree_reqs:
            return
        with self._path.open("a") as out:
            for r in tree_reqs:
                rows = int(tree.num_nodes[r]) + 1
                line = {
                    "req_id": req_ids[r],
                    "token": tree.token[r, :rows].tolist(),
                    "parent": tree.parent[r, :rows].tolist(),
                    "depth": tree.depth[r, :rows].tolist(),
                    "path": walk.path[r, : int(walk.path_len[r])].tolist(),
                    "bonus": int(walk.bonus[r]),
                }
                out.write(json.dumps(line) + "\n")
