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

from . import preflight, tree_options, untrained
from .failure import Failure, Refusal
from .recipe import OWN_FLAGS, owned_by
from .resolve import Resolved
from .settings import SERVER
from .values import Value

SERVER_MODULE = "vllm.entrypoints.openai.api_server"  # not `vllm serve`: that asks for a distribution called vllm
PLUGIN = "aeon_ddtree"
METRICS_DIR = "PROMETHEUS_MULTIPROC_DIR"
ENGINE_MODES = {"baseline": "plain", "dflash": "chain", "ddtree": "tree", "unsafe-full-branch": "tree"}
SHORT_FLAGS = {"-sc": "--speculative-config", "-tp": "--tensor-parallel-size"}
CUDA_ONLY = {"gpu_memory_utilization"}
# Flags that take their values as separate words; lists of all others are JSON.
SEVERAL_WORDS = {
    "--allowed-media-domains",
    "--api-key",
    "--collect-detailed-traces",
    "--cpu-offload-params",
    "--cudagraph-capture-sizes",
    "--ignore-patterns",
    "--kv-cache-dtype-skip-layers",
    "--logits-processors",
    "--lora-modules",
    "--lora-target-modules",
    "--numa-bind-cpus",
    "--numa-bind-nodes",
    "--offload-params",
    "--served-model-name",
}
BUILD_ID_VARIABLE = "AEON_DDTREE_BUILD_ID_FILE"
BUILD_ID_FILE = preflight.BUILD_FACTS.with_name("build-id")
# What the watcher and monitoring ask for all the time.
UNLOGGED = "/health,/metrics,/load"


def option_object(resolved: Resolved) -> dict[str, Any]:
    """The one object that carries DDTree's options to every worker."""
    options: dict[str, Any] = {"mode": ENGINE_MODES[resolved.mode]}
    longest, asked = resolved.drafter_horizon, resolved.horizon
    if resolved.mode == "dflash" and longest is not None and asked is not None and asked.value < longest:
        # The engine's chain is as long as the horizon; a shorter one is the tree without alternatives.
        options |= {"mode": "tree", "budget": asked.value, "top_k": 1, "commit": "flat"}
    return options | {name: value.value for name, value in resolved.options.items()}


def drafted_tokens(resolved: Resolved) -> int:
    """num_speculative_tokens: the budget for a tree, the horizon for a chain. Raises Refusal when that is unknown."""
    if resolved.is_tree:
        return resolved.options["budget"].value
    if resolved.horizon is not None:
        return resolved.horizon.value
    if resolved.drafter_horizon is not None:
        return resolved.drafter_horizon
    raise Refusal(
        f"drafter {resolved.drafter}: its block size is not known yet; give --horizon, or a folder with a config.json"
    )


def _flag(flag: str, value: Any) -> list[str]:
    """A flag and its value as arguments. A value that begins with a dash would be taken for a flag of its own."""
    if value is True:
        return [flag]
    if value is False:
        return ["--no-" + flag[2:]]
    if isinstance(value, list) and value and flag in SEVERAL_WORDS:
        return [flag, *(json.dumps(word) if isinstance(word, dict | list) else str(word) for word in value)]
    text = json.dumps(value, separators=(",", ":")) if isinstance(value, dict | list) else str(value)
    if "\0" in text:
        raise Refusal(f"{flag} is {text!r}, expected text without NUL, which no argument can hold; correct it")
    return [f"{flag}={text}"] if text.startswith("-") else [flag, text]


