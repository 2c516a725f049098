# SPDX-License-Identifier: Apache-2.0
"""`aeon-ddtree parity`: plain, chain and tree over held-out prompts, compared token by token.

Exit code 0: every difference, if any, is inside the rule and branches were taken; 1: not so; 2: an argument cannot be
used; 3: an engine failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

from aeon_ddtree.proving_ground.pair import PROMPTS_FILE
from aeon_ddtree.proving_ground.parity_plan import TREE_OPTIONS, ParityError, Settings, load_prompts, select


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ParityError(f"{message}; see aeon-ddtree parity --help")


def _list_of(kind: Any, what: str) -> Any:
    def read(text: str) -> tuple[Any, ...]:
        try:
            values = tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: expected {what}, with commas between") from None
        if len(set(values)) != len(values):
            raise argparse.ArgumentTypeError(f"{text!r}: a value occurs twice; leave one out")
        return values

    return read


def _commit(text: str) -> str:
    if text not in ("flat", "branch"):
        raise ValueError
    return text


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="aeon-ddtree parity",
        description="Plain, chain and tree decoding over held-out prompts, compared token by token.",
        epilog="The tree's other options are the recipe's (mode ddtree), or those of variables such as DDTREE_TAU.",
    )
    add = made.add_argument
    add("--recipe", default=os.environ.get("DDTREE_RECIPE") or "proving-ground", help="name or path of a recipe")
    add("--prompts", type=int, default=200, help="prompts at the larger batch (default %(default)s)")
    add("--single-prompts", type=int, default=24, help="prompts decoded one at a time, where --batch has 1")
    add("--prompts-file", type=Path, default=PROMPTS_FILE, help='JSON lines of {"id", "category", "prompt"}')
    add("--max-tokens", type=int, default=64, help="tokens per prompt (default %(default)s)")
    add("--budgets", type=_list_of(int, "whole numbers"), default=(7, 15, 31, 63), metavar="B,B…")
    add("--commit", type=_list_of(_commit, "flat or branch or both"), default=("flat", "branch"))
    add("--temperature", type=_list_of(float, "numbers"), default=(0.0, 1.0), metavar="T,T…")
    add("--batch", type=_list_of(int, "1 and one larger number"), default=(1, 8), metavar="N,N")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--sweep", action="store_true", help="also measure spine, ranking and sharpening around their middles")
    add("--async-scheduling", choices=("on", "off"), help="default: vLLM's own choice")
    add("--max-model-len", type=int, default=1024, help="longest context (default %(default)s)")
    add("--threads", type=int, help="threads of an engine (default: 1 on the CPU)")
    add("--parallel", type=int, help="engines at work at a time (default: 2 on the CPU if there are cores, 1 on a GPU)")
    add("--seed", type=int, default=0, help="of noise and arrivals (default %(default)s)")
    add("--json", type=Path, required=True, metavar="FILE", help="where the report goes")
    return made


@dataclass(frozen=True)
class Models:
    """What the recipe says of the pair. target, drafter: folders or hub ids; options: the tree's defaults."""

    recipe: str
    names: dict[str, str]
    target: str
    drafter: str
    device: str
    horizon: int
    options: dict[str, Any]


def resolve_models(recipe_name: str, device: str) -> Models:
    """The pair of a recipe, found and checked as the servers do. Refusal (one line) where that is not possible."""
    from aeon_ddtree.engine.options import DDTreeOptions
    from aeon_entrypoints import preflight, references
    from aeon_entrypoints.failure import Failure, Refusal
    from aeon_entrypoints.recipe import load_recipe
    from aeon_entrypoints.resolve import resolve

    file = references.find_recipe(recipe_name)
    resolved = resolve("ddtree", load_recipe(file), file, {"device": device}, os.environ, [])
    target, drafter = resolved.target, resolved.drafter
    assert drafter is not None
    failures: list[Failure] = []
    for field, folder in (("model", target), ("drafter", drafter)):
        failures += preflight.model_folder(folder, field, resolved.settings[field].origin)
    if not failures:
        failures += preflight.drafter_fits(target, drafter)
    if failures:
        raise Refusal(str(failures[0]))
    horizon = preflight.drafter_horizon(drafter)
    if horizon is None:
        raise Refusal(f"drafter is {drafter}, expected a folder on this machine; download it and give its folder")
    given = {name: resolved.options[name].value for name in TREE_OPTIONS if name in resolved.options}
    given |= {"topology": "best_first", "root_leaves": 0}  # the budgets and policies of this run set the shape
    names = {field: str(resolved.settings[field].value) for field in ("model", "drafter")}
    return Models(
        resolved.recipe.name,
        {field: name if not os.path.isabs(name) else Path(name).name for field, name in names.items()},
        str(target),
        str(drafter),
        resolved.device,
        horizon,
        DDTreeOptions.from_mapping({"budget": max(horizon, 15)} | given).to_mapping(),
    )


