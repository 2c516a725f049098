# SPDX-License-Identifier: Apache-2.0
"""The workers named by `--worker-cls`: vLLM's own, with our model runner in place of the stock one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import vllm.v1.worker.cpu_worker as cpu_worker
import vllm.v1.worker.gpu_model_runner as gpu_model_runner
from vllm.v1.worker.gpu_worker import Worker

from aeon_ddtree.engine import compat, layers
from aeon_ddtree.engine.proposer import DDTreeProposer
from aeon_ddtree.engine.runner import DDTreeCPURunner, DDTreeGPURunner


@contextmanager
def _name(module: Any, name: str, value: Any) -> Iterator[None]:
    """Let vLLM find our class under the name it looks up in `module`; it has no setting for the runner's class."""
    stock = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, stock)


def _install() -> None:
    compat.install()
    layers.install()
    # The runner constructs its drafter by this name, and later tests `isinstance(self.drafter, DFlashProposer)`.
    gpu_model_runner.DFlashProposer = DDTreeProposer


class _WithStats:
    """Calls for `collective_rpc`."""

    model_runner: Any

    def ddtree_stats(self, reset: bool = False) -> dict[str, Any]:
        """This worker's counters since the start or the last reset; see `engine.stats.Stats.read`."""
        return self.model_runner.stats.read(reset=reset)

    def ddtree_configure(self, values: dict[str, Any]) -> None:
        """Change tree options that need no restart (spine, topology, commit policy, ranking …) between requests."""
        self.model_runner.configure(values)


class CPUWorker(_WithStats, cpu_worker.CPUWorker):
    """vLLM's CPU worker with DDTree's runner."""

    def init_device(self) -> None:
        _install()
        with _name(cpu_worker, "CPUModelRunner", DDTreeCPURunner):
            super().init_device()


class GPUWorker(_WithStats, Worker):
    """vLLM's GPU worker with DDTree's runner."""

    def init_device(self) -> None:
        _install()
        if self.use_v2_model_runner:
            raise RuntimeError("VLLM_USE_V2_MODEL_RUNNER=1: DDTree extends the V1 model runner; unset the variable")
        with _name(gpu_model_runner, "GPUModelRunner", DDTreeGPURunner):
            super().init_device()
