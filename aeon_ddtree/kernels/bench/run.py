# SPDX-License-Identifier: Apache-2.0
"""Running cases one after the other: prepared, checked, timed, and set beside the stock kernel."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from aeon_ddtree.kernels.bench import clock, stock
from aeon_ddtree.kernels.bench.case import Case, Ready, Source
from aeon_ddtree.kernels.bench.goals import Record


def run(cases: Iterable[Case], bytes_per_us: float, with_stock: bool) -> Iterable[Record]:
    """A record per case, as soon as it is there. A case that fails its check has "refused" and no times."""
    source, model = Source("cuda"), ""
    for case in cases:
        if case.model.name != model:  # the large buffers of one model at a time
            source.drop_pools()
            torch.cuda.empty_cache()
            model = case.model.name
        yield measure(case, source, bytes_per_us, with_stock)


def measure(case: Case, source: Source, bytes_per_us: float, with_stock: bool) -> Record:
    """See `run`. Errors of the stock kernel are recorded; ours are not caught."""
    started = time.perf_counter()
    record: Record = {
        "kernel": case.kernel, "model": case.model.name, "width": case.width, "batch": case.batch,
        "context": case.context,
    }  # fmt: skip
    ready = case.prepare(source, case)
    wrong = ready.check()
    if wrong is not None:
        return record | {"refused": wrong}
    us = clock.time(ready.calls).over(ready.units)
    record |= {
        "us": us.as_list(), "bytes": ready.moved, "layers": ready.units, "sets": len(ready.calls),
        "bandwidth_share": round(ready.moved / us.median / bytes_per_us, 4),
    }  # fmt: skip
    if with_stock and ready.stock is not None:
        record |= _stock(ready)
    return record | {"seconds": round(time.perf_counter() - started, 2)}


def _stock(ready: Ready) -> dict[str, Any]:
    assert ready.stock is not None
    try:
        times = {label: clock.time(calls) for label, calls in ready.stock().items()}
    except Exception as error:  # another version of vLLM, or a shape that it refuses: ours still counts
        return {"stock_error": f"{type(error).__name__}: {str(error)[:200]}"}
    label = min(times, key=lambda each: times[each].median)
    return {
        "stock": {each: t.as_list() for each, t in times.items()}, "stock_kernel": label,
        "stock_us": round(times[label].median, 3),
    }  # fmt: skip


def line(record: Record) -> str:
    """One record for people."""
    context = f" context {record['context']:6d}" if record["context"] else ""
    name = f"{record['kernel']:26s} {record['model']:4s} W={record['width']:<3d} R={record['batch']:<2d}{context}"
    if "refused" in record:
        return f"{name}  REFUSED: {record['refused']}"
    median, low, high = record["us"]
    text = f"{name} {median:9.2f} us ({low:.2f} - {high:.2f}) {100 * record['bandwidth_share']:5.1f} % of copy"
    text += f" {record['bytes'] / 1e6:9.3f} MB"
    if "stock_us" in record:
        text += f"  stock {record['stock_us']:9.2f} us, ratio {median / record['stock_us']:.3f}"
    return text + (f"  stock failed: {record['stock_error']}" if "stock_error" in record else "")


def versions() -> dict[str, Any]:
    import triton

    return {
        "device": torch.cuda.get_device_name(), "capability": list(torch.cuda.get_device_capability()),
        "torch": str(torch.__version__), "cuda": torch.version.cuda, "triton": triton.__version__,
        "vllm": stock.version(),
    }  # fmt: skip