def settings_of(arguments: argparse.Namespace, models: Models) -> Settings:
    """The arguments checked. ParityError where one cannot be used."""
    for flag, values, low, high in (
        ("--budgets", arguments.budgets, 1, 127),
        ("--temperature", arguments.temperature, 0, None),
        ("--batch", arguments.batch, 1, None),
        ("--max-tokens", (arguments.max_tokens,), 2, arguments.max_model_len - 1),
        ("--threads", (arguments.threads or 1,), 1, None),
        ("--parallel", (arguments.parallel or 1,), 1, None),
    ):
        for value in values:
            if value < low or (high is not None and value > high):
                raise ParityError(f"{flag} {value:g}: expected {low} to {high or 'any'}; give another value")
    if sum(batch > 1 for batch in arguments.batch) > 1:
        raise ParityError(f"--batch {','.join(map(str, arguments.batch))}: expected 1 and one larger number at most")
    return Settings(
        prompts=arguments.prompts,
        single_prompts=min(arguments.single_prompts, arguments.prompts),
        max_tokens=arguments.max_tokens,
        budgets=arguments.budgets,
        commits=arguments.commit,
        temperatures=arguments.temperature,
        batches=arguments.batch,
        horizon=models.horizon,
        options={name: models.options[name] for name in TREE_OPTIONS},
        sweep=arguments.sweep,
        seed=arguments.seed,
    )


def engine_args(arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """vLLM's arguments that do not depend on the mode."""
    found: dict[str, Any] = {"max_model_len": arguments.max_model_len, "skip_mm_profiling": True}
    if arguments.async_scheduling is not None:
        found["async_scheduling"] = arguments.async_scheduling == "on"
    if device == "cuda":
        # Plain decoding stays at hand while the others run: neither may take the whole memory for its cache.
        found |= {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 2 << 30}
    return found


class _Progress:
    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, line: str) -> None:
        with self._lock:
            print(f"{time.monotonic() - self._began:6.0f} s  {line}", file=sys.stderr, flush=True)


@contextmanager
def _engines_end_with_us() -> Iterator[None]:
    """SIGTERM and Ctrl-C end the engines at once; whoever waits for one learns of it, and cleans up."""

    def end(signum: int, frame: Any) -> NoReturn:
        for child in multiprocessing.active_children():
            child.kill()
        raise SystemExit(128 + signum)

    if threading.current_thread() is not threading.main_thread():  # handlers belong to the main thread
        yield
        return
    before = {each: signal.signal(each, end) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def parity(arguments: argparse.Namespace, command: str) -> int:
    """Decode, judge, write the report and print its table; the exit code."""
    from aeon_ddtree.engine.decoder import DecoderError
    from aeon_ddtree.proving_ground import parity_origin, parity_report
    from aeon_ddtree.proving_ground.parity_run import Harness, Pair

    models = resolve_models(arguments.recipe, arguments.device)
    settings = settings_of(arguments, models)
    known = load_prompts(arguments.prompts_file)
    prompts = select(known, settings)
    try:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.touch()
    except OSError as error:
        raise ParityError(f"--json {arguments.json}: cannot be written ({error.strerror}); give another file") from None
    on_cpu = models.device == "cpu"
    threads = arguments.threads or (1 if on_cpu else None)
    parallel = arguments.parallel or (max(1, min(2, len(os.sched_getaffinity(0)) // (threads or 1))) if on_cpu else 1)
    pair = Pair(
        models.target, models.drafter, models.device, arguments.dtype, threads, engine_args(arguments, models.device)
    )
    began = datetime.now(timezone.utc)
    runs = None
    try:
        with _engines_end_with_us():
            runs = Harness(pair, settings, prompts, parallel, _Progress()).run()
    except DecoderError as error:
        print(f"aeon-ddtree parity: an engine failed\n{error}", file=sys.stderr)
        return 3
    finally:
        if runs is None:
            arguments.json.unlink()
    ended = datetime.now(timezone.utc)
    head = {
        "recipe": models.recipe,
        "pair": models.names,
        "dtype": arguments.dtype,
        "left_out": {prompt.id: prompt.tied for prompt in known if prompt.tied},
        "async_scheduling": arguments.async_scheduling or "default",
        "command": command,
        "started": began.isoformat(timespec="seconds"),
        "ended": ended.isoformat(timespec="seconds"),
        "seconds": round((ended - began).total_seconds(), 1),
        "source": parity_origin.commit_of(Path(__file__).resolve().parents[2]),
        "versions": parity_origin.versions(),
        "device": parity_origin.device_of(models.device, threads, parallel),
    }
    report = parity_report.build(runs, settings, head)
    arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(parity_report.table(report))
    print(f"report: {arguments.json}")
    return 0 if report["passed"] else 1


def main(argv: list[str]) -> int:
    """The command `aeon-ddtree parity`; returns its exit code."""
    from aeon_entrypoints.failure import Refusal

    try:
        return parity(parser().parse_args(argv), shlex.join(["aeon-ddtree", "parity", *argv]))
    except (ParityError, Refusal) as error:
        print(f"aeon-ddtree: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