def _own_flags(resolved: Resolved) -> Iterator[tuple[str, Any]]:
    yield "--model", str(resolved.target)
    if (revision := resolved.settings.get("model_revision")) is not None:
        yield "--revision", revision.value
    for setting in SERVER:
        value = resolved.settings.get(setting.name)
        skipped = setting.name == "model" or (setting.name in CUDA_ONLY and resolved.device == "cpu")
        if setting.vllm_flag is not None and value is not None and not skipped:
            yield setting.vllm_flag, value.value.split() if setting.name == "served_model_name" else value.value
    yield "--enable-prefix-caching", resolved.get("prefix_caching")
    yield "--generation-config", "vllm"
    yield "--worker-cls", f"aeon_ddtree.engine.worker.{'CPUWorker' if resolved.device == 'cpu' else 'GPUWorker'}"
    if resolved.get("watch"):
        yield "--enable-server-load-tracking", True  # the watcher tells an idle server from a stalled one by it
        yield "--disable-access-log-for-endpoints", UNLOGGED
    if resolved.drafter is not None:
        # dflash_ddtree is a name that recipes may use; what vLLM knows is dflash.
        speculation = {
            "method": "dflash",
            "model": str(resolved.drafter),
            "num_speculative_tokens": drafted_tokens(resolved),
        }
        if (revision := resolved.settings.get("drafter_revision")) is not None:
            speculation["revision"] = revision.value
        yield "--speculative-config", speculation
    yield "--additional-config", {"ddtree": option_object(resolved)}


def _name(argument: str) -> str:
    """`--no-enable-x`, `--enable_x=1`, `--enable-x.part` -> `--enable-x`."""
    flag = argument.split("=", 1)[0].split(".", 1)[0].replace("_", "-")
    flag = SHORT_FLAGS.get(flag, flag)
    return "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else flag


def _check_extra(extra: list[str]) -> Iterator[str]:
    """Names of the flags that come last. Raises Refusal for those that would undo what was checked, or be ignored."""
    place = "arguments after -- (or of EXTRA_VLLM_ARGS)"
    stray = "--" if "--" in extra else extra[0] if extra and not extra[0].startswith("-") else None
    if stray is not None:  # the server would take what follows for a model's name, and ignore it
        raise Refusal(f"{place}: {stray!r} is no flag, expected --FLAG [VALUE...]; remove it")
    checked = {flag: f"set {cure} instead" for flag, cure in OWN_FLAGS.items()}
    checked |= {name: f"give --{name} before the --" for name in ("host", "port")}
    checked |= {"config": "put its values into a recipe"}
    for argument in extra:
        name = _name(argument)
        if name.startswith("--"):
            owned = owned_by(name[2:], checked)
            if owned is not None:
                raise Refusal(f"{place}: {argument} is --{owned}, which was checked already; {checked[owned]}")
            yield name


def build_argv(resolved: Resolved) -> list[str]:
    """The server's argument list; what comes last replaces ours of the same name, which is noted."""
    names = list(_check_extra(resolved.extra))
    flags: dict[str, Any] = dict(_own_flags(resolved))
    for flag, value in resolved.flags.items():
        flags.pop(flag, None)
        if value.value is not None:
            flags[flag] = value.value
    argv = [sys.executable, "-m", SERVER_MODULE]
    for flag, value in flags.items():
        if _name(flag) in names:
            _note(resolved, f"{flag} is given after --, which replaces {_flag(flag, value)}")
            continue
        argv += _flag(flag, value)
    for name in sorted({name for name in names if names.count(name) > 1}):
        _note(resolved, f"{name} is given {names.count(name)} times after --; vLLM takes the last")
    return argv + resolved.extra


def _note(resolved: Resolved, note: str) -> None:
    if note not in resolved.notes:
        resolved.notes.append(note)


def build_env(resolved: Resolved, environ: Mapping[str, str]) -> dict[str, Value]:
    """Variables to set for the server, beyond those it inherits."""
    env = dict(resolved.env)
    plugins = environ.get("VLLM_PLUGINS")
    if plugins is not None and PLUGIN not in (names := [name for name in plugins.split(",") if name]):
        env["VLLM_PLUGINS"] = Value(",".join([*names, PLUGIN]), "environment VLLM_PLUGINS, with this plugin added")
    if METRICS_DIR not in environ and METRICS_DIR not in env:
        folder = Path(_temporary(), f"aeon-ddtree-metrics-{os.getuid()}-{resolved.settings['port'].value}")
        env[METRICS_DIR] = Value(str(folder), "default: the worker's metrics reach the server's /metrics through it")
    return env


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # nothing can be written to; a dry run may be for another machine, `start` refuses
        return "/tmp"


