# SPDX-License-Identifier: Apache-2.0
"""`DraftTree`: one batch of draft trees as flat arrays of fixed width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aeon_ddtree.kernels.ancestors import ancestor_mask


@dataclass(frozen=True)
class DraftTree:
    """R trees in windows of W = budget + 1 rows; row 0 is the root, parents stand before their children.

    token      [R, W] int64   token of the row; 0 on padding
    parent     [R, W] int64   row -> parent row; -1 for the root and for padding
    depth      [R, W] int64   0 for the root and for padding, else depth of the parent + 1
    num_nodes  [R]    int64   drafted rows, the root not counted: rows 1 .. num_nodes are nodes, the rest is padding

    A prefix of the rows is again a tree, and as long as row i has parent i - 1 it is a chain: the builder places
    the rank-0 path there. Padding is nobody's child and nobody's parent, whatever token it carries.
    """

    token: Tensor
    parent: Tensor
    depth: Tensor
    num_nodes: Tensor

    @property
    def num_requests(self) -> int:
        return self.token.shape[0]

    @property
    def width(self) -> int:
        """W, the rows of a window: budget + 1."""
        return self.token.shape[1]

    @property
    def budget(self) -> int:
        """B, the most nodes that a window holds (the root not counted)."""
        return self.token.shape[1] - 1

    @property
    def device(self) -> torch.device:
        return self.token.device

    @property
    def num_rows(self) -> Tensor:
        """[R] int64: rows in use, root included."""
        return self.num_nodes + 1

    @property
    def is_node(self) -> Tensor:
        """[R, W] bool: True for drafted rows, False for the root and for padding."""
        rows = torch.arange(self.width, device=self.device)
        return (rows > 0) & (rows <= self.num_nodes[:, None])

    def positions(self, base: Tensor) -> Tensor:
        """[R, W]: `base` [R] (position of the root in its sequence) + depth; padding gets the root's position."""
        return base[:, None] + self.depth

    def ancestors(self) -> Tensor:
        """[R, W, W] bool: [r, i, j] is True iff row j is row i or one of its ancestors."""
        return ancestor_mask(self.parent)

    def select(self, index: Tensor) -> DraftTree:
        """The trees of the requests in `index` [N]: N trees in the same window."""
        return DraftTree(self.token[index], self.parent[index], self.depth[index], self.num_nodes[index])

    def truncate(self, rows: Tensor) -> DraftTree:
        """Keep the first rows[r] rows of every tree, `rows` [R] >= 1 counting the root; width and depths stay.

        Parents stand before children, so a prefix of the rows is a tree. Values below 1 keep the root alone.
        """
        num_nodes = torch.minimum(self.num_nodes, (rows.to(self.num_nodes) - 1).clamp(min=0))
        kept = torch.arange(self.width, device=self.device) <= num_nodes[:, None]
        return DraftTree(
            token=torch.where(kept, self.token, 0),
            parent=torch.where(kept, self.parent, -1),
            depth=torch.where(kept, self.depth, 0),
            num_nodes=num_nodes,
        )

    def narrow(self, width: int) -> DraftTree:
        """The first `width` rows of every window, as a narrower batch (width >= 1)."""
        if not 1 <= width <= self.width:
            raise ValueError(f"width {width}: a window of {self.width} rows can be narrowed to 1 .. {self.width} rows")
        return DraftTree(
            self.token[:, :width].contiguous(),
            self.parent[:, :width].contiguous(),
            self.depth[:, :width].contiguous(),
            self.num_nodes.clamp(max=width - 1),
        )

    def validate(self, vocab_size: int | None = None, horizon: int | None = None) -> None:
        """Raise ValueError at the first broken invariant. Reads the tensors on the host: for tests and debugging."""
        requests, width = self.token.shape
        for name in ("token", "parent", "depth"):
            shape = tuple(getattr(self, name).shape)
            if shape != (requests, width):
                raise ValueError(f"{name} has shape {shape}, expected {(requests, width)} like token")
        if tuple(self.num_nodes.shape) != (requests,):
            raise ValueError(f"num_nodes has shape {tuple(self.num_nodes.shape)}, expected {(requests,)}")
        token, parent, depth = self.token.tolist(), self.parent.tolist(), self.depth.tolist()
        for r, count in enumerate(self.num_nodes.tolist()):
            if not 0 <= count < width:
                raise ValueError(f"request {r}: num_nodes {count} outside 0 .. {width - 1}")
            for i in range(width):
                where = f"request {r}, row {i}"
                is_node = 1 <= i <= count
                if is_node and not 0 <= parent[r][i] < i:
                    raise ValueError(f"{where}: parent {parent[r][i]}, expected a row before it (0 .. {i - 1})")
                if not is_node and (parent[r][i] != -1 or depth[r][i] != 0):
                    raise ValueError(f"{where}: root or padding with parent {parent[r][i]} and depth {depth[r][i]}")
                if is_node and depth[r][i] != depth[r][parent[r][i]] + 1:
                    raise ValueError(f"{where}: depth {depth[r][i]}, parent's depth is {depth[r][parent[r][i]]}")
                if horizon is not None and depth[r][i] > horizon:
                    raise ValueError(f"{where}: depth {depth[r][i]} is beyond the horizon {horizon}")
                if i > count and token[r][i] != 0:
                    raise ValueError(f"{where}: padding carries token {token[r][i]}, expected 0")
                if token[r][i] < 0 or (vocab_size is not None and token[r][i] >= vocab_size):
                    raise ValueError(f"{where}: token {token[r][i]} outside the vocabulary of {vocab_size}")
            pairs = [(parent[r][i], token[r][i]) for i in range(1, count + 1)]
            if len(set(pairs)) != len(pairs):
                raise ValueError(f"request {r}: two children of one row carry the same token")

    def render(
        self, request: int, decode: Callable[[int], str] | None = None, accepted: list[int] | None = None
    ) -> str:
        """A drawing of one tree for people: one line per row, children indented; rows in `accepted` are starred.

        `decode` turns a token id into text; without it the id is shown. Reads the tensors on the host.
        """
        token, parent = self.token[request].tolist(), self.parent[request].tolist()
        count = int(self.num_nodes[request])
        children: dict[int, list[int]] = {}
        for row in range(1, count + 1):
            children.setdefault(parent[row], []).append(row)
        starred = set(accepted or ())
        lines: list[str] = []

        def draw(row: int, lead: str, branch: str) -> None:
            text = repr(decode(token[row])) if decode else str(token[row])
            lines.append(f"{lead}{branch}{'*' if row in starred else ' '}[{row}] {text}")
            below = children.get(row, [])
            lead += {"": "", "├─": "│ ", "└─": "  "}[branch]
            for child in below:
                draw(child, lead, "└─" if child == below[-1] else "├─")

        draw(0, "", "")
        return "\n".join(lines)
