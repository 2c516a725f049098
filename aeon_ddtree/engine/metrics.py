# SPDX-License-Identifier: Apache-2.0
"""Verification counters on the server's `/metrics`, in vLLM's naming style.

The worker is another process than the HTTP server, so this needs prometheus_client's multiprocess mode: start the
server with `PROMETHEUS_MULTIPROC_DIR` set to an empty folder (the dispatcher does). Without it nothing is exported.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.logger import init_logger

from aeon_ddtree.engine.stats import Stats

logger = init_logger(__name__)

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
INTERVAL = 0.5
"""Seconds between two readings of the device's counters."""


class Exporter:
    """Adds what `Stats` counted since the last reading to Prometheus metrics; `start` does so from a daemon thread."""

    def __init__(self, stats: Stats, model_name: str, registry: Any = REGISTRY) -> None:
        self._stats = stats
        self._seen = stats.read()
        labels = {"model_name": model_name}

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"vllm:ddtree_{name}", text, ["model_name", *more], registry=registry)

        self._plain = {
            "steps": counter("steps", "Request-steps that emitted tokens after the prompt.").labels(**labels),
            "emitted": counter("emitted_tokens", "Tokens emitted by those steps.").labels(**labels),
            "nodes": counter("tree_nodes", "Drafted tree nodes verified.").labels(**labels),
            "off_spine": counter("off_spine_accepted", "Accepted nodes off the rank-0 path.").labels(**labels),
        }
        self._accepted = counter("accepted_tokens", "Drafted tokens accepted.").labels(**labels)
        by_depth = counter("accepted_at_depth", "Steps that accepted a node at this depth.", "depth")
        self._depth = [by_depth.labels(depth=str(d + 1), **labels) for d in range(stats.horizon)]
        fallbacks = counter("fallbacks", "Steps that verified a chain or a shortened tree.", "reason")
        self._fallbacks = {reason: fallbacks.labels(reason=reason, **labels) for reason in self._seen["fallbacks"]}
        self._length = Histogram(
            "vllm:ddtree_accepted_length", "Nodes accepted per step.", ["model_name"],
            buckets=[float(n) for n in range(stats.horizon + 1)], registry=registry,
        ).labels(**labels)  # fmt: skip
        self._mean = Gauge(
            "vllm:ddtree_tokens_per_step", "Tokens emitted per request-step since the start.", ["model_name"],
            multiprocess_mode="mostrecent", registry=registry,
        ).labels(**labels)  # fmt: skip

    def update(self) -> None:
        """Read the counters once and add the difference."""
        now, before = self._stats.read(), self._seen
        for name, metric in self._plain.items():
            metric.inc(max(0, now[name] - before[name]))
        lengths = [max(0, n - m) for n, m in zip(now["length"], before["length"])]
        self._accepted.inc(sum(length * count for length, count in enumerate(lengths)))
        for depth, metric in enumerate(self._depth, start=1):
            metric.inc(sum(lengths[depth:]))
        for length, count in enumerate(lengths):
            for _ in range(count):
                self._length.observe(length)
        for reason, metric in self._fallbacks.items():
            metric.inc(max(0, now["fallbacks"][reason] - before["fallbacks"][reason]))
        if now["steps"]:
            self._mean.set(now["emitted"] / now["steps"])
        self._seen = now

    def start(self) -> None:
        def loop() -> None:
            while True:
                threading.Event().wait(INTERVAL)
                try:
                    self.update()
                except Exception:  # the server must go on without its metrics, but not silently
                    logger.exception("vllm:ddtree_* metrics stop here")
                    return

        threading.Thread(target=loop, name="ddtree-metrics", daemon=True).start()


def export(stats: Stats, model_name: str) -> None:
    """Export from this process if the server collects from several."""
    if os.environ.get(VARIABLE):
        Exporter(stats, model_name).start()
    else:
        logger.info("vllm:ddtree_* metrics are off: start the server with %s set to an empty folder", VARIABLE)
