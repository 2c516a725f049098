# SPDX-License-Identifier: Apache-2.0
"""Checks before anything loads. None imports torch, vLLM or transformers; every fact about the machine can be given."""

from .checks import CHECKS, Row, before_start, run_all
from .drafter import block_size, drafter_fits, drafter_horizon
from .finding import Finding, Skipped
from .gpus import Gpu
from .host import port_free
from .hub import cached_snapshot
from .machine import BUILD_FACTS, Machine
from .models import model_folder, read_json, text_config
from .options import UNSAFE_VARIABLE, chain_length, prefix_caching, unsafe_mode
from .quantisation import quantised_as
from .situation import Situation
from .window import sliding_window, window_patch

__all__ = [
    "BUILD_FACTS",
    "CHECKS",
    "UNSAFE_VARIABLE",
    "Finding",
    "Gpu",
    "Machine",
    "Row",
    "Situation",
    "Skipped",
    "before_start",
    "block_size",
    "cached_snapshot",
    "chain_length",
    "drafter_fits",
    "drafter_horizon",
    "model_folder",
    "port_free",
    "prefix_caching",
    "quantised_as",
    "read_json",
    "run_all",
    "sliding_window",
    "text_config",
    "unsafe_mode",
    "window_patch",
]
