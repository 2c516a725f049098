# SPDX-License-Identifier: Apache-2.0
"""The `vllm.general_plugins` entry point. vLLM calls `register()` in every process: front end, engine core, workers.

It must import fast and must not change vLLM for anybody who does not ask for DDTree: it only listens for an engine
whose `--worker-cls` or speculative method is ours; where one is configured, it checks the configuration and installs
`compat`.
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
        _choose_worker(self)
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


def _choose_worker(args: Any) -> None:
    """The speculative method `dflash_ddtree` needs our worker: it is taken where none is named, others are refused."""
    if not isinstance(args.speculative_config, dict) or args.speculative_config.get("method") != "dflash_ddtree":
        return
    from vllm.platforms import current_platform

    ours = f"{WORKERS}.{'CPU' if current_platform.is_cpu() else 'GPU'}Worker"
    if args.worker_cls == "auto":
        args.worker_cls = ours
    elif not str(args.worker_cls).startswith(WORKERS):
        from aeon_ddtree.engine.options import OptionsError

        raise OptionsError(f"--worker-cls {args.worker_cls}: method=dflash_ddtree needs {ours}; leave the flag out")
