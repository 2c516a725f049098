# SPDX-License-Identifier: Apache-2.0
"""`TreePolicy`: which tree to build. Checked once, at start, with messages that say what is possible."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from aeon_ddtree.tree.topologies import TOPOLOGIES

MAX_BUDGET = 127
"""Nodes per window: W = budget + 1 rows must stay within the 128 rows the kernels take."""

RANKINGS = ("greedy", "coupled", "mixed")


@dataclass(frozen=True)
class TreePolicy:
    """Which tree is built from the drafter's k position distributions.

    horizon      k, positions the drafter predicts: its block size - 1. Never derived from the budget.
    budget       B, nodes verified per step, the root not counted (1 .. 127).
    top_k        candidates per position (>= 1).
    spine        how many rank-0 nodes are placed first, 0 .. min(horizon, budget); None = as many as fit ("full").
    topology     name in `topologies.TOPOLOGIES`: "best_first" or "root_leaves".
    root_leaves  leaves under the root, for topology "root_leaves" only: spine = budget - root_leaves.
    ranking      "greedy", "coupled" (by perturbed score, T > 0) or "mixed" of both.
    tau          sharpening of coupled scores as a share of the temperature, in (0, 1].
    mix          weight of the coupled ranking in "mixed", in [0, 1].
    softness     temperature of the coupled log-probabilities, > 0.
    """

    horizon: int
    budget: int
    top_k: int = 8
    spine: int | None = None
    topology: str = "best_first"
    root_leaves: int = 0
    ranking: str = "greedy"
    tau: float = 0.5
    mix: float = 0.5
    softness: float = 1.0

    def __post_init__(self) -> None:
        for name in ("horizon", "budget", "top_k", "root_leaves"):
            _require_int(name, getattr(self, name))
        if self.spine is not None:
            _require_int("spine", self.spine)
        for name in ("tau", "mix", "softness"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"{name}={value!r}: expected a number")
        if self.horizon < 1:
            raise ValueError(f"horizon={self.horizon}: expected >= 1, the drafter's block size minus 1")
        if not 1 <= self.budget <= MAX_BUDGET:
            raise ValueError(f"budget={self.budget}: expected 1 .. {MAX_BUDGET} nodes (the root is not counted)")
        if self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: expected >= 1 candidates per position")
        if self.ranking not in RANKINGS:
            raise ValueError(
                f"ranking={self.ranking!r}: expected one of {', '.join(RANKINGS)}{_near(self.ranking, RANKINGS)}"
            )
        if not 0 < self.tau <= 1:
            raise ValueError(f"tau={self.tau}: expected a share of the temperature in (0, 1]")
        if not 0 <= self.mix <= 1:
            raise ValueError(f"mix={self.mix}: expected a weight in [0, 1]")
        if not self.softness > 0:
            raise ValueError(f"softness={self.softness}: expected > 0")
        self._check_topology()

    def _check_topology(self) -> None:
        if self.topology not in TOPOLOGIES:
            names = tuple(sorted(TOPOLOGIES))
            raise ValueError(
                f"topology={self.topology!r}: expected one of {', '.join(names)}{_near(self.topology, names)}"
            )
        most = min(self.horizon, self.budget)  # nodes of the longest chain
        if self.spine is not None and not 0 <= self.spine <= most:
            raise ValueError(
                f"spine={self.spine}: expected 0 .. {most} "
                f"(the smaller of horizon {self.horizon} and budget {self.budget})"
            )
        if self.topology == "root_leaves":
            self._check_root_leaves()
        elif self.root_leaves:
            raise ValueError(f"root_leaves={self.root_leaves} needs topology=root_leaves, got topology={self.topology}")
        elif self.top_k == 1 and self.budget > self.horizon:
            raise ValueError(
                f"budget={self.budget} with top_k=1: one candidate per position makes a chain of at most "
                f"{self.horizon} nodes; raise top_k or set budget <= {self.horizon}"
            )

    def _check_root_leaves(self) -> None:
        if self.spine is not None and self.spine != self.budget - self.root_leaves:
            raise ValueError(
                f"spine={self.spine}: topology root_leaves has a spine of budget - root_leaves = "
                f"{self.budget - self.root_leaves}; leave spine out"
            )
        if not 1 <= self.root_leaves < self.budget:
            raise ValueError(f"root_leaves={self.root_leaves}: expected 1 .. budget - 1 = {self.budget - 1}")
        if self.budget - self.root_leaves > self.horizon:
            raise ValueError(
                f"budget={self.budget} with root_leaves={self.root_leaves} asks for a spine of "
                f"{self.budget - self.root_leaves} nodes, but the horizon is {self.horizon}: set budget <= "
                f"{self.horizon + self.root_leaves} or use topology=best_first"
            )
        if self.top_k < self.root_leaves + 1:
            raise ValueError(
                f"root_leaves={self.root_leaves} with top_k={self.top_k}: the leaves are ranks 1 .. {self.root_leaves} "
                f"of the first position; set top_k >= {self.root_leaves + 1}"
            )

    @property
    def width(self) -> int:
        """W = budget + 1 rows."""
        return self.budget + 1

    @property
    def max_path(self) -> int:
        """P = horizon + 1: the longest path, root included."""
        return self.horizon + 1

    @property
    def spine_nodes(self) -> int:
        """Rank-0 nodes placed first."""
        if self.topology == "root_leaves":
            return self.budget - self.root_leaves
        return min(self.horizon, self.budget) if self.spine is None else self.spine

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """The keys `from_options` takes; the horizon is not one of them, it belongs to the drafter."""
        return tuple(field.name for field in fields(cls) if field.name != "horizon")

    @classmethod
    def from_options(cls, options: Mapping[str, Any], *, horizon: int) -> TreePolicy:
        """Policy from a mapping of option names; `spine` may also be "full" or "none".

        ValueError names an unknown key (with the nearest known one) or an impossible value and its cure.
        """
        names = cls.option_names()
        for key in options:
            if key not in names:
                raise ValueError(f"unknown tree option {key!r}{_near(str(key), names)}; known: {', '.join(names)}")
        values = dict(options)
        if isinstance(values.get("spine"), str):
            words: dict[str, int | None] = {"full": None, "none": 0}
            if values["spine"] not in words:
                raise ValueError(f"spine={values['spine']!r}: expected a number of nodes, 'full' or 'none'")
            values["spine"] = words[values["spine"]]
        if "budget" not in values:
            raise ValueError("budget is missing: the number of tree nodes verified per step, 1 .. 127")
        return cls(horizon=horizon, **values)


def _require_int(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r}: expected a whole number")


def _near(word: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
