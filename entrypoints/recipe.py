# SPDX-License-Identifier: Apache-2.0
"""Recipe schema, version 1: one YAML file per deployable setup. Unknown keys are refused with the nearest known one."""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from .failure import Refusal, nearest
from .settings import SERVER, TREE_BY_NAME

# Flags that the dispatcher writes itself, and what sets them instead: not allowed in a recipe's `vllm` or after `--`.
OWN_FLAGS = {
    "model": "model",
    "worker-cls": "device",
    "additional-config": "modes.MODE.ddtree, or --budget and its like",
    "speculative-config": "drafter, and horizon or budget",
    "enable-prefix-caching": "prefix_caching",
    "no-enable-prefix-caching": "prefix_caching",
}


def _check_flags(flags: dict[str, Any]) -> dict[str, Any]:
    own = OWN_FLAGS | {s.vllm_flag[2:]: f"defaults.{s.name}" for s in SERVER if s.vllm_flag and s.name != "model"}
    for flag in flags:
        if flag.startswith("-"):
            raise ValueError(f"{flag} begins with a dash; write {flag.lstrip('-')}")
        if (dashed := flag.replace("_", "-")) in own:
            raise ValueError(f"{flag} is written by the dispatcher; set {own[dashed]} instead")
    return flags


VllmFlags = Annotated[dict[str, Any], AfterValidator(_check_flags)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Defaults(Strict):
    """Values of the server; settings.SERVER says what each is."""

    served_model_name: str | None = None
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


class Mode(Strict):
    """What one mode does differently. `promoted_by`: the parity report that lets `ddtree` commit branches."""

    method: Literal["dflash", "dflash_ddtree"] = "dflash"
    defaults: Defaults = Defaults()
    ddtree: dict[str, Any] = {}
    vllm: VllmFlags = {}
    promoted_by: str | None = None

    @field_validator("ddtree")
    @classmethod
    def _known_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name in options:
            if name not in TREE_BY_NAME:
                raise ValueError(f"unknown key {name}{nearest(name, TREE_BY_NAME)}")
        return options


class Modes(Strict):
    baseline: Mode | None = None
    dflash: Mode | None = None
    ddtree: Mode | None = None
    unsafe_full_branch: Mode | None = Field(default=None, alias="unsafe-full-branch")


class Recipe(Strict):
    """A target, a drafter, and how to serve them.

    vllm: further flags without dashes; maps become JSON, true is a bare flag, false its --no- form.
    """

    recipe_version: Literal[1]
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    description: str
    model: str
    model_revision: str | None = None
    drafter: str | None = None
    drafter_revision: str | None = None
    container: str | None = None
    env: dict[str, str] = {}
    defaults: Defaults = Defaults()
    vllm: VllmFlags = {}
    modes: Modes

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
        children = {"defaults": Defaults, "modes": Modes}
        if model is Modes:
            model = Mode
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
    message = first["msg"].removeprefix("Value error, ")
    given = first["input"] if isinstance(first["input"], str | int | float | bool) else type(first["input"]).__name__
    return f"{file}: {place} is {given!r}: {message}; correct it{more}"


def load_recipe(file: Path) -> Recipe:
    """The recipe in `file`. Raises Refusal, one line, on anything that is not a valid recipe."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=loader)
    except OSError as error:
        raise Refusal(f"{file}: cannot be read ({error.strerror}); give a readable file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Refusal(f"{file}: not YAML: {' '.join(str(error).split())}; correct it") from None
    if not isinstance(content, dict):
        raise Refusal(
            f"{file}: holds {type(content).__name__}, expected a map of recipe keys; see recipes/proving-ground.yaml"
        )
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise Refusal(" ".join(_one_line(file, error).split())) from None
