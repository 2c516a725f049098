# SPDX-License-Identifier: Apache-2.0
"""`TreeStore`: the drafted trees between two steps, by request. They stay on the device; rows of the batch may move."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from aeon_ddtree.tree.draft_tree import DraftTree


class RequestSlots:
    """req_id -> slot, 0 .. size - 1. vLLM has no such index: its batch rows are condensed and reordered."""

    def __init__(self, size: int) -> None:
        self._free = list(range(size - 1, -1, -1))
        self._slot: dict[str, int] = {}

    def __getitem__(self, req_id: str) -> int:
        return self._slot[req_id]

    def take(self, req_id: str) -> tuple[int, bool]:
        """The request's slot, and whether it is new."""
        if req_id in self._slot:
            return self._slot[req_id], False
        if not self._free:
            raise RuntimeError(f"no request slot left for {req_id}: more requests run than --max-num-seqs allows")
        self._slot[req_id] = self._free.pop()
        return self._slot[req_id], True

    def free(self, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            slot = self._slot.pop(req_id, None)
            if slot is not None:
                self._free.append(slot)


class TreeStore:
    """Persistent arrays, one window of W rows per slot. A tree is used once: reading leaves the window empty."""

    def __init__(self, size: int, width: int, device: torch.device) -> None:
        self.slots = RequestSlots(size)
        self._tree = DraftTree(
            token=torch.zeros(size, width, dtype=torch.int64, device=device),
            parent=torch.full((size, width), -1, dtype=torch.int64, device=device),
            depth=torch.zeros(size, width, dtype=torch.int64, device=device),
            num_nodes=torch.zeros(size, dtype=torch.int64, device=device),
        )

    def open(self, req_ids: Iterable[str]) -> None:
        """Give every new request a slot with an empty window."""
        fresh = [slot for slot, is_new in map(self.slots.take, req_ids) if is_new]
        if fresh:
            self._tree.num_nodes[self._index(fresh)] = 0

    def put(self, req_ids: Sequence[str], tree: DraftTree) -> None:
        """Store the trees of a step, in the order of `req_ids`."""
        index = self._index([self.slots[req_id] for req_id in req_ids])
        for name in ("token", "parent", "depth", "num_nodes"):
            getattr(self._tree, name)[index] = getattr(tree, name)

    def pop(self, req_ids: Sequence[str]) -> DraftTree:
        """The stored trees, in the order of `req_ids`; their windows are empty afterwards."""
        index = self._index([self.slots[req_id] for req_id in req_ids])
        tree = self._tree.select(index)
        self._tree.num_nodes[index] = 0
        # A used or never filled window must be all padding, whatever its arrays still hold.
        return tree.truncate(tree.num_nodes + 1)

    def _index(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(slots, dtype=torch.int64).to(self._tree.device, non_blocking=True)
