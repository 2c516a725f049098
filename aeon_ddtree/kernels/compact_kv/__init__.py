# SPDX-License-Identifier: Apache-2.0
"""Moves the accepted rows of a window to consecutive places of the paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from aeon_ddtree.kernels.checks import Shapes, check_path, checks_enabled, require
from aeon_ddtree.kernels.compact_kv import reference
from aeon_ddtree.kernels.dispatch import takes_triton

__all__ = ["compact_groups", "compact_kv"]

Group = tuple[Sequence[tuple[Tensor, Tensor]], Tensor, Tensor]
"""One KV group: its layers' (k_cache, v_cache), block_table [R, max_blocks], context_len [R]."""


def compact_kv(
    caches: Sequence[tuple[Tensor, Tensor]], block_table: Tensor, context_len: Tensor, path: Tensor, path_len: Tensor
) -> None:
    """In every cache of one KV group, the entry of row path[r, i] is copied to position context_len[r] + i.

    caches: (k_cache [N, block, Hkv, D], v_cache [N, block, Hkv, Dv]) per attention layer of the group, strided views
    welcome, aliases too; block_table int [R, max_blocks], `request, block number -> cache block`; context_len int [R];
    path int [R, P], rows root first, −1 padded; path_len int [R], root counted, 0 = untouched. All reads come before
    all writes. Entries already in place, and everything after the path, keep their bytes.
    """
    compact_groups([(caches, block_table, context_len)], path, path_len)


def compact_groups(groups: Sequence[Group], path: Tensor, path_len: Tensor) -> None:
    """`compact_kv` for all KV groups at once: groups of (caches, block_table, context_len); one launch on a device.

    Groups may share storage, as far as their block tables name different blocks.
    """
    for caches, block_table, context_len in groups:
        _check(caches, block_table, context_len, path, path_len)
    check_path(path, path_len, 1 << 30)
    groups = [group for group in groups if group[0]]
    if groups and takes_triton(path):
        from aeon_ddtree.kernels.compact_kv import triton

        if triton.takes(groups):
            return triton.compact(groups, path, path_len)
    for caches, block_table, context_len in groups:
        reference.compact(caches, block_table, context_len, path, path_len)
    return None


def _check(
    caches: Sequence[tuple[Tensor, Tensor]], block_table: Tensor, context_len: Tensor, path: Tensor, path_len: Tensor
) -> None:
    shapes = Shapes()
    shapes("block_table", block_table, "R max_blocks", "int")
    shapes("context_len", context_len, "R", "int")
    shapes("path", path, "R P", "int")
    shapes("path_len", path_len, "R", "int")
    for layer, (k_cache, v_cache) in enumerate(caches):
        shapes(f"caches[{layer}][0]", k_cache, "N block Hkv D" + str(layer), "float")
        shapes(f"caches[{layer}][1]", v_cache, "N block Hkv Dv" + str(layer), "float")
    if checks_enabled() and caches:
        end = int((context_len + (path.amax(1) + 1).clamp(min=0)).max()) if path.numel() else 0
        room = block_table.shape[1] * caches[0][0].shape[1]
        require(end <= room, f"path ends at position {end}, expected at most {room}, what block_table covers")
