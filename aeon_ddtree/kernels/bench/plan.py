# SPDX-License-Identifier: Apache-2.0
"""Which cases there are, and which of them the goals need."""

from __future__ import annotations

from aeon_ddtree.kernels.bench import attention, drafting, recurrent
from aeon_ddtree.kernels.bench.case import Case
from aeon_ddtree.kernels.bench.shapes import QWEN_27B


def all_cases() -> list[Case]:
    return [*recurrent.cases(), *attention.cases(), *drafting.cases()]


def quick_cases() -> list[Case]:
    """The 27B cases that the goals are judged by, attention at one width and at few contexts."""
    kept = {
        "gated_delta_tree": {(16, 1), (16, 8), (16, 16), (64, 1)},
        "fold_state": {(16, 1), (16, 8), (16, 16), (64, 1)},
        "causal_conv_tree": {(16, 1), (16, 16)},
        "tree_attention": {(16, 1), (16, 16), (64, 1)},
        "compact_kv": {(16, 1), (16, 16)},
        "build_tree": {(32, 1), (32, 16)},
        "walk_tree": {(32, 1), (32, 16), (64, 16)},
    }
    return [
        case
        for case in all_cases()
        if case.model is QWEN_27B
        and (case.width, case.batch) in kept.get(case.kernel, ())
        and case.context in (0, 512, 8192, 131072)
    ]


def kernels() -> list[str]:
    return list(dict.fromkeys(case.kernel for case in all_cases()))
