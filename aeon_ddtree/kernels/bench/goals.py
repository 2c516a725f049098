# SPDX-License-Identifier: Apache-2.0
"""What the kernels are to reach at the 27B shape on one H200, judged by the records of one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from aeon_ddtree.kernels.bench.shapes import BATCHES, CONTEXTS, QWEN_27B, WIDTHS

Record = dict[str, Any]

_LONG = 8192
"""Context from which attention is judged by a ratio; below, by the µs that it takes more."""


@dataclass(frozen=True)
class Goal:
    """limit: the most that is allowed, or the least where `least`; found is None where the run did not measure it."""

    name: str
    limit: float
    found: float | None
    least: bool = False
    unit: str = ""

    @property
    def met(self) -> bool | None:
        if self.found is None:
            return None
        return self.found >= self.limit if self.least else self.found <= self.limit

    def line(self) -> str:
        word = {True: "met", False: "MISSED", None: "not measured"}[self.met]
        found = "-" if self.found is None else f"{self.found:.3g}"
        return (
            f"{word:12s} {self.name}: {found}{self.unit}, goal {'>=' if self.least else '<='} {self.limit:g}{self.unit}"
        )


class _Records:
    """Records of the 27B shape by kernel, width, batch and context."""

    def __init__(self, records: Iterable[Record]) -> None:
        mine = [r for r in records if r["model"] == QWEN_27B.name and "us" in r]
        self._found = {(r["kernel"], r["width"], r["batch"], r["context"]): r for r in mine}

    def us(self, kernel: str, width: int, batch: int, context: int = 0) -> float | None:
        record = self._found.get((kernel, width, batch, context))
        return None if record is None else record["us"][0]

    def stock(self, kernel: str, width: int, batch: int, context: int = 0) -> float | None:
        return self._found.get((kernel, width, batch, context), {}).get("stock_us")

    def bytes(self, kernel: str, width: int, batch: int) -> int:
        return self._found[(kernel, width, batch, 0)]["bytes"]

    def share(self, kernel: str, width: int, batch: int, context: int) -> float | None:
        return self._found.get((kernel, width, batch, context), {}).get("bandwidth_share")


def judge(records: Iterable[Record], bytes_per_us: float) -> list[Goal]:
    """All goals; bytes_per_us: the copy bandwidth of the same run."""
    known = _Records(records)
    return [*_recurrent(known, bytes_per_us), *_attention(known), *_small(known)]


def _recurrent(known: _Records, bytes_per_us: float) -> Iterable[Goal]:
    for width, batch, limit in ((16, 1, 0.45), (16, 8, 0.25), (16, 16, 0.25), (64, 1, 0.25)):
        verify, fold = (known.us(kernel, width, batch) for kernel in ("gated_delta_tree", "fold_state"))
        stock = known.stock("gated_delta_tree", width, batch)
        ratio = None if verify is None or fold is None or stock is None else (verify + fold) / stock
        yield Goal(f"gated_delta_tree + fold_state / stock update, W = {width}, batch {batch}", limit, ratio, unit=" x")
    verify, fold = (known.us(kernel, 16, 16) for kernel in ("gated_delta_tree", "fold_state"))
    share = None
    if verify is not None and fold is not None:
        moved = known.bytes("gated_delta_tree", 16, 16) + known.bytes("fold_state", 16, 16)
        share = 100 * moved / (verify + fold) / bytes_per_us
    yield Goal("gated_delta_tree + fold_state, share of copy bandwidth, W = 16, batch 16", 60, share, True, " %")
    for batch in (1, 16):
        ratio = _ratio(known, "causal_conv_tree", 16, batch)
        yield Goal(f"causal_conv_tree / stock update, W = 16, batch {batch}", 1.3, ratio, unit=" x")


def _attention(known: _Records) -> Iterable[Goal]:
    for width in WIDTHS:
        for batch in BATCHES:
            name = f"tree_attention, W = {width}, batch {batch}"
            ratios = [_ratio(known, "tree_attention", width, batch, c) for c in CONTEXTS if c >= _LONG]
            yield Goal(f"{name}: worst / FlashAttention-3, contexts >= {_LONG}", 1.15, _worst(ratios), unit=" x")
            extra = [_extra(known, width, batch, c) for c in CONTEXTS if c < _LONG]
            yield Goal(f"{name}: most beyond FlashAttention-3, shorter contexts", 8, _worst(extra), unit=" us")
            share = known.share("tree_attention", width, batch, max(CONTEXTS))
            percent = None if share is None else 100 * share
            yield Goal(f"{name}: share of copy bandwidth at {max(CONTEXTS)}", 70, percent, True, " %")


def _small(known: _Records) -> Iterable[Goal]:
    for batch, limit in ((1, 80.0), (16, 150.0)):
        us = known.us("build_tree", 32, batch)
        yield Goal(f"build_tree with top-k, B = 31, k = 15, batch {batch}", limit, us, unit=" us")
    walks = [known.us("walk_tree", width, batch) for width in WIDTHS for batch in BATCHES]
    yield Goal("walk_tree, slowest", 10, _worst(walks), unit=" us")
    for batch in (1, 16):
        us = known.us("compact_kv", 16, batch)
        yield Goal(f"compact_kv, 16 layers, batch {batch}", 15, us, unit=" us")


def _ratio(known: _Records, kernel: str, width: int, batch: int, context: int = 0) -> float | None:
    us, stock = known.us(kernel, width, batch, context), known.stock(kernel, width, batch, context)
    return None if us is None or stock is None else us / stock


def _extra(known: _Records, width: int, batch: int, context: int) -> float | None:
    place = ("tree_attention", width, batch, context)
    us, stock = known.us(*place), known.stock(*place)
    return None if us is None or stock is None else us - stock


def _worst(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
