# SPDX-License-Identifier: Apache-2.0
"""Cases around the tree itself: build_tree with its ranking, walk_tree, keyed_sampling, ancestor_mask."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from aeon_ddtree.kernels.ancestors import ancestor_mask, mask_from_safe, safe_parent
from aeon_ddtree.kernels.bench.case import Case, Ready, Source, first, off
from aeon_ddtree.kernels.bench.shapes import BATCHES, MODELS, WIDTHS
from aeon_ddtree.kernels.build_tree import build_tree, rank_candidates, ranking
from aeon_ddtree.kernels.build_tree import reference as build_reference
from aeon_ddtree.kernels.keyed_sampling import keyed_sample
from aeon_ddtree.kernels.keyed_sampling import reference as sampling_reference
from aeon_ddtree.kernels.walk_tree import reference as walk_reference
from aeon_ddtree.kernels.walk_tree import walk_tree

TOP_K, TAU = 8, 0.5
_NEAR = 1e-4
"""Two candidates or draws nearer than this may change places: sums in another order."""
_SAMPLED_ROWS = 64
"""Rows of a sampling case that the reference draws too."""


def _build(rank: str, source: Source, case: Case) -> Ready:
    m, requests, budget = case.model, case.batch, case.width - 1
    size = requests * m.horizon * m.vocabulary
    count = source.sets(2 * size, 2, 32)
    logits = [source.normal(requests, m.horizon, m.vocabulary, scale=3.0) for _ in range(count)]
    temperature = source.full(requests, 1.0, torch.float32)
    seed, index = source.integers(0, 1 << 60, requests), source.integers(0, 1000, requests)
    root, spine = source.full(requests, 5), m.horizon // 3

    def candidates(i: int) -> tuple[Tensor, Tensor]:
        return rank_candidates(logits[i], temperature, seed, index, TOP_K, ranking=rank, tau=TAU)

    def run(i: int) -> tuple[Tensor, ...]:
        return build_tree(*candidates(i), root, budget, spine=spine)

    def check() -> str | None:
        token, logp = candidates(0)
        tokens, logps = ranking.rank(logits[0], temperature, seed, index, TOP_K, rank, TAU, 0.5, 1.0)
        if bool(((token != tokens) & ((logp - logps).abs() > _NEAR)).any()):
            return "other candidates than the reference ranks"
        built = build_reference.best_first(token, logp, root, budget, spine, None, None, None, None)
        names = ("token", "parent", "depth", "num_nodes")
        parts = zip(names, run(0), built)
        return first(off("logp", logp, logps), *(off(name, got, right, exact=True) for name, got, right in parts))

    return Ready([partial(run, i) for i in range(count)], 2 * size, check)


def _greedy(source: Source, case: Case) -> Ready:
    return _build("greedy", source, case)


def _coupled(source: Source, case: Case) -> Ready:
    return _build("coupled", source, case)


def _walk(source: Source, case: Case) -> Ready:
    """A chain that is accepted to its end, as long as the drafter can make it: the longest walk there is."""
    width, requests = case.width, case.batch
    most = min(width, case.model.block)
    parent = (torch.arange(width) - 1).expand(requests, width).to(source.device).contiguous()
    token = torch.arange(width).expand(requests, width).to(source.device).contiguous()
    nodes, sampled = source.full(requests, width - 1), token + 1

    def check() -> str | None:
        got = walk_tree(token, parent, nodes, sampled, max_len=most)
        truth = walk_reference.walk(token, parent, nodes, sampled, most)
        if int(got[1].min()) != most:
            return f"path_len is {int(got[1].min())}, expected {most}: nothing was refused"
        return first(*(off(n, a, b, exact=True) for n, a, b in zip(("path", "path_len", "bonus"), got, truth)))

    call = partial(walk_tree, token, parent, nodes, sampled, max_len=most)
    return Ready([call] * 8, requests * (3 * 8 * width + 8 * (most + 3)), check)


def _sample(filtered: bool, source: Source, case: Case) -> Ready:
    rows, vocabulary = case.batch * case.width, case.model.vocabulary
    count = source.sets(4 * rows * vocabulary, 1, 16)
    logits = [source.normal(rows, vocabulary, dtype=torch.float32, scale=3.0) for _ in range(count)]
    temperature = source.full(rows, 0.8, torch.float32)
    top_k = source.full(rows, 20) if filtered else None
    top_p = source.full(rows, 0.95, torch.float32) if filtered else None
    seed, index = source.integers(0, 1 << 60, rows), source.integers(0, 1000, rows)

    def run(i: int) -> Tensor | tuple[Tensor, Tensor]:
        return keyed_sample(logits[i], temperature, top_k, top_p, None, seed, index)

    def check() -> str | None:
        n = min(rows, _SAMPLED_ROWS)
        k, p = (None if x is None else x[:n] for x in (top_k, top_p))
        right, gap = sampling_reference.sample(logits[0][:n], temperature[:n], k, p, None, seed[:n], index[:n], True)
        drawn = run(0)
        assert isinstance(drawn, Tensor) and gap is not None
        wrong = int(((drawn[:n] != right) & (gap > _NEAR)).sum())
        return f"{wrong} of {n} draws differ from the reference's" if wrong else None

    return Ready([partial(run, i) for i in range(count)], 4 * rows * vocabulary, check)


def _free(source: Source, case: Case) -> Ready:
    return _sample(False, source, case)


def _filtered(source: Source, case: Case) -> Ready:
    return _sample(True, source, case)


def _ancestors(source: Source, case: Case) -> Ready:
    parent = source.trees(case.batch, case.width)

    def check() -> str | None:
        return off("mask", ancestor_mask(parent), mask_from_safe(safe_parent(parent)), exact=True)

    cells = case.batch * case.width
    return Ready([partial(ancestor_mask, parent)] * 8, cells * (8 + case.width), check)


def cases() -> list[Case]:
    kinds = (
        ("build_tree", _greedy), ("build_tree coupled", _coupled), ("walk_tree", _walk), ("keyed_sampling", _free),
        ("keyed_sampling top-k top-p", _filtered), ("ancestor_mask", _ancestors),
    )  # fmt: skip
    return [
        Case(kernel, model, width, batch, prepare)
        for kernel, prepare in kinds
        for model in MODELS.values()
        for width in WIDTHS
        for batch in BATCHES
    ]
