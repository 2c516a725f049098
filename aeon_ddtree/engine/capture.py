# SPDX-License-Identifier: Apache-2.0
"""`DDTREE_CAPTURE_DIR`: one verify window as a file, for `python -m aeon_ddtree.kernels.replay`. Off by default.

The file is window-rankN.pt. It is written by the first step that verifies a tree while it is not there: remove it to
get another. Layers are asked in Python, so a forward that is replayed from a captured graph has no window to give.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger

from aeon_ddtree.engine.step import Group, Step
from aeon_ddtree.kernels import captured, dispatch
from aeon_ddtree.kernels.gated_delta_tree import TreeFactors
from aeon_ddtree.tree.draft_tree import DraftTree
from aeon_ddtree.verify.walk import Walk

VARIABLE = "DDTREE_CAPTURE_DIR"
logger = init_logger(__name__)


class Capture:
    """Where windows go, or nowhere."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @classmethod
    def from_environment(cls, rank: int) -> Capture:
        """ValueError where the folder cannot be written to: at the start, not in the middle of a request."""
        name = os.environ.get(VARIABLE)
        if not name:
            return cls(None)
        folder = Path(name)
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ValueError(f"{VARIABLE} is {name!r}, expected a folder that can be written to; make it or unset it")
        return cls(folder / f"window-rank{rank}.pt")

    def of(self, step: Step) -> Recording | None:
        """What this step's layers fill, if a window is wanted and it has one."""
        if self._path is None or step.tree_group is None or self._path.exists():
            return None
        return Recording(self._path, step)


class Recording:
    """One window while its step runs. The first layer of each kind is kept; everything is copied at once."""

    def __init__(self, path: Path, step: Step) -> None:
        self._path = path
        group, tree = step.tree_group, step.tree
        assert group is not None and tree is not None
        window = tree.narrow(group.rows.shape[1])
        self._sections: captured.Sections = {
            "about": {
                "version": captured.VERSION,
                "device": str(group.rows.device),
                "torch": str(torch.__version__),
                "kernels": dispatch.describe(group.rows.device),
            },
            "tree": _copies(token=window.token, parent=window.parent, depth=window.depth, num_nodes=window.num_nodes),
        }

    def gdn(
        self, layer: str, group: Group, slots: Tensor, conv_state: Tensor, state: Tensor, factors: TreeFactors,
        **values: Any,
    ) -> None:  # fmt: skip
        """After the layer's kernels, which leave its states alone."""
        if "gdn" in self._sections:
            return
        self._sections["about"]["gdn_layer"] = layer
        self._sections["gdn"] = _copies(
            conv_state=conv_state[slots], state=state[slots], slots=torch.arange(len(slots), device=slots.device),
            has_state=group.has_state, u=factors.u, unit_k=factors.k, c=factors.c, **values,
        )  # fmt: skip

    def attention(
        self, layer: str, group: Group, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, **values: Any
    ) -> None:
        """After the layer's kernels; the caches hold the window's rows."""
        if "attention" in self._sections:
            return
        block = k_cache.shape[1]
        ends = (group.context + group.length + block - 1) // block
        table = block_table[:, : int(ends.max())].long()
        in_use = torch.arange(table.shape[1], device=table.device) < ends[:, None]
        blocks, number = torch.unique(torch.where(in_use, table, table[:, :1]), return_inverse=True)
        self._sections["about"]["attention_layer"] = layer
        self._sections["attention"] = _copies(
            k_cache=k_cache[blocks], v_cache=v_cache[blocks], block_table=number.to(block_table.dtype),
            context_len=group.context, visible=group.visible, num_rows=group.length, depth=group.depth, **values,
        )  # fmt: skip

    def walk(self, reqs: list[int], tree: DraftTree, sampled: Tensor, found: Walk) -> None:
        """sampled [R, W] and the walk of the whole batch, of which `reqs` have a tree."""
        width = self._sections["tree"]["token"].shape[1]
        index = torch.tensor(reqs, device=sampled.device)
        self._sections["walk"] = _copies(
            sampled=sampled[index, :width], path=found.path[index], path_len=found.path_len[index],
            bonus=found.bonus[index], max_len=found.path.shape[1],
        )  # fmt: skip

    def write(self, path: Tensor, path_len: Tensor) -> None:
        """Before the commit of path [G, P]. A file that cannot be written is an error in the log, not the step's."""
        self._sections["commit"] = _copies(path=path, path_len=path_len)
        try:
            captured.save(self._path, self._sections)
        except (OSError, ValueError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            logger.error("DDTree: the verify window was not written: %s", error)
            return
        logger.info("DDTree: a verify window of %d requests is in %s", len(path), self._path)


def _copies(**values: Any) -> dict[str, Any]:
    return {k: v.detach().cpu().clone() if isinstance(v, Tensor) else v for k, v in values.items()}
