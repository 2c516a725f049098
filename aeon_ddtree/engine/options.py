# SPDX-License-Identifier: Apache-2.0
"""`DDTreeOptions`: what travels in `--additional-config '{"ddtree": {...}}'`, checked once. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from aeon_ddtree.tree.policy import TreePolicy

MODES = ("plain", "chain", "tree")
COMMITS = ("flat", "branch")

KEY = "ddtree"
"""Name of our object inside vLLM's `additional_config`."""


class OptionsError(ValueError):
    """A DDTree option that is unknown or impossible; the message is one line and names the flag that cures it."""


@dataclass(frozen=True)
class DDTreeOptions:
    """DDTree's options. Every field but `mode` and `commit` is a field of `TreePolicy`, where it is explained.

    mode    "plain" (no drafter), "chain" (the drafter's rank-0 path) or "tree"
    commit  "flat" (only spine prefixes are committed) or "branch" (any accepted path)
    spine   as in the policy, or "auto": full under `flat`, which emits along the spine alone and so never falls behind
            the chain; a third of the horizon under `branch`, where the nodes saved pay more elsewhere

    The defaults of spine, ranking and tau are the best of the sweeps in the parity reports (bench/results/).
    """

    mode: str = "tree"
    commit: str = "flat"
    budget: int = 15
    top_k: int = 8
    spine: int | str = "auto"
    topology: str = "best_first"
    root_leaves: int = 0
    ranking: str = "coupled"
    tau: float = 0.7
    mix: float = 0.5
    softness: float = 1.0

    def __post_init__(self) -> None:
        for name, allowed in (("mode", MODES), ("commit", COMMITS)):
            value = getattr(self, name)
            if value not in allowed:
                raise OptionsError(_flag(f"{name}={value!r}: expected one of {', '.join(allowed)}"))
        if self.mode == "tree":
            # The horizon is the drafter's; one that admits every budget and spine checks all that does not need it.
            self._policy(horizon=max(15, self.budget if isinstance(self.budget, int) else 15))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> DDTreeOptions:
        """Options from a mapping; OptionsError for an unknown key (nearest known named) or an impossible value."""
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise OptionsError(_flag(f"unknown option {key!r}{hint}; known: {', '.join(known)}"))
        return cls(**values)

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)

    def policy(self, horizon: int) -> TreePolicy:
        """The tree policy for a drafter of this horizon. A chain is the tree with one candidate per position."""
        if self.mode == "chain":
            return self._policy(horizon, budget=horizon, top_k=1, spine="full", topology="best_first", root_leaves=0)
        return self._policy(horizon)

    def num_speculative_tokens(self, horizon: int) -> int:
        """What vLLM's num_speculative_tokens must be: rows verified without the root (0 for plain)."""
        return {"plain": 0, "chain": horizon, "tree": self.budget}[self.mode]

    def _policy(self, horizon: int, **changes: Any) -> TreePolicy:
        options = {name: getattr(self, name) for name in TreePolicy.option_names()} | changes
        if options["spine"] == "auto":
            pays = self.commit == "branch" and options["topology"] == "best_first" and isinstance(self.budget, int)
            options["spine"] = min(horizon // 3, options["budget"]) if pays else "full"
        try:
            return TreePolicy.from_options(options, horizon=horizon)
        except ValueError as error:
            raise OptionsError(_flag(str(error))) from None


def _flag(message: str) -> str:
    return f"--additional-config ddtree: {message}"
