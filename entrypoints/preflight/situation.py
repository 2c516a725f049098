# SPDX-License-Identifier: Apache-2.0
"""`Situation`: resolved values as the server will see them (arguments after `--` win), and the machine it starts on."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..values import Value
from .drafter import drafter_horizon, is_number
from .finding import Skipped
from .hub import cached_snapshot, is_offline
from .machine import Machine
from .models import read_json, text_config

if TYPE_CHECKING:
    from ..resolve import Resolved

GIB = 1 << 30
LARGE = 70 * GIB  # from this memory on vLLM's defaults for a batch are the larger ones
SHORT = {"-q": "quantization", "-tp": "tensor-parallel-size"}
DEFAULT = "vLLM's default"


@dataclasses.dataclass
class Situation:
    resolved: Resolved
    machine: Machine

    @cached_property
    def _after_dashes(self) -> dict[str, str | bool]:
        return dict(_flags(self.resolved.extra))

    def flag(self, name: str) -> Value | None:
        """The value of vLLM's flag `--name`, as arguments after `--` or the recipe's `vllm` give it."""
        if name in self._after_dashes:
            return Value(self._after_dashes[name], f"arguments after --: --{name}")
        value = self.resolved.flags.get("--" + name)
        return None if value is None or value.value is None else value

    def setting(self, name: str) -> Value | None:
        """A setting of the server by its own name; arguments after `--` replace it."""
        return self.flag(name.replace("_", "-")) or self.resolved.settings.get(name)

    def variable(self, name: str) -> str:
        """A variable as the server will have it, "" when it is not set."""
        value = self.resolved.env.get(name)
        return str(self.machine.environ.get(name, "") if value is None else value.value).strip()

    def number(self, name: str, otherwise: int | None = None) -> Value:
        """A whole number. Raises Skipped when nobody gives one that can be read."""
        value = self.setting(name)
        if value is None:
            if otherwise is None:
                raise Skipped(f"{name} is not known")
            return Value(otherwise, DEFAULT)
        try:
            return Value(int(value.value), value.origin)
        except (TypeError, ValueError):
            raise Skipped(f"{value.origin}: {name} is {value.value!r}") from None

    @property
    def device(self) -> str:
        return self.resolved.device

    @cached_property
    def target(self) -> Path | str:
        return self._at_hand(self.resolved.target, self.revision("model"))

    @cached_property
    def drafter(self) -> Path | str | None:
        drafter = self.resolved.drafter
        return None if drafter is None else self._at_hand(drafter, self.revision("drafter"))

    def revision(self, field: str) -> str | None:
        """The revision of "model" or "drafter" on the hub, None for its main branch."""
        value = self.resolved.settings.get(f"{field}_revision")
        return getattr(self.resolved.recipe, f"{field}_revision") if value is None else value.value

    def _at_hand(self, reference: Path | str, revision: str | None) -> Path | str:
        """Offline the server uses the cached snapshot: look at that. Online it may fetch what is missing."""
        if isinstance(reference, str) and is_offline(self.machine.environ):
            return cached_snapshot(reference, revision, self.machine) or reference
        return reference

    def folder(self, field: str) -> Path:
        """The folder of "model" or "drafter". Raises Skipped where there is none to look into yet."""
        place = self.target if field == "model" else self.drafter
        if place is None:
            raise Skipped("this mode has no drafter")
        if isinstance(place, str):
            raise Skipped(f"{place} is on the Hugging Face hub; `aeon-ddtree download` fetches it")
        if not os.path.isfile(place / "config.json"):
            raise Skipped(f"{place} has no config.json")
        return place

    def text_config(self) -> dict[str, Any]:
        return dict(text_config(read_json(self.folder("model") / "config.json")))

    @cached_property
    def width(self) -> int | None:
        """W: rows verified per request and step, the root included. None while the horizon is not known."""
        if self.resolved.is_tree:
            budget = self.resolved.options["budget"].value
            return budget + 1 if is_number(budget) else None
        if self.resolved.drafter is None:
            return 1
        horizon = self.horizon
        return None if horizon is None else horizon + 1

    @cached_property
    def horizon(self) -> int | None:
        if self.resolved.horizon is not None:
            return self.resolved.horizon.value
        return drafter_horizon(self.drafter)

    @cached_property
    def tensor_parallel(self) -> int:
        return max(1, self.number("tensor_parallel", 1).value)

    @cached_property
    def max_model_len(self) -> Value:
        """Raises Skipped when neither the settings nor the model say."""
        if self.setting("max_model_len") is not None:
            return self.number("max_model_len")
        longest = self.text_config().get("max_position_embeddings")
        if not isinstance(longest, int):
            raise Skipped("max_model_len is not given, and config.json has no max_position_embeddings")
        return Value(longest, "config.json: max_position_embeddings")

    @cached_property
    def _batch_defaults(self) -> tuple[int, int]:
        """(tokens, requests) of vLLM's server for this device."""
        if self.device == "cpu":
            return 2048 * self.tensor_parallel, 128 * self.tensor_parallel
        gpu, host = next(iter(self.machine.gpus), None), self.machine.memory
        total = gpu.total if gpu and not gpu.unified else host.total if gpu and host else None
        large = (total or 0) >= LARGE and "A100" not in (gpu.name if gpu else "")
        return (8192, 1024) if large else (2048, 256)

    @cached_property
    def max_num_batched_tokens(self) -> Value:
        if self.setting("max_num_batched_tokens") is not None:
            return self.number("max_num_batched_tokens")
        tokens, requests = self._batch_defaults
        try:
            tokens = min(tokens, self.number("max_num_seqs", requests).value * self.max_model_len.value)
        except Skipped:
            pass
        return Value(tokens, DEFAULT)

    @cached_property
    def max_num_seqs(self) -> Value:
        if self.setting("max_num_seqs") is not None:
            return self.number("max_num_seqs")
        return Value(min(self._batch_defaults[1], self.max_num_batched_tokens.value), DEFAULT)


def _flags(extra: list[str]) -> Iterator[tuple[str, str | bool]]:
    """`--name value`, `--name=value`, `--name` and `--no-name`, as vLLM's parser reads them."""
    for index, argument in enumerate(extra):
        if not argument.startswith("-"):
            continue
        name, equals, value = argument.partition("=")
        name = SHORT.get(name, name.removeprefix("--").replace("_", "-"))
        following = extra[index + 1] if index + 1 < len(extra) else "-"
        if equals:
            yield name, value
        elif name.startswith("no-") and following.startswith("-"):
            yield name.removeprefix("no-"), False
        else:
            yield name, True if following.startswith("--") or following == "-" else following
