# SPDX-License-Identifier: Apache-2.0
"""The method `dflash_ddtree`: it brings its worker, and reaches vLLM under a name that this vLLM knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest

from aeon_ddtree.engine import register, settings
from aeon_ddtree.engine.options import OptionsError

pytest.importorskip("vllm")


def arguments(method: str, worker: str = "auto") -> Any:
    speculative = {"method": method, "model": "drafter", "num_speculative_tokens": 15}
    return SimpleNamespace(speculative_config=speculative, worker_cls=worker, enable_prefix_caching=None)


@pytest.mark.parametrize(("cpu", "worker"), [(True, "CPUWorker"), (False, "GPUWorker")])
def test_brings_its_worker(monkeypatch: pytest.MonkeyPatch, cpu: bool, worker: str) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: cpu)
    args = arguments("dflash_ddtree")
    register._choose_worker(args)
    assert args.worker_cls == f"aeon_ddtree.engine.worker.{worker}"


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_leaves_others_alone(method: str) -> None:
    args = arguments(method)
    register._choose_worker(args)
    args.speculative_config = None
    register._choose_worker(args)
    assert args.worker_cls == "auto"


def test_another_worker_is_refused() -> None:
    with pytest.raises(OptionsError, match=r"--worker-cls other\.Worker: method=dflash_ddtree needs aeon_ddtree"):
        register._choose_worker(arguments("dflash_ddtree", "other.Worker"))


@pytest.mark.parametrize(("known", "method"), [(True, "dflash_ddtree"), (False, "dflash")])
def test_reaches_vllm_under_a_known_name(monkeypatch: pytest.MonkeyPatch, known: bool, method: str) -> None:
    monkeypatch.setattr(settings, "knows_method", lambda: known)
    args = arguments("dflash_ddtree", "aeon_ddtree.engine.worker.CPUWorker")
    settings.prepare(args)
    assert args.speculative_config["method"] == method
    args = arguments("dflash", "aeon_ddtree.engine.worker.CPUWorker")
    settings.prepare(args)
    assert args.speculative_config["method"] == "dflash"


def test_asks_vllm_itself() -> None:
    from vllm.config.speculative import SpeculativeMethod

    assert settings.knows_method() == ("dflash_ddtree" in get_args(SpeculativeMethod))
