# SPDX-License-Identifier: Apache-2.0
"""Cases over the paged KV cache: tree_attention, the drafter's block, compact_kv, write_kv, pack_visible."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from aeon_ddtree.kernels.ancestors import ancestor_mask, depth_of
from aeon_ddtree.kernels.bench import stock
from aeon_ddtree.kernels.bench.case import ACCEPTED, Case, Ready, Source, first, off
from aeon_ddtree.kernels.bench.recurrent import paths
from aeon_ddtree.kernels.bench.shapes import BATCHES, CONTEXTS, MODELS, WIDTHS, Heads, Model
from aeon_ddtree.kernels.compact_kv import compact_kv
from aeon_ddtree.kernels.compact_kv import reference as compact_reference
from aeon_ddtree.kernels.tree_attention import pack_visible, reference, tree_attention, write_kv

_CHECKED = 2
"""Requests of a case whose answer is computed in fp64: the first and the last."""


def _cache(source: Source, heads: Heads, positions: int) -> Tensor:
    """[N, 2, block, Hkv, D] bf16 with room for `positions`: a part of one buffer that all cases of a model share."""
    most = max(BATCHES) * (-(-(max(CONTEXTS) + 256) // heads.block) + 1)
    size = (2, heads.block, heads.keys, heads.size)
    whole = source.pool(("kv", heads), lambda: source.normal(most, *size))
    return whole[: min(most, max(1, -(-positions // heads.block)))]


def _tables(source: Source, cache: Tensor, requests: int, blocks: int, count: int) -> list[Tensor]:
    """int32 [R, blocks] for each of `count` layers; within a layer no block is named twice."""
    return [source.permutation(cache.shape[0], requests, blocks).int() for _ in range(count)]


def _attention(source: Source, case: Case) -> Ready:
    heads = case.model.attention
    return _prepare(source, case, heads, own=False, window=None)


def _block(source: Source, case: Case) -> Ready:
    return _prepare(source, case, case.model.drafter, own=True, window=case.model.drafter_window)


def _prepare(source: Source, case: Case, heads: Heads, own: bool, window: int | None) -> Ready:
    requests, width = case.batch, case.width
    total = case.context + (0 if own else width)
    blocks = -(-total // heads.block)
    read = min(case.context, window or case.context) + width
    count = source.sets(requests * read * heads.bytes_per_position, 1, 64)
    cache = _cache(source, heads, 10**9)
    tables = _tables(source, cache, requests, blocks, count)
    q = source.normal(requests, width, heads.queries, heads.size)
    parent = source.trees(requests, width)
    visible = source.full((requests, width, width), True, torch.bool) if own else ancestor_mask(parent)
    depth = torch.arange(width, device=source.device).expand(requests, width) if own else depth_of(parent)
    rows, context = source.full(requests, width), source.full(requests, case.context)
    own_kv = tuple(source.normal(2, requests, width, heads.keys, heads.size)) if own else None
    # The target's mask is packed once for all layers of a step; the drafter's is that of its first layer.
    bits = pack_visible(visible)
    scale = heads.size**-0.5
    k_cache, v_cache = cache[:, 0], cache[:, 1]

    def run(table: Tensor) -> Tensor:
        return tree_attention(
            q, k_cache, v_cache, table, context, bits, rows, scale=scale, window=window, depth=depth,
            own_kv=own_kv,  # type: ignore[arg-type]
        )  # fmt: skip

    def check() -> str | None:
        out = run(tables[0])
        for r in sorted({0, requests - 1})[:_CHECKED]:
            one = slice(r, r + 1)
            mine = (own_kv[0][one].double(), own_kv[1][one].double()) if own_kv else None
            truth = reference.attention(
                q[one].double(), k_cache, v_cache, tables[0][one], context[one], visible[one], rows[one], scale,
                window, depth[one], mine,
            )  # fmt: skip
            wrong = off(f"out of request {r}", out[one], truth)
            if wrong:
                return wrong
        return None

    moved = requests * (read * heads.bytes_per_position + 2 * 2 * width * heads.queries * heads.size)
    beside = None if own else partial(stock.flash_attention, q, cache, tables, total, scale)
    return Ready([partial(run, table) for table in tables], moved, check, stock=beside)


def _compact(source: Source, case: Case) -> Ready:
    heads, requests, width = case.model.attention, case.batch, case.width
    # The first window reaches over the end of a block; those of the other sets lie before it.
    last = heads.block * 2 - width // 2
    blocks = -(-(last + width) // heads.block)
    layers = [source.normal(requests * blocks, 2, heads.block, heads.keys, heads.size) for _ in range(heads.layers)]
    caches = [(x[:, 0], x[:, 1]) for x in layers]
    table = source.permutation(requests * blocks, requests, blocks).int()
    contexts = [source.full(requests, last - i * width) for i in range(min(8, last // width))]
    path, length = paths(source, case)
    if width < 2 * ACCEPTED:  # a path of all rows has nothing to move
        path = source.values([[0, *range(2, width), *[-1] * (17 - width)]] * requests)
        length = source.full(requests, width - 1)

    def run(context: Tensor) -> None:
        compact_kv(caches, table, context, path, length)

    def check() -> str | None:
        copies = [(x.clone(), y.clone()) for x, y in caches]
        run(contexts[0])
        compact_reference.compact(copies, table, contexts[0], path, length)
        both = [(got, truth) for pair, right in zip(caches, copies) for got, truth in zip(pair, right)]
        return first(*(off("caches", got, truth, exact=True) for got, truth in both))

    taken = min(ACCEPTED, width - 1)
    moved = 2 * heads.bytes_per_position * requests * (taken - 1) * heads.layers
    return Ready([partial(run, context) for context in contexts], moved, check)


def _write(source: Source, case: Case) -> Ready:
    heads, tokens = case.model.attention, case.batch * case.width
    cache = _cache(source, heads, 10**9)
    k, v = source.normal(2, tokens, heads.keys, heads.size)
    places = [source.permutation(cache.shape[0] * heads.block, tokens) for _ in range(8)]

    def check() -> str | None:
        write_kv(k, v, cache[:, 0], cache[:, 1], places[0])
        at = (places[0] // heads.block, places[0] % heads.block)
        return first(off("k", cache[:, 0][at], k, exact=True), off("v", cache[:, 1][at], v, exact=True))

    def run(at: Tensor) -> None:
        write_kv(k, v, cache[:, 0], cache[:, 1], at)

    return Ready([partial(run, at) for at in places], 2 * tokens * heads.bytes_per_position, check)


def _pack(source: Source, case: Case) -> Ready:
    visible = ancestor_mask(source.trees(case.batch, case.width))

    def check() -> str | None:
        return off("bits", pack_visible(visible), reference.pack(visible), exact=True)

    cells = case.batch * case.width
    return Ready([partial(pack_visible, visible)] * 8, cells * (case.width + 4 * -(-case.width // 32)), check)


def _of(kernel: str, model: Model, width: int, batch: int) -> list[Case]:
    prepare = {"tree_attention": _attention, "drafter_block": _block}[kernel]
    return [Case(kernel, model, width, batch, prepare, context) for context in CONTEXTS]


def cases() -> list[Case]:
    found = []
    for model in MODELS.values():
        for batch in BATCHES:
            for width in WIDTHS:
                found += _of("tree_attention", model, width, batch)
            found += _of("drafter_block", model, model.block, batch)
    for kernel, prepare in (("compact_kv", _compact), ("write_kv", _write), ("pack_visible", _pack)):
        found += [
            Case(kernel, model, width, batch, prepare)
            for model in MODELS.values()
            for width in WIDTHS
            for batch in BATCHES
        ]
    return found
