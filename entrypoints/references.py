# SPDX-License-Identifier: Apache-2.0
"""Where recipes, reports and models lie: by name, by path, inside an installed package, or on the Hugging Face hub."""

import importlib.util
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from .failure import Failure, Refusal, nearest

if TYPE_CHECKING:
    from .values import Value

PACKAGE = "package:"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HERE = Path(__file__).resolve().parent


def data_folder(installed: str, in_source: str) -> Path:
    """A data folder: beside this file when installed from a wheel, at the root of the repository when run from it."""
    beside = HERE / installed
    return beside if beside.is_dir() else HERE.parent / in_source


def recipes_folder() -> Path:
    return data_folder("recipes", "recipes")


def recipe_names() -> list[str]:
    return sorted(path.stem for path in recipes_folder().glob("*.yaml"))


def find_recipe(name_or_path: str) -> Path:
    """The file of a recipe. Raises Refusal when there is none."""
    names = recipe_names()
    if name_or_path in names:
        return recipes_folder() / f"{name_or_path}.yaml"
    path = Path(name_or_path).expanduser()
    if os.path.isfile(path):  # false, where pathlib raises, behind a folder that this user may not enter
        return path
    if os.path.isdir(path):
        inside = sorted(file.name for file in path.glob("*.y*ml"))
        found = f"; it holds {', '.join(inside[:5])}" if inside else ""
        raise Refusal(f"recipe {name_or_path}: is a folder, expected a YAML file{found}; give the file itself")
    if path.suffix in (".yaml", ".yml") or "/" in name_or_path:
        got = f"recipe {name_or_path}: no such file that user {os.getuid()} can reach"
        raise Refusal(f"{got}; give a file that exists, or one of: {', '.join(names)}")
    raise Refusal(
        f"unknown recipe {name_or_path}{nearest(name_or_path, names)}; give a YAML file or one of: {', '.join(names)}"
    )


def is_shipped(recipe_file: Path) -> bool:
    return recipe_file.resolve().parent == recipes_folder().resolve()


def find_report(reference: str, recipe_file: Path) -> Path | None:
    """The report that `promoted_by` names: this project's for a shipped recipe, else beside the recipe's file."""
    if is_shipped(recipe_file):
        candidate = data_folder("results", "bench/results") / Path(reference).name
    else:
        candidate = recipe_file.resolve().parent / reference
    return candidate if os.path.isfile(candidate) else None


def locate_model(reference: str, field: str) -> Path | str:
    """A model's folder as a Path, or its Hugging Face id as text; `field` says where it was given. Raises Refusal."""
    if reference.startswith(PACKAGE):
        package, _, inside = reference.removeprefix(PACKAGE).partition("/")
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            cure = "install that package or give a folder"
            raise Refusal(str(Failure(field, "", reference, "package:NAME/FOLDER of an installed package", cure)))
        return Path(next(iter(spec.submodule_search_locations))) / inside
    path = Path(reference).expanduser()
    if not os.path.exists(path) and HUB_ID.fullmatch(reference):
        return reference
    return path.absolute()


def split_revision(reference: str) -> tuple[str, str | None]:
    """`org/name@revision` -> (org/name, revision); anything else stays whole, with None."""
    name, at, revision = reference.partition("@")
    if at and revision and HUB_ID.fullmatch(name) and not os.path.exists(Path(reference).expanduser()):
        return name, revision
    return reference, None


def drafter_horizon(drafter: Path | str, revision: "Value | None" = None) -> int | None:
    """Positions the drafter predicts, by its folder or its snapshot in the hub's cache; None while neither is here."""
    from . import preflight

    if isinstance(drafter, str):
        snapshot = preflight.cached_snapshot(drafter, None if revision is None else revision.value)
        return preflight.drafter_horizon(snapshot)
    return preflight.drafter_horizon(drafter)
