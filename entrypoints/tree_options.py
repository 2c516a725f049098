# SPDX-License-Identifier: Apache-2.0
"""The tree of a start: its commit policy and why, what is taken where nobody says otherwise, whether it can be."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import references
from .failure import Failure, Refusal
from .recipe import Mode, Recipe
from .settings import TREE_BY_NAME
from .values import DEFAULT, Value

USUAL_HORIZON = 15
LEAVES, SHORTEST_SPINE = 4, 11  # of the conservative shape: 15 nodes, of which 4 are leaves under the root
FLAT_BUDGET, BRANCH_BUDGET, TOP_K = 15, 31, 8


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


def _architecture(target: Path | str, recipe: Recipe) -> str | None:
    """What the target's configuration says it is; for a hub id that is not here, what the recipe says of its own."""
    if isinstance(target, str):
        return recipe.proving_ground if target == references.split_revision(recipe.model)[0] else None
    try:
        names = json.loads((target / "config.json").read_text(encoding="utf-8"))["architectures"]
        return names[0] if isinstance(names, list) and names else None
    except (OSError, ValueError, KeyError, TypeError):
        return recipe.proving_ground if str(target) == recipe.model else None


def promotion(
    settings: Mapping[str, Value], target: Path | str, recipe: Recipe, recipe_file: Path, mode: Mode
) -> tuple[bool, str]:
    """Whether `ddtree` may commit branches for this pair, and why (or why not)."""
    if recipe.proving_ground is not None and references.is_shipped(recipe_file):
        found = _architecture(target, recipe)
        if found != recipe.proving_ground:
            return False, f"{recipe.name} proves trees on {recipe.proving_ground}, and this target is {found}"
        return True, f"{recipe.name} is a proving ground: branches are committed to be checked"
    if mode.promoted_by is None:
        return False, "no parity report promotes this pair"
    if any(settings[name].value != getattr(recipe, name) for name in ("model", "drafter")):
        return False, "the report promotes the recipe's own pair, and another is given"
    report = references.find_report(mode.promoted_by, recipe_file)
    if report is None:
        return False, f"its report {mode.promoted_by} is not there"
    objection = _report_verdict(report, recipe)
    return objection is None, objection or f"promoted by {mode.promoted_by}"


def commit_policy(chosen: Value | None, mode_name: str, promoted: bool, why: str) -> tuple[Value, str]:
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


def fill_in(found: dict[str, Value], policy: Value, horizon: int | None) -> dict[str, Value]:
    """What a tree gets where nobody says otherwise: the conservative shape for flat, a wider one for branch.

    The conservative shape (a spine and 4 leaves under the root) is taken where it fits what is given: its spine must
    be within the horizon and not be short, since flat commits along the spine alone.
    """

    def given(name: str) -> Any:
        return found[name].value if name in found else None

    longest = horizon or USUAL_HORIZON
    top_k = TOP_K if given("top_k") is None else given("top_k")
    usual: dict[str, Any] = {"top_k": TOP_K}
    if policy.value == "flat":
        leaves = min(LEAVES, top_k - 1) if given("root_leaves") is None else given("root_leaves")
        chain_only = given("topology") == "best_first" or leaves < 1 or given("spine") not in (None, "auto", "full")
        most = min(FLAT_BUDGET, longest + (0 if chain_only else leaves))
        budget = most if given("budget") is None else given("budget")
        fits = min(SHORTEST_SPINE, longest) <= budget - leaves <= longest
        if not chain_only and (fits or given("topology") == "root_leaves" or given("root_leaves") is not None):
            usual |= {"topology": "root_leaves", "root_leaves": leaves}
        usual["budget"] = most
    else:
        usual["budget"] = min(BRANCH_BUDGET, longest) if top_k == 1 else BRANCH_BUDGET
    why = DEFAULT if horizon is None or horizon == USUAL_HORIZON else f"{DEFAULT}, for a horizon of {horizon}"
    filled = {name: Value(value, why if name == "budget" else DEFAULT) for name, value in usual.items()}
    return filled | found | {"commit": policy}


def judge(options: dict[str, Any], found: Mapping[str, Value], horizon: int | None, place: str) -> None:
    """The engine's own judgement, before anything loads. Raises Refusal that says where the value at fault came from.

    options: the object for --additional-config; horizon: None while the drafter is not at hand.
    """
    from aeon_ddtree.engine.options import DDTreeOptions, OptionsError

    spine, budget = options.get("spine"), options.get("budget")
    if horizon is not None and isinstance(spine, int) and isinstance(budget, int) and spine > min(horizon, budget):
        most = f"auto, full, none or 0 to {min(horizon, budget)} (horizon {horizon}, budget {budget})"
        raise Refusal(str(Failure(found["spine"].origin, "spine", spine, most, "give another value, or leave it out")))
    try:
        parsed = DDTreeOptions.from_mapping(dict(options))
        if horizon is not None and parsed.mode != "plain":
            parsed.policy(horizon)
    except OptionsError as error:
        message = " ".join(str(error).split()).removeprefix("--additional-config ddtree: ")
        # The engine names the fields as name=value; the first that somebody gave is the one to correct.
        named = [name for name in re.findall(r"(\w+)=", message) if name in found]
        blamed = next((name for name in named if not found[name].origin.startswith(DEFAULT)), None)
        if blamed is None:
            raise Refusal(f"{place}: {message}") from None
        cure = "" if ";" in message else f"; give another value, or leave {TREE_BY_NAME[blamed].flag} out"
        raise Refusal(f"{found[blamed].origin}: {message}{cure}") from None
