# SPDX-License-Identifier: Apache-2.0
"""Recipe schema, version 1: one YAML file per deployable setup. Unknown keys are refused with the nearest known one."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from .failure import Refusal, nearest
from .settings import BY_NAME, PREFIX, SERVER, TREE_BY_NAME
from .variables import OTHER_VARIABLES, RETIRED, check_choices

# Flags that the dispatcher writes itself, and what sets them instead: not allowed in a recipe's `vllm` or after `--`.
OWN_FLAGS = {
    "model": "model",
    "worker-cls": "device",
    "revision": "model_revision",
    "additional-config": "modes.MODE.ddtree, or --budget and its like",
    "speculative-config": "drafter, and horizon or budget",
    "enable-prefix-caching": "prefix_caching",
}
FLAG = r"[a-z0-9]+([-_][a-z0-9]+)*(\.[A-Za-z0-9_-]+)*"  # "compilation-config.mode" is a part of one
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"


def own_flags() -> dict[str, str]:
    """vLLM's flags that a value of the recipe is for -> that value."""
    return OWN_FLAGS | {s.vllm_flag[2:]: f"defaults.{s.name}" for s in SERVER if s.vllm_flag and s.name != "model"}


def owned_by(flag: str, owned: Iterable[str]) -> str | None:
    """The one of `owned` that vLLM's parser takes `flag` for, both without dashes: it takes any unambiguous beginning
    of a flag for the flag, `no-` turns one off, and what follows a dot is a part of its value."""
    name = flag.split("=", 1)[0].split(".", 1)[0].replace("_", "-").removeprefix("no-")
    return next((each for each in owned if each.startswith(name)), None) if name else None


def _check_flags(flags: dict[str, Any]) -> dict[str, Any]:
    own = own_flags() | {"config": "its values in the recipe"}
    names: set[str] = set()
    for flag, value in flags.items():
        if flag.startswith("-"):
            raise ValueError(f"{flag} begins with a dash; write {flag.lstrip('-')}")
        if not re.fullmatch(FLAG, flag):
            raise ValueError(f"{flag!r} is no flag of vLLM, expected small letters, digits and dashes")
        if (owned := owned_by(flag, own)) is not None:
            same = "" if owned == flag.replace("_", "-") else f" (as {owned})"
            raise ValueError(f"{flag}{same} is written by the dispatcher; set {own[owned]} instead")
        if flag.startswith(("no-", "no_")):
            raise ValueError(f"{flag} is a flag turned off; write {flag[3:]}: false")
        if (dashed := flag.replace("_", "-")) in names:
            raise ValueError(f"{flag} is given with dashes and with underscores; remove one")
        names.add(dashed)
        if value is None:
            raise ValueError(f"{flag} has no value; give one (true for a bare flag), or remove it")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{flag} cannot be passed on ({error}); use texts, numbers, lists and maps") from None
    return flags


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        if name not in TREE_BY_NAME:
            raise ValueError(f"unknown key {name}{nearest(name, TREE_BY_NAME)}")
        try:
            TREE_BY_NAME[name].parse(value, name)
        except Refusal as refusal:
            raise ValueError(str(refusal)) from None
    return options


def _check_env(env: dict[str, str]) -> dict[str, str]:
    """A recipe's variables are the server's: those that the dispatcher reads would come too late."""
    ours = {setting.variable: setting.name for setting in BY_NAME.values()}
    for name, value in env.items():
        if not re.fullmatch(VARIABLE, name) or "\0" in value:
            raise ValueError(f"{name!r} is no variable that can be set; expected a name, and a value without NUL")
        if name in ours:
            raise ValueError(f"{name} is read before the recipe; set {ours[name]} in the recipe instead")
        if name.startswith(PREFIX) and (name not in OTHER_VARIABLES or name in RETIRED):
            raise ValueError(f"unknown variable {name}{nearest(name, OTHER_VARIABLES)}; remove it")
    try:
        check_choices(env, "env")
    except Refusal as refusal:
        raise ValueError(str(refusal)) from None
    return env


VllmFlags = Annotated[dict[str, Any], AfterValidator(_check_flags)]
TreeOptions = Annotated[dict[str, Any], AfterValidator(_check_options)]
Environment = Annotated[dict[str, str], AfterValidator(_check_env)]


class Strict(BaseModel):
    # strict: `port: true` is not port 1.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)


