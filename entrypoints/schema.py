# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema of recipes, for editors and other tools: `python -m aeon_entrypoints.schema FILE`, or to stdout."""

import json
import sys
from pathlib import Path
from typing import Any

from .recipe import FLAG, VARIABLE, Recipe, own_flags
from .settings import SERVER_BY_NAME, TREE, Setting
from .variables import CHOICES, OTHER_VARIABLES

DIALECT = "https://json-schema.org/draft/2020-12/schema"
WORDS = {
    "topology": ["best_first", "root_leaves"],
    "commit": ["flat", "branch"],
    "ranking": ["greedy", "coupled", "mixed"],
}
WHOLE = {"budget", "top_k", "spine", "root_leaves"}


def _tree_option(setting: Setting) -> dict[str, Any]:
    entry: dict[str, Any] = {"description": f"{setting.help} Expected: {setting.what}."}
    if setting.name in WORDS:
        return entry | {"enum": WORDS[setting.name]}
    bounds = {"minimum": setting.low, "maximum": setting.high, "exclusiveMinimum": setting.above}
    number: dict[str, Any] = {"type": "integer" if setting.name in WHOLE else "number"}
    number.update({name: bound for name, bound in bounds.items() if bound is not None})
    if setting.name == "spine":
        return entry | {"anyOf": [{"enum": ["auto", "full", "none"]}, number]}
    return entry | number


def schema() -> dict[str, Any]:
    """What pydantic says of the models, and what their validators add to it."""
    made = Recipe.model_json_schema(by_alias=True)
    refused = sorted([*own_flags(), "config"])
    flags = {
        "type": "object",
        "additionalProperties": {"not": {"type": "null"}},
        "description": "vLLM's flags, no dashes: maps and lists become JSON, true a bare flag, false its --no- form.",
        "propertyNames": {
            "pattern": f"^{FLAG}$",
            "not": {"pattern": f"^(no[-_].*|({'|'.join(flag.replace('-', '[-_]') for flag in refused)})([.].*)?)$"},
        },
    }
    options = {
        "type": "object",
        "description": "Options of the tree.",
        "properties": {setting.name: _tree_option(setting) for setting in TREE},
        "additionalProperties": False,
    }
    made["properties"]["vllm"] = flags
    made["$defs"]["Modes"]["minProperties"] = 1
    made["properties"]["env"]["propertyNames"] = {
        "pattern": f"^{VARIABLE}$",
        "anyOf": [{"not": {"pattern": "^DDTREE_"}}, {"enum": sorted(OTHER_VARIABLES)}],
    }
    made["properties"]["env"]["properties"] = {name: {"enum": ["", *choices]} for name, choices in CHOICES.items()}
    for name, entry in made["$defs"]["Defaults"]["properties"].items():
        entry["description"] = f"{SERVER_BY_NAME[name].help} Expected: {SERVER_BY_NAME[name].what}."
    mode = made["$defs"]["Mode"]["properties"]
    mode["vllm"], mode["ddtree"] = flags, options
    return {"$schema": DIALECT} | made | {"title": "aeon-ddtree recipe, version 1"}


def text() -> str:
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text(), encoding="utf-8")
    else:
        sys.stdout.write(text())
