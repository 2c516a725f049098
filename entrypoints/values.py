# SPDX-License-Identifier: Apache-2.0
"""A value and where it came from, and the layers in which it is looked for."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .settings import Setting

DEFAULT = "default"


@dataclass(frozen=True)
class Value:
    value: Any
    origin: str


Layer = Mapping[str, tuple[Any, str]]  # setting name -> (raw value, origin)


def layer(values: Mapping[str, Any], origin: str) -> Layer:
    return {name: (value, origin) for name, value in values.items() if value is not None}


class Layers:
    """Values by name, the strongest layer first; a setting's default stands behind all of them."""

    def __init__(self, layers: Iterable[Layer]):
        self.layers = list(layers)

    def find(self, setting: Setting) -> Value | None:
        """Raises Refusal when the strongest value there is cannot be one."""
        for values in self.layers:
            if setting.name in values:
                raw, origin = values[setting.name]
                return Value(setting.parse(raw, origin), origin)
        return None if setting.default is None else Value(setting.default, DEFAULT)
