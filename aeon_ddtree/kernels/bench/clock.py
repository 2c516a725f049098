# SPDX-License-Identifier: Apache-2.0
"""Timing on a CUDA device: replays of a captured graph, and the bandwidth of large copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

COPIED = 2 << 30
"""Bytes of the copy that bandwidth is measured with."""
_LONG = 20_000
"""µs of one replay above which fewer replays say enough."""


@dataclass(frozen=True)
class Time:
    """µs: the median, and the 20th and 80th percentile."""

    median: float
    low: float
    high: float

    def over(self, parts: int) -> Time:
        return Time(self.median / parts, self.low / parts, self.high / parts)

    def as_list(self) -> list[float]:
        return [round(x, 3) for x in (self.median, self.low, self.high)]


def time(calls: Sequence[Callable[[], Any]], replays: int = 21) -> Time:
    """µs of one call, all calls captured into one graph and replayed; each was run once before the capture."""

    def everything() -> None:
        for call in calls:
            call()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        everything()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        everything()
    once = _replay(graph)
    found = [_replay(graph) for _ in range(replays if once < _LONG else max(5, replays // 4))]
    found.sort()
    count = len(found)
    return Time(found[count // 2], found[count // 5], found[count - 1 - count // 5]).over(len(calls))


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def copy_bandwidth() -> float:
    """Bytes per µs, read and written, of the fastest of several copies of COPIED bytes."""
    source = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = min(time([lambda: target.copy_(source)]).low for _ in range(5))
    return 2 * COPIED / best
