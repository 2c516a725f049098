# SPDX-License-Identifier: Apache-2.0
"""What `show --resolved` prints: each value of a start, and where it came from."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from . import command, variables
from .resolve import Resolved
from .values import Value


def groups_of(resolved: Resolved, environ: Mapping[str, str]) -> dict[str, dict[str, Value]]:
    """group -> name -> value. vllm: flags beyond the settings; last: arguments that come after all flags."""
    groups = {
        "settings": resolved.settings,
        "ddtree": resolved.options,
        "vllm": resolved.flags,
        "env": command.build_env(resolved, environ),
    }
    if resolved.profile is not None:
        groups = {"recipe": {"profile": resolved.profile}} | groups
    words, origin = variables.extra_arguments(environ)
    if words:
        groups["last"] = {"arguments": Value(words, origin)}
    return groups


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


def rows_of(groups: Mapping[str, Mapping[str, Value]]) -> Iterator[str]:
    """Aligned lines: name, value, origin."""
    rows = [
        (f"{group}.{name}", " ".join(_text(each.value).split()), each.origin)
        for group, values in groups.items()
        for name, each in values.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, origin in rows:
        yield f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}"