class Defaults(Strict):
    """Values of the server and its watcher; settings.SERVER and settings.WATCH say what each is."""

    served_model_name: str | None = Field(default=None, min_length=1)
    host: str | None = None
    port: int | None = Field(default=None, ge=0, le=65535)
    device: Literal["auto", "cpu", "cuda"] | None = None
    dtype: str | None = None
    max_model_len: int | None = Field(default=None, ge=1)
    max_num_seqs: int | None = Field(default=None, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    tensor_parallel: int | None = Field(default=None, ge=1)
    prefix_caching: bool | None = None
    horizon: int | None = Field(default=None, ge=1)
    ready_timeout: float | None = Field(default=None, ge=0)
    stall_after: float | None = Field(default=None, ge=0)
    exit_on_stall: bool | None = None
    watch: bool | None = None


class Mode(Strict):
    """What one mode does differently.

    profile: the one it takes when none is asked for. promoted_by: the parity report that lets `ddtree` commit branches.
    """

    method: Literal["dflash", "dflash_ddtree"] = "dflash"
    profile: str | None = None
    defaults: Defaults = Defaults()
    ddtree: TreeOptions = {}
    vllm: VllmFlags = {}
    promoted_by: str | None = None


class Modes(Strict):
    """The modes in which a recipe can be served; a mode that is left out is not offered."""

    baseline: Mode | None = None
    dflash: Mode | None = None
    ddtree: Mode | None = None
    unsafe_full_branch: Mode | None = Field(default=None, alias="unsafe-full-branch")


class Sources(Strict):
    """Where the models come from when folders are mounted: Hugging Face ids (org/name[@revision]) to download."""

    model: str | None = None
    drafter: str | None = None


class Recipe(Strict):
    """A target, a drafter, and how to serve them.

    model, drafter: a folder, a package: reference or a Hugging Face id. container: the image it was written for.
    env: variables of the server, where the user has not set them. vllm: further flags without dashes; maps and lists
    become JSON, true is a bare flag, false its --no- form. profiles: sets of defaults to choose from, stronger than a
    mode's. proving_ground: an architecture on which branches are committed without a promotion, to be checked.
    """

    recipe_version: Literal[1]
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    description: str
    model: str = Field(min_length=1)
    model_revision: str | None = None
    drafter: str | None = Field(default=None, min_length=1)
    drafter_revision: str | None = None
    sources: Sources = Sources()
    container: str | None = None
    env: Environment = {}
    defaults: Defaults = Defaults()
    profiles: dict[str, Defaults] = {}
    vllm: VllmFlags = {}
    modes: Modes
    proving_ground: str | None = None

    @model_validator(mode="after")
    def _offers_modes(self) -> "Recipe":
        if not self.mode_names():
            raise ValueError("modes names none, expected at least one; write `baseline: {}` for a mode without values")
        return self

    @model_validator(mode="after")
    def _profiles_exist(self) -> "Recipe":
        for name in self.mode_names():
            mode = self.mode(name)
            if mode is not None and mode.profile is not None and mode.profile not in self.profiles:
                known = ", ".join(self.profiles) or "none"
                raise ValueError(
                    f"modes.{name}.profile is {mode.profile}{nearest(mode.profile, self.profiles)}, "
                    f"expected one of profiles: {known}"
                )
        return self

    def mode(self, name: str) -> Mode | None:
        return getattr(self.modes, name.replace("-", "_"))

    def mode_names(self) -> list[str]:
        return [
            field.alias or name for name, field in Modes.model_fields.items() if getattr(self.modes, name) is not None
        ]


def _keys_at(location: tuple[Any, ...]) -> list[str]:
    """Keys the schema knows in the map that `location` (all but its last item) names."""
    model: Any = Recipe
    for step in location[:-1]:
        children = {"defaults": Defaults, "modes": Modes, "sources": Sources, "profiles": dict}
        if model is Modes:
            model = Mode
        elif model is dict:
            model = Defaults
        elif step in children and model in (Recipe, Mode):
            model = children[step]
    return [field.alias or name for name, field in model.model_fields.items()]


def _one_line(file: Path, error: ValidationError) -> str:
    first = error.errors()[0]
    location = tuple(first["loc"])
    place = ".".join(map(str, location))
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        key = str(location[-1])
        return f"{file}: unknown key {place}{nearest(key, _keys_at(location))}; correct or remove it{more}"
    if first["type"] == "missing":
        return f"{file}: {place} is missing; add it{more}"
    message, given = first["msg"].removeprefix("Value error, "), first["input"]
    cure = "" if ";" in message else "; correct it"
    if isinstance(given, str | int | float | bool):
        place = f"{place} is {given!r}"
    return f"{file}: {place}{': ' if place else ''}{message}{cure}{more}"


def _read(text: str) -> Any:
    """What YAML makes of it. Raises YAMLError, also for a key that is there twice (YAML would take the last)."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        root = loader.get_single_node()
        left, seen = [root], set()
        while left:
            node = left.pop()
            if id(node) in seen:
                continue  # an alias
            seen.add(id(node))
            if isinstance(node, yaml.MappingNode):
                keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
                twice = next((key for key in keys if keys.count(key) > 1), None)
                if twice is not None:
                    raise yaml.YAMLError(f"the key {twice[1]} is there twice, line {node.start_mark.line + 1} ff.")
                left += [value for _, value in node.value]
            elif isinstance(node, yaml.SequenceNode):
                left += node.value
        return None if root is None else loader.construct_document(root)
    finally:
        loader.dispose()


def load_recipe(file: Path) -> Recipe:
    """The recipe in `file`. Raises Refusal, one line, on anything that is not a valid recipe."""
    try:
        content = _read(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refusal(f"{file}: cannot be read ({error.strerror}); give a readable file") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise Refusal(f"{file}: not YAML: {' '.join(str(error).split())}; correct it") from None
    if not isinstance(content, dict):
        raise Refusal(
            f"{file}: holds {type(content).__name__}, expected a map of recipe keys; see recipes/proving-ground.yaml"
        )
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise Refusal(" ".join(_one_line(file, error).split())) from None
