# SPDX-License-Identifier: Apache-2.0
"""What happens between the target's logits and the walked path: per-row history, sampling, the walk."""

from aeon_ddtree.verify.adjust import adjust_logits
from aeon_ddtree.verify.history import record_emitted
from aeon_ddtree.verify.logprobs import path_logits
from aeon_ddtree.verify.requests import RequestParams, build_sampling_state
from aeon_ddtree.verify.rows import sample_adjusted, sample_gaps, sample_rows
from aeon_ddtree.verify.state import SamplingState
from aeon_ddtree.verify.walk import Walk, walk

__all__ = [
    "RequestParams",
    "SamplingState",
    "Walk",
    "adjust_logits",
    "build_sampling_state",
    "path_logits",
    "record_emitted",
    "sample_adjusted",
    "sample_gaps",
    "sample_rows",
    "walk",
]