def check(resolved: Resolved, environ: Mapping[str, str], dry_run: bool) -> None:
    """What the values say, then all of preflight. Raises Refusal with the first failure.

    In a dry run, which may be for another machine, models that are not there become a note, and nothing that only this
    machine decides is looked at.
    """
    check_values(resolved, environ)
    if resolved.untrained:
        _make_drafter(resolved, dry_run)
    preflight.before_start(resolved, environ, dry_run)
    if resolved.untrained and dry_run:  # which is not there before a start, and need not be
        resolved.notes = [note for note in resolved.notes if f"drafter is {resolved.drafter}" not in note]


def check_values(resolved: Resolved, environ: Mapping[str, str]) -> None:
    """The values against the mode and against each other. Raises Refusal."""
    settings, options = resolved.settings, option_object(resolved)
    longest = resolved.drafter_horizon
    caching = settings["prefix_caching"]
    _raise(preflight.unsafe_mode(resolved.mode, environ))
    _raise(preflight.prefix_caching(resolved.mode, caching.value, caching.origin))
    if resolved.horizon is not None and resolved.mode == "dflash":
        _raise(preflight.chain_length(resolved.horizon.value, resolved.horizon.origin, longest))
    tree_options.judge(options, resolved.options, longest, f"recipe {resolved.recipe.name}")


def _make_drafter(resolved: Resolved, dry_run: bool) -> None:
    """Writes the untrained drafter, or says that a start would."""
    target, horizon = resolved.target, resolved.drafter_horizon
    assert horizon is not None
    said = f"drafter untrained: its drafts are arbitrary and hardly any is accepted; it lies in {resolved.drafter}"
    resolved.notes.append(said + (", written at a start" if dry_run else ""))
    absent = isinstance(target, Path) and not os.path.isfile(target / "config.json")
    if not dry_run and not absent:  # preflight says what an absent model needs
        revision = resolved.settings.get("model_revision")
        untrained.make(target, None if revision is None else revision.value, horizon)


def _raise(failures: Iterator[Failure]) -> None:
    for failure in failures:
        raise Refusal(str(failure))


def build_id(environ: Mapping[str, str]) -> str | None:
    """What the image says it was built from, None outside an image."""
    try:
        text = Path(environ.get(BUILD_ID_VARIABLE) or BUILD_ID_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return " ".join(text.split()) or None


def headline(resolved: Resolved, environ: Mapping[str, str]) -> str:
    """What is served: mode, recipe, profile, shape and build."""
    parts = [f"mode {resolved.mode}", f"recipe {resolved.recipe.name}", f"device {resolved.device}"]
    if resolved.profile is not None:
        parts.append(f"profile {resolved.profile.value}")
    if resolved.is_tree:
        shape = {name: resolved.options[name].value for name in ("budget", "topology", "root_leaves", "spine", "top_k")
                 if name in resolved.options}  # fmt: skip
        parts.append("tree " + ", ".join(f"{name} {value}" for name, value in shape.items()))
    elif resolved.drafter is not None:
        parts.append(f"a chain of {drafted_tokens(resolved)}")
    build = build_id(environ)
    return "; ".join([*parts, *([f"build {build}"] if build else [])])


def start(argv: list[str], env: Mapping[str, Value], resolved: Resolved) -> None:
    """Becomes the server: signals reach it. Does not return."""
    folder = env[METRICS_DIR].value if METRICS_DIR in env else None
    if folder is not None:  # must exist and be empty: prometheus_client would add up an earlier server's counters
        shutil.rmtree(folder, ignore_errors=True)
        try:
            os.makedirs(folder, mode=0o700)
        except OSError as error:
            raise Refusal(
                f"{folder}: the folder for metrics cannot be made ({error.strerror}); give a temporary folder that can "
                "be written to (docker run --tmpfs /tmp), or set TMPDIR"
            ) from None
    environ = {**os.environ, **{name: str(value.value) for name, value in env.items()}}
    if resolved.get("watch"):
        from . import watch

        watch.begin(
            argv,
            environ,
            host=resolved.get("host"),
            port=resolved.get("port"),
            name=resolved.recipe.name,
            ready_timeout=resolved.get("ready_timeout"),
            stall_after=resolved.get("stall_after"),
            exit_on_stall=resolved.get("exit_on_stall"),
            metrics_dir=folder,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(argv[0], argv, environ)
