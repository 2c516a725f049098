#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel variant that the launchers ask for, for GPUs that are not there, and says what each costs.

    scripts/compile_kernels.py --target sm_90 --target sm_121 [--json FILE]

The variants are recorded from the launchers themselves (`aeon_ddtree/kernels/bench/variants.py`) over the cases of the
bench: the 27B shape and the proving pair's, every width and batch. Compiler, assembler and cuobjdump are those of the
Triton wheel. Exit code 1 when a variant does not compile, when one for sm_121 wants more shared memory than a block
there has, when a hot one spills, and when an allowance below is no longer needed.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# target -> (compute capability, multiprocessors of the device that launchers are told of, shared memory of a block)
TARGETS = {
    "sm_90": (90, 132, 227 << 10),  # H200
    "sm_121": (121, 48, 99 << 10),  # GB10
}
# Kernels that run in every step, or in every layer of a step: these may not spill. Every other kernel must be named in
# COLD, so that a new one cannot slip past.
HOT = {
    "small_kernel", "prepare_kernel", "apply_kernel", "fold_kernel", "conv_kernel", "commit_kernel", "attend_kernel",
    "hopper_kernel", "merge_kernel", "pack_kernel", "ancestor_kernel", "_compact_kernel", "write_kernel",
    "_walk_kernel", "_build", "_top_of_chunks", "_top_of_rows", "_best_of_chunks", "_best_of_rows",
}  # fmt: skip
# Once per step, and only where a request filters by top-k, top-p or min-p.
COLD = {"_cutoff"}


@dataclass(frozen=True)
class Allowance:
    """Hot variants that may spill for now. where: a pattern on their labels; most: bytes a thread. An allowance that
    nothing needs is a fault, so that this table only says what is true; docs/kernels.md says what is done about it."""

    target: str
    kernel: str
    where: str
    most: int
    since: str
    reason: str


_ONE_SOLVE = "the whole window and its solve in the registers of one program, bound to 168 of them for occupancy"
_WIDE_TILE = (
    "the sums of a tile of query rows fill the registers by themselves; hopper_kernel takes no windows or own_kv"
)
_WIDE_HEADS = "heads of 256: the sums of 64 rows a warpgroup take 128 registers a thread by themselves"
ALLOWED = (
    Allowance("sm_90", "small_kernel", "gated_delta_tree 27b*", 96, "2026-11-29", _ONE_SOLVE),
    Allowance("sm_121", "small_kernel", "gated_delta_tree 27b*", 96, "2026-11-29", _ONE_SOLVE),
    Allowance("sm_121", "small_kernel", "gated_delta_tree pair*", 16, "2026-11-29", _ONE_SOLVE),
    Allowance("sm_90", "hopper_kernel", "tree_attention 27b*", 192, "2026-11-29", _WIDE_HEADS),
    Allowance("sm_90", "attend_kernel", "drafter_block 27b*", 192, "2026-11-29", _WIDE_TILE),
    Allowance("sm_90", "attend_kernel", "drafter_block pair*", 32, "2026-11-29", _WIDE_TILE),
    Allowance("sm_121", "attend_kernel", "tree_attention 27b*", 16, "2026-11-29", "12 bytes left of a 64-row tile"),
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="repeatable; by default all")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    parser.add_argument("--kernel", action="append", help="only variants of this kernel (repeatable)")
    parser.add_argument("--jobs", type=int, default=None, help="compiling processes; by default one per core")
    given = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("compile_kernels: TRITON_INTERPRET is 1, expected a compiling Triton; unset it", file=sys.stderr)
        return 2

    import triton

    from aeon_ddtree.kernels.bench.plan import all_cases
    from aeon_ddtree.kernels.bench.variants import compile_all, record

    started = time.perf_counter()
    targets = given.target or sorted(TARGETS)
    wanted = []
    for target in targets:
        capability, processors, _ = TARGETS[target]
        wanted += [
            each
            for each in record(all_cases(), capability, processors)
            if not given.kernel or each.variant.kernel in given.kernel
        ]
    print(f"{len(wanted)} variants with Triton {triton.__version__}, recorded in {time.perf_counter() - started:.0f} s")
    compiled = compile_all(wanted, given.jobs)

    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    used: set[Allowance] = set()
    for variant, result in zip(wanted, compiled):
        kernel, target = variant.variant.kernel, f"sm_{variant.variant.capability}"
        row = {"target": target, "kernel": kernel, "where": variant.label(), "hot": kernel in HOT, **asdict(result)}
        faults += faults_of(row, used)
        rows.append(row)
    rows.sort(key=lambda row: (row["target"], row["kernel"], row["where"]))
    for row in rows:
        print(line_of(row))
    checked = [a for a in ALLOWED if a.target in targets and (not given.kernel or a.kernel in given.kernel)]
    for idle in [a for a in checked if a not in used]:
        faults.append(f"{idle.target} {idle.kernel}: the allowance for {idle.where!r} is not needed, take it out")
    took = time.perf_counter() - started
    if given.json:
        content = {"triton": triton.__version__, "targets": targets, "seconds": round(took, 1), "faults": faults}
        content["allowed"] = [asdict(a) for a in checked]
        given.json.write_text(json.dumps(content | {"variants": rows}, indent=1) + "\n", encoding="utf-8")
    for each in [a for a in ALLOWED if a in used]:
        print(f"allowed since {each.since}: {each.target} {each.kernel} ({each.where}) spills: {each.reason}")
    for fault in faults:
        print(f"compile_kernels: {fault}", file=sys.stderr)
    print(f"{len(rows)} variants for {', '.join(targets)} in {took:.0f} s: {len(faults) or 'no'} faults")
    return 1 if faults else 0


def faults_of(row: dict[str, Any], used: set[Allowance]) -> list[str]:
    """What is wrong with a variant; allowances that it needs go into `used`."""
    name = f"{row['target']} {row['kernel']} ({row['where']})"
    if row["error"]:
        return [f"{name} does not compile: {row['error']}"]
    found = []
    limit = TARGETS[row["target"]][2]
    if row["shared"] > limit:
        found.append(f"{name} wants {row['shared']} bytes of shared memory, expected at most {limit}")
    if row["kernel"] not in HOT | COLD:
        found.append(f"{name} is a new kernel, expected one of HOT or COLD: name it there")
    if row["hot"] and row["spills"]:
        allowed = [
            a
            for a in ALLOWED
            if (a.target, a.kernel) == (row["target"], row["kernel"]) and fnmatch.fnmatch(row["where"], a.where)
        ]
        used.update(allowed)
        most = max((a.most for a in allowed), default=0)
        if row["spills"] > most:
            found.append(f"{name} spills {row['spills']} bytes a thread, expected at most {most}: it is hot")
    return found


def line_of(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"{row['target']:6s} {row['kernel']:16s} FAILED  {row['where']}"
    numbers = f"{row['registers']:3d} registers {row['spills']:5d} B spilled {row['shared'] / 1024:6.1f} KiB shared"
    return f"{row['target']:6s} {row['kernel']:16s} {numbers}  {row['warps']} warps  {row['where']}"


if __name__ == "__main__":
    sys.exit(main())
