# SPDX-License-Identifier: Apache-2.0
"""`python -m aeon_ddtree.kernels.bench`: every kernel beside what it replaces, on this CUDA device.

Times are µs per layer where a launch serves several, medians of graph replays with the 20th and 80th percentile. A case
whose answer is wrong is refused: no time is printed. Exit code 1 then, and 2 where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from aeon_ddtree.kernels.bench import clock, plan, stock
from aeon_ddtree.kernels.bench import run as running
from aeon_ddtree.kernels.bench.goals import judge


def _commit() -> str | None:
    """The commit of the source tree this runs from, with a + where files were changed; None outside one."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+"],
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout.strip() or None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m aeon_ddtree.kernels.bench", description=__doc__)
    parser.add_argument("--json", type=Path, help="also write records and goals to this file")
    parser.add_argument("--kernel", action="append", choices=plan.kernels(), help="only this one (repeatable)")
    parser.add_argument("--quick", action="store_true", help="only cases that goals need")
    parser.add_argument("--no-stock", action="store_true", help="ours alone, even where vLLM is installed")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench: there is no CUDA device here, expected one; see scripts/compile_kernels.py", file=sys.stderr)
        return 2
    started = time.perf_counter()
    about = running.versions()
    print("  ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    _compile()
    cases = plan.quick_cases() if given.quick else plan.all_cases()
    cases = [case for case in cases if not given.kernel or case.kernel in given.kernel]
    cases.sort(key=lambda case: case.model.name)  # one model's large buffers at a time
    with_stock = stock.available() and not given.no_stock
    bytes_per_us = clock.copy_bandwidth()
    print(
        f"compiled after {time.perf_counter() - started:.0f} s; copies move {bytes_per_us / 1e6:.3f} TB/s", flush=True
    )
    records = []
    for record in running.run(cases, bytes_per_us, with_stock):
        print(running.line(record), flush=True)
        records.append(record)
    goals = judge(records, bytes_per_us)
    for goal in goals:
        if goal.found is not None or not (given.quick or given.kernel):
            print(goal.line())
    refused = sum("refused" in record for record in records)
    met, missed = (sum(goal.met is wanted for goal in goals) for wanted in (True, False))
    took = time.perf_counter() - started
    print(f"{len(records)} cases, {refused} refused; goals: {met} met, {missed} missed; {took:.0f} s")
    if given.json:
        content = {
            **about, "commit": _commit(), "command": ["python", "-m", "aeon_ddtree.kernels.bench", *sys.argv[1:]],
            "copy_bytes_per_us": round(bytes_per_us), "seconds": round(took, 1), "records": records,
            "goals": [
                {"name": g.name, "limit": g.limit, "least": g.least, "found": g.found, "met": g.met} for g in goals
            ],
        }  # fmt: skip
        given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if refused else 0


def _compile() -> None:
    """Every variant into Triton's cache, on all cores, by a process that has no device open."""
    major, minor = torch.cuda.get_device_capability()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    command = [sys.executable, "-m", "aeon_ddtree.kernels.bench.variants", str(major * 10 + minor), str(processors)]
    if subprocess.run(command).returncode:
        print("bench: not every variant was compiled ahead; those that are missing are compiled as they come")


if __name__ == "__main__":
    sys.exit(main())
