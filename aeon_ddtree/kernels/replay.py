# SPDX-License-Identifier: Apache-2.0
"""`python -m aeon_ddtree.kernels.replay FILE`: a captured verify window through the kernels and through the references.

Every kernel gets what the engine gave it. Its answer is compared with the reference in fp64, and so is the engine's own
answer from the file: a kernel that was replaced, and the one that ran then, are judged by the same truth. Exit code 0
if all agree, 1 if not, 2 if there is nothing to replay.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aeon_ddtree.kernels import captured, dispatch
from aeon_ddtree.kernels.causal_conv_tree import causal_conv_tree, conv_commit
from aeon_ddtree.kernels.causal_conv_tree import reference as conv_reference
from aeon_ddtree.kernels.compact_kv import compact_kv
from aeon_ddtree.kernels.compact_kv import reference as compact_reference
from aeon_ddtree.kernels.compare import tolerance, worst
from aeon_ddtree.kernels.gated_delta_tree import TreeFactors, fold_state, gated_delta_tree
from aeon_ddtree.kernels.tree_attention import pack_visible, tree_attention, unpack_visible
from aeon_ddtree.kernels.walk_tree import reference as walk_reference
from aeon_ddtree.kernels.walk_tree import walk_tree


@dataclass(frozen=True)
class Verdict:
    """Largest error of one answer: who gave it ("kernel" now, "engine" then), and what is allowed (0: equal bytes)."""

    operation: str
    answer: str
    by: str
    error: float
    allowed: float

    @property
    def good(self) -> bool:
        return self.error <= self.allowed


def _judge(operation: str, answer: str, by: str, got: Tensor, truth: Tensor, exact: bool = False) -> Verdict:
    return Verdict(operation, answer, by, worst(got, truth), 0.0 if exact else tolerance(got.dtype, truth))


Cast = Callable[[Tensor], Tensor]


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _gdn(file: captured.Sections) -> Iterator[Verdict]:
    g, parent, commit = file["gdn"], file["tree"]["parent"], file["commit"]
    slots, has = g["slots"], g["has_state"]

    def conv(cast: Cast) -> Tensor:
        bias = g["bias"] if g["bias"] is None else cast(g["bias"])
        return causal_conv_tree(
            cast(g["x"]), cast(g["conv_state"]), cast(g["weight"]), bias, slots, parent,
            has_state=has, activation=g["activation"],
        )  # fmt: skip

    truth = conv(Tensor.double)
    for by, got in (("kernel", conv(_itself)), ("engine", g["y"])):
        yield _judge("causal_conv_tree", "y", by, got, truth)

    window, expected = g["conv_state"].clone(), g["conv_state"].clone()
    conv_commit(window, slots, g["x"], commit["path"], commit["path_len"], has_state=has)
    conv_reference.commit(expected, slots, g["x"], commit["path"], commit["path_len"], has)
    yield _judge("conv_commit", "conv_state", "kernel", window, expected, exact=True)

    def delta(cast: Cast) -> tuple[Tensor, TreeFactors]:
        return gated_delta_tree(
            cast(g["q"]), cast(g["k"]), cast(g["v"]), cast(g["a"]), cast(g["b"]), cast(g["A_log"]), cast(g["dt_bias"]),
            cast(g["state"]), slots, parent, has_state=has,
        )  # fmt: skip

    (out, factors), (exact, truths) = delta(_itself), delta(Tensor.double)
    engines = TreeFactors(g["u"], g["unit_k"], g["c"])
    for by, got, kept in (("kernel", out, factors), ("engine", g["out"], engines)):
        yield _judge("gated_delta_tree", "out", by, got, exact)
        for name, mine, right in zip(TreeFactors._fields, kept, truths):
            # c holds fp32 accuracy in fp64.
            yield _judge("gated_delta_tree", name, by, mine.float() if name == "c" else mine, right)

    state, expected = g["state"].clone(), g["state"].double()
    fold_state(state, slots, factors, commit["path"], commit["path_len"], has_state=has)
    fold_state(expected, slots, truths, commit["path"], commit["path_len"], has_state=has)
    yield _judge("fold_state", "state", "kernel", state, expected)


def _attention(file: captured.Sections) -> Iterator[Verdict]:
    a, commit = file["attention"], file["commit"]
    bits = pack_visible(a["visible"])
    yield _judge("pack_visible", "bits", "kernel", unpack_visible(bits), a["visible"], exact=True)
    where = (a["block_table"], a["context_len"])
    options = {"scale": a["scale"], "window": a["window"], "depth": a["depth"]}
    out = tree_attention(a["q"], a["k_cache"], a["v_cache"], *where, bits, a["num_rows"], **options)
    caches = (a["k_cache"].double(), a["v_cache"].double())
    truth = tree_attention(a["q"].double(), *caches, *where, a["visible"], a["num_rows"], **options)
    for by, got in (("kernel", out), ("engine", a["out"])):
        yield _judge("tree_attention", "out", by, got, truth)

    moved = (a["k_cache"].clone(), a["v_cache"].clone())
    expected = (a["k_cache"].clone(), a["v_cache"].clone())
    compact_kv([moved], *where, commit["path"], commit["path_len"])
    compact_reference.compact([expected], *where, commit["path"], commit["path_len"])
    for name, got, right in zip(("k_cache", "v_cache"), moved, expected):
        yield _judge("compact_kv", name, "kernel", got, right, exact=True)


def _walk(file: captured.Sections) -> Iterator[Verdict]:
    tree, w = file["tree"], file["walk"]
    given = (tree["token"], tree["parent"], tree["num_nodes"], w["sampled"])
    truths = walk_reference.walk(*given, w["max_len"])
    now, then = walk_tree(*given, max_len=w["max_len"]), (w["path"], w["path_len"], w["bonus"])
    for by, answers in (("kernel", now), ("engine", then)):
        for name, got, right in zip(("path", "path_len", "bonus"), answers, truths):
            yield _judge("walk_tree", name, by, got, right, exact=True)


def replay(file: captured.Sections) -> list[Verdict]:
    """All verdicts on a window whose tensors lie where the kernels are to run."""
    parts = [_walk(file), _attention(file)] + ([_gdn(file)] if "gdn" in file else [])
    return [verdict for part in parts for verdict in part]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m aeon_ddtree.kernels.replay", description=__doc__)
    parser.add_argument("file", type=Path, help="a window that an engine with DDTREE_CAPTURE_DIR wrote")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help=f"where the kernels run (default here: {default})")
    parser.add_argument("--json", type=Path, help="also write the verdicts to this file")
    given = parser.parse_args(arguments)
    try:
        file = captured.load(given.file, given.device)
        kernels = dispatch.describe(torch.device(given.device))
    except (OSError, ValueError, RuntimeError) as error:
        print(f"replay: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    about, (requests, width) = file["about"], file["tree"]["token"].shape
    print(f"{given.file}: {requests} requests, windows of {width} rows, captured with {about['kernels']}")
    print(f"replayed with {kernels}; largest error against the reference in fp64:")
    verdicts = replay(file)
    for each in verdicts:
        line = f"{each.operation:18s} {each.answer:11s} {each.by:7s} {each.error:9.2e} of {each.allowed:8.2e}"
        print(line + ("" if each.good else "  WRONG"))
    wrong = sum(not each.good for each in verdicts)
    print(f"{len(verdicts) - wrong} of {len(verdicts)} answers agree")
    if given.json:
        content: dict[str, Any] = {"about": about, "replayed_with": kernels, "wrong": wrong}
        content["verdicts"] = [asdict(each) | {"good": each.good} for each in verdicts]
        given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
