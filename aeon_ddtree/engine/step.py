# SPDX-License-Identifier: Apache-2.0
"""`Step`: which packed rows of one forward belong to which request, and how the rows of a request see each other.

vLLM packs the rows of a step one request after the other. The kernels take rectangles, so the requests are grouped:
all requests with a tree in one group (padded to the widest window), all others by the number of rows they bring.
Everything that decides the grouping is known on the host; values that only the device knows (committed lengths under
async scheduling, tree arrays) stay tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aeon_ddtree.tree.draft_tree import DraftTree


@dataclass(frozen=True)
class Group:
    """G requests with L rows each.

    reqs       [G]       int64  group request -> batch request
    rows       [G, L]    int64  (group request, row) -> packed row; padding repeats the request's last row
    cells      [N]       int64  flat (group request, row) cells that are no padding
    packed     [N]       int64  cell -> packed row
    length     [G]       int64  rows in use
    context    [G]       int64  committed tokens before row 0
    has_state  [G]       bool   False at the start of a prompt: the slot still holds somebody else's state
    parent     [G, L]    int64  row -> parent row, -1 for row 0 and padding
    depth      [G, L]    int64  distance from row 0 along the path
    visible    [G, L, L] bool   row i sees row j
    is_tree                     True: verified now, committed after the walk; False: committed by the layers themselves
    """

    reqs: Tensor
    rows: Tensor
    cells: Tensor
    packed: Tensor
    length: Tensor
    context: Tensor
    has_state: Tensor
    parent: Tensor
    depth: Tensor
    visible: Tensor
    is_tree: bool

    def take(self, packed: Tensor) -> Tensor:
        """[T, ...] packed rows -> [G, L, ...]."""
        return packed[self.rows]

    def put(self, out: Tensor, values: Tensor) -> None:
        """Write [G, L, ...] into the packed rows of `out`; padding is dropped."""
        out[self.packed] = values.flatten(0, 1)[self.cells].to(out.dtype)


@dataclass
class Step:
    """One forward of the target.

    groups      the requests, each in exactly one group
    num_rows    [R] rows of every request, on the host
    tree_reqs   batch requests that verify a tree, in the order of `tree` and of the tree group
    tree        their trees
    context     [R] int64  committed tokens before the request's first row
    records     layer name -> what the layer kept of the tree group for the commit (factors, convolution inputs)
    recording   an `engine.capture.Recording` that the layers fill, where one is wanted
    """

    groups: list[Group]
    num_rows: np.ndarray
    tree_reqs: list[int]
    tree: DraftTree | None
    context: Tensor
    records: dict[str, Any] = field(default_factory=dict)
    recording: Any = None

    @property
    def tree_group(self) -> Group | None:
        return self.groups[0] if self.tree_reqs else None

    def sampled_trees(self) -> tuple[DraftTree, Tensor]:
        """The rows to sample: trees [R, W] of the whole batch, and row -> row of the packed logits, [R, W] int64.

        A request without a tree samples its last row only: a tree of the root alone. vLLM packs the logits of just
        these rows, one request after the other.
        """
        device = self.context.device
        counts = np.ones_like(self.num_rows)
        counts[self.tree_reqs] = self.num_rows[self.tree_reqs]
        width = int(counts.max())
        start = np.cumsum(counts) - counts
        rows = torch.from_numpy(start[:, None] + np.minimum(np.arange(width), counts[:, None] - 1))
        token = torch.zeros(len(counts), width, dtype=torch.int64, device=device)
        tree = DraftTree(token, torch.full_like(token, -1), torch.zeros_like(token), torch.zeros_like(token[:, 0]))
        if self.tree is not None:
            index = torch.tensor(self.tree_reqs, device=device)
            window = self.tree.narrow(width)
            for name in ("token", "parent", "depth", "num_nodes"):
                getattr(tree, name)[index] = getattr(window, name)
        return tree, rows.to(device, non_blocking=True)

    def walked(self, tree: DraftTree, sampled: Tensor, found: Any) -> None:
        """Tell a recording, if there is one, what was sampled [R, W] and which way the `Walk` went."""
        if self.recording is not None:
            self.recording.walk(self.tree_reqs, tree, sampled, found)

    def root_position(self) -> Tensor:
        """[R] int64: token index of every request's root, the row after which the first token is sampled."""
        before = self.num_rows - 1  # a fresh array
        before[self.tree_reqs] = 0
        return self.context + torch.from_numpy(before).to(self.context.device, non_blocking=True)

    def drafter_context(self, path: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The rows committed by this step: (packed row, batch request, token index; each [N], -1 for none), and the
        committed tokens of every request afterwards [R].

        path [R, P]: the committed rows of every request's window, -1 after the end. Prompt rows are all committed.
        """
        rows, reqs, positions = [], [], []
        after = self.context.clone()
        for group in self.groups:
            if group.is_tree:
                chosen = path[group.reqs]
                step = torch.arange(chosen.shape[1], device=path.device)
                packed = group.rows.gather(1, chosen.clamp(min=0))
                position = torch.where(chosen >= 0, group.context[:, None] + step, -1)
                after[group.reqs] += (chosen >= 0).sum(dim=1)
            else:
                packed = group.rows
                position = group.context[:, None] + group.depth
                after[group.reqs] += group.length
            rows.append(packed.flatten())
            reqs.append(group.reqs[:, None].expand_as(packed).flatten())
            positions.append(position.flatten())
        return torch.cat(rows), torch.cat(reqs), torch.cat(positions), after


def make_step(
    num_rows: Sequence[int] | np.ndarray,
    tree_reqs: Sequence[int],
    tree: DraftTree | None,
    context: Tensor,
) -> Step:
    """Group the requests of a step.

    num_rows   [R] rows of every request, on the host
    tree_reqs  batch requests that verify a tree, in the order of `tree`'s requests
    tree       their trees, at least as wide as their rows; rows beyond a request's `num_rows` must be padding
    context    [R] int, device: committed tokens of every request
    """
    device = context.device
    context = context.to(torch.int64)
    lengths = np.array(num_rows, dtype=np.int64)
    start = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    groups = []
    if len(tree_reqs):
        assert tree is not None
        reqs = np.asarray(tree_reqs, dtype=np.int64)
        width = int(lengths[reqs].max())
        layout = _layout(reqs, width, lengths, start, context)
        window = tree.narrow(width)
        groups.append(
            Group(**layout, parent=window.parent, depth=window.depth, visible=window.ancestors(), is_tree=True)
        )
    chains: dict[int, list[int]] = {}
    taken = set(map(int, tree_reqs))
    for req, rows in enumerate(lengths.tolist()):
        if req not in taken:
            chains.setdefault(rows, []).append(req)
    for width, members in chains.items():
        layout = _layout(np.asarray(members, dtype=np.int64), width, lengths, start, context)
        depth = torch.arange(width, device=device).expand(len(members), width)
        visible = torch.ones(width, width, dtype=torch.bool, device=device).tril().expand(len(members), width, width)
        groups.append(Group(**layout, parent=depth - 1, depth=depth, visible=visible, is_tree=False))
    return Step(groups, lengths, list(tree_reqs), tree, context)


def _layout(reqs: np.ndarray, width: int, lengths: np.ndarray, start: np.ndarray, context: Tensor) -> Mapping[str, Any]:
    length = lengths[reqs]
    row = np.arange(width)
    rows = start[reqs][:, None] + np.minimum(row, length[:, None] - 1)
    cells = np.flatnonzero(row < length[:, None])
    device = context.device

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)

    reqs_d = tensor(reqs)
    committed = context[reqs_d]
    return {
        "reqs": reqs_d,
        "rows": tensor(rows),
        "cells": tensor(cells),
        "packed": tensor(rows.reshape(-1)[cells]),
        "length": tensor(length),
        "context": committed,
        "has_state": committed > 0,
    }
