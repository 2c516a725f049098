# SPDX-License-Identifier: Apache-2.0
"""The launcher's part of a mode: argument list and environment of the server. Never a shell string."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import preflight
from .failure import Failure, Refusal
from .recipe import OWN_FLAGS
from .resolve import Resolved, Value
from .settings import SERVER

SERVER_MODULE = "vllm.entrypoints.openai.api_server"  # not `vllm serve`: that asks for a distribution called vllm
PLUGIN = "aeon_ddtree"
METRICS_DIR = "PROMETHEUS_MULTIPROC_DIR"
ENGINE_MODES = {"baseline": "plain", "dflash": "chain", "ddtree": "tree", "unsafe-full-branch": "tree"}
SHORT_FLAGS = {"-sc": "--speculative-config", "-tp": "--tensor-parallel-size"}
CUDA_ONLY = {"gpu_memory_utilization"}


def option_object(resolved: Resolved) -> dict[str, Any]:
    """The one object that carries DDTree's options to every worker."""
    return {"mode": ENGINE_MODES[resolved.mode]} | {name: value.value for name, value in resolved.options.items()}


def drafted_tokens(resolved: Resolved) -> int:
    """num_speculative_tokens: the budget for a tree, the horizon for a chain. Raises Refusal when that is unknown."""
    if resolved.is_tree:
        return resolved.options["budget"].value
    if resolved.horizon is not None:
        return resolved.horizon.value
    horizon = preflight.drafter_horizon(resolved.drafter)
    if horizon is not None:
        return horizon
    raise Refusal(
        f"drafter {resolved.drafter}: its block size is not known yet; give --horizon, or a folder with a config.json"
    )


def _flag(flag: str, value: Any) -> list[str]:
    if value is True:
        return [flag]
    if value is False:
        return ["--no-" + flag[2:]]
    if isinstance(value, dict | list):
        return [flag, json.dumps(value, separators=(",", ":"))]
    return [flag, str(value)]


def _own_flags(resolved: Resolved) -> Iterator[tuple[str, Any]]:
    yield "--model", str(resolved.target)
    if resolved.recipe.model_revision and isinstance(resolved.target, str):
        yield "--revision", resolved.recipe.model_revision
    for setting in SERVER:
        value = resolved.settings.get(setting.name)
        skipped = setting.name == "model" or (setting.name in CUDA_ONLY and resolved.device == "cpu")
        if setting.vllm_flag is not None and value is not None and not skipped:
            yield setting.vllm_flag, value.value
    yield "--enable-prefix-caching", resolved.get("prefix_caching")
    yield "--generation-config", "vllm"
    yield "--worker-cls", f"aeon_ddtree.engine.worker.{'CPUWorker' if resolved.device == 'cpu' else 'GPUWorker'}"
    if resolved.drafter is not None:
        # dflash_ddtree is a name that recipes may use; what vLLM knows is dflash.
        speculation = {
            "method": "dflash",
            "model": str(resolved.drafter),
            "num_speculative_tokens": drafted_tokens(resolved),
        }
        if resolved.recipe.drafter_revision and isinstance(resolved.drafter, str):
            speculation["revision"] = resolved.recipe.drafter_revision
        yield "--speculative-config", speculation
    yield "--additional-config", {"ddtree": option_object(resolved)}


def _name(argument: str) -> str:
    """`--no-enable-x`, `--enable_x=1`, `--enable-x.part` -> `--enable-x`."""
    flag = argument.split("=", 1)[0].split(".", 1)[0].replace("_", "-")
    flag = SHORT_FLAGS.get(flag, flag)
    return "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else flag


