# SPDX-License-Identifier: Apache-2.0
"""The `vllm.general_plugins` entry point. vLLM calls `register()` in every process: front end, engine core, workers.

It must import fast and must not change vLLM for anybody who does not ask for DDTree: it only listens for an engine
whose `--worker-cls` is ours and, when one is configured, checks the configuration and installs `compat`.
"""

from __future__ import annotations

import functools
from typing import Any

WORKERS = "aeon_ddtree.engine.worker"


def register() -> None:
    """Wrap `EngineArgs.create_engine_config`, once per process (idempotent)."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config
    if getattr(create, "_ddtree", False):
        return

    @functools.wraps(create)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        if not str(self.worker_cls).startswith(WORKERS):
            return create(self, *args, **kwargs)
        from aeon_ddtree.engine import compat, settings

        compat.install()
        settings.prepare(self)
        config = create(self, *args, **kwargs)
        settings.check(config)
        return config

    create_engine_config._ddtree = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]
