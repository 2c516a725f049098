# SPDX-License-Identifier: Apache-2.0
"""Runs in the engine's process. The embedded tokenizer has no reasoning tokens, so no parser can be configured."""


def pretend_reasoning_parser(worker, configured: bool) -> None:
    worker.model_runner._reasons = configured