def _check_extra(extra: list[str]) -> Iterator[str]:
    """Names of the flags among the arguments after `--`. Raises Refusal for those that would undo what was checked."""
    checked = {flag: f"set {cure} instead" for flag, cure in OWN_FLAGS.items()}
    checked |= {name: f"give --{name} before the --" for name in ("host", "port")}
    checked |= {"config": "put its values into a recipe"}
    for argument in extra:
        name = _name(argument)
        if name.startswith("--") and len(name) > 2:
            # The server's parser takes any unambiguous beginning of a flag for the flag.
            owned = next((flag for flag in checked if flag.startswith(name[2:])), None)
            if owned is not None:
                raise Refusal(
                    f"arguments after --: {argument} is --{owned}, which was checked already; {checked[owned]}"
                )
            yield name


def build_argv(resolved: Resolved) -> list[str]:
    """The server's argument list; arguments after `--` come last and replace ours of the same name, which is noted."""
    extra = set(_check_extra(resolved.extra))
    flags: dict[str, Any] = dict(_own_flags(resolved))
    flags |= {flag: value.value for flag, value in resolved.flags.items() if value.value is not None}
    argv = [sys.executable, "-m", SERVER_MODULE]
    for flag, value in flags.items():
        if _name(flag) in extra:
            note = f"{flag} is given after --, which replaces {_flag(flag, value)}"
            if note not in resolved.notes:
                resolved.notes.append(note)
            continue
        argv += _flag(flag, value)
    return argv + resolved.extra


def build_env(resolved: Resolved, environ: Mapping[str, str]) -> dict[str, Value]:
    """Variables to set for the server, beyond those it inherits."""
    env = dict(resolved.env)
    plugins = environ.get("VLLM_PLUGINS")
    if plugins is not None and PLUGIN not in (names := [name for name in plugins.split(",") if name]):
        env["VLLM_PLUGINS"] = Value(",".join([*names, PLUGIN]), "environment VLLM_PLUGINS, with this plugin added")
    if METRICS_DIR not in environ and METRICS_DIR not in env:
        folder = Path(tempfile.gettempdir(), f"aeon-ddtree-metrics-{os.getuid()}-{resolved.settings['port'].value}")
        env[METRICS_DIR] = Value(str(folder), "default: the worker's metrics reach the server's /metrics through it")
    return env


def check(resolved: Resolved, environ: Mapping[str, str], dry_run: bool) -> None:
    """All of preflight. Raises Refusal with the first failure; in a dry run, what only a start needs becomes a note."""
    settings, options = resolved.settings, option_object(resolved)
    longest = preflight.drafter_horizon(resolved.drafter)
    caching = settings["prefix_caching"]
    _raise(preflight.unsafe_mode(resolved.mode, environ))
    _raise(preflight.prefix_caching(resolved.mode, caching.value, caching.origin))
    _raise(preflight.tree_ranges(options, {name: value.origin for name, value in resolved.options.items()}))
    if resolved.horizon is not None and resolved.mode == "dflash":
        _raise(preflight.chain_length(resolved.horizon.value, resolved.horizon.origin, longest))
    _raise(preflight.engine_options(options, longest, f"recipe {resolved.recipe.name}"))
    absent = False
    for folder, name in ((resolved.target, "model"), (resolved.drafter, "drafter")):
        if folder is not None and (failure := next(preflight.model_folder(folder, name, settings[name].origin), None)):
            if not dry_run:
                raise Refusal(str(failure))
            absent = True
            resolved.notes.append(f"a real start would stop here: {failure}")
    if resolved.drafter is not None and not absent:
        _raise(preflight.drafter_fits(resolved.target, resolved.drafter))
    if not dry_run:
        _raise(preflight.port_free(resolved.get("host"), settings["port"].value, settings["port"].origin))


def _raise(failures: Iterator[Failure]) -> None:
    for failure in failures:
        raise Refusal(str(failure))


def start(argv: list[str], env: Mapping[str, Value]) -> None:
    """Becomes the server: signals reach it. Does not return."""
    if METRICS_DIR in env:  # must exist and be empty: prometheus_client would add up an earlier server's counters
        shutil.rmtree(env[METRICS_DIR].value, ignore_errors=True)
        os.makedirs(env[METRICS_DIR].value, mode=0o700)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(argv[0], argv, {**os.environ, **{name: str(value.value) for name, value in env.items()}})
