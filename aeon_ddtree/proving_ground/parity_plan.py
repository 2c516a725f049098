# SPDX-License-Identifier: Apache-2.0
"""What a parity run decodes: prompts, seeds, arrivals, and the cases of every engine. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SWEEP_BUDGET = 31
"""Budget at which options are swept, where it is among the budgets of the run."""

TREE_OPTIONS = ("top_k", "spine", "topology", "root_leaves", "ranking", "tau", "mix", "softness")
CHAIN_OPTIONS = ("ranking", "tau", "mix", "softness")
ALONE = 10**9
"""Steps between arrivals that are to run one at a time: the decoder adds the next one when it has nothing to do."""


class ParityError(ValueError):
    """An argument that cannot be used; the message is one line and ends with the cure."""


@dataclass(frozen=True)
class Prompt:
    """tied: why plain decoding of it is a toss-up, where it is; such prompts are left out of a run, by name."""

    id: str
    category: str
    text: str
    tied: str = ""


@dataclass(frozen=True)
class Settings:
    """The arguments of a run. options: the tree's defaults (fields of DDTreeOptions), as the recipe has them."""

    prompts: int
    single_prompts: int
    max_tokens: int
    budgets: tuple[int, ...]
    commits: tuple[str, ...]
    temperatures: tuple[float, ...]
    batches: tuple[int, ...]
    horizon: int
    options: Mapping[str, Any]
    sweep: bool = False
    seed: int = 0

    @property
    def max_num_seqs(self) -> int:
        return max(self.batches)


@dataclass(frozen=True)
class EngineKey:
    """One engine: its mode and budget size its buffers, everything else is switched while it runs."""

    mode: str
    budget: int = 0

    def __str__(self) -> str:
        return f"tree B={self.budget}" if self.mode == "tree" else self.mode


@dataclass(frozen=True)
class Case:
    """All prompts of a kind decoded once. options: what the engine is configured with; kind: main, single or sweep."""

    engine: EngineKey
    temperature: float
    batch: int
    kind: str = "main"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> tuple[str, float]:
        """Cases with the same reference decode the same prompts under the same conditions."""
        return self.kind, self.temperature

    def __str__(self) -> str:
        words = [str(self.engine)]
        if self.engine.mode == "tree":
            words.append(str(self.options["commit"]))
            if self.options.get("topology") != "best_first":
                words.append(f"{self.options['topology']} {self.options['root_leaves']}")
        if self.engine.mode == "chain" or self.kind == "sweep":
            shown = {"chain": CHAIN_OPTIONS, "tree": ("spine", "top_k", *CHAIN_OPTIONS)}.get(self.engine.mode, ())
            used = [name for name in shown if _matters(name, self.options, self.temperature)]
            words += [f"{name}={self.options[name]}" for name in used]
        return f"{' '.join(words)}, T={self.temperature:g}, batch {self.batch}"


def _matters(name: str, options: Mapping[str, Any], temperature: float) -> bool:
    """Whether an option changes anything: rankings differ at T > 0 only, sharpening where noise is looked at."""
    if name in ("spine", "top_k"):
        return True
    if name == "mix":
        return temperature > 0 and options["ranking"] == "mixed"
    return temperature > 0 and (name == "ranking" or options["ranking"] != "greedy")


def load_prompts(path: Path) -> list[Prompt]:
    """The prompts of a JSON-lines file with "id", "category" and "prompt". ParityError where it holds anything else."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ParityError(f"{path}: cannot be read ({error.strerror}); give another with --prompts-file") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            prompts.append(Prompt(str(row["id"]), str(row["category"]), str(row["prompt"]), str(row.get("tied", ""))))
        except (ValueError, KeyError, TypeError):
            raise ParityError(
                f'{path}, line {number}: expected {{"id", "category", "prompt"}} as JSON; correct the line'
            ) from None
    if len({prompt.id for prompt in prompts}) != len(prompts):
        raise ParityError(f"{path}: an id occurs twice; give every prompt its own")
    return prompts


def in_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts with their categories taking turns, so that any prefix is balanced."""
    categories: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        categories.setdefault(prompt.category, []).append(prompt)
    longest = max(map(len, categories.values()), default=0)
    return [group[n] for n in range(longest) for group in categories.values() if n < len(group)]


def select(prompts: Sequence[Prompt], settings: Settings) -> dict[str, list[Prompt]]:
    """Prompts by kind of case: main at the larger batch, single one at a time, sweep for choosing options.

    The sweep takes prompts that the main cases do not touch, so that defaults are not chosen on what they are measured
    with; only where fewer than 24 are left it takes the main ones.
    """
    ordered = in_turns([prompt for prompt in prompts if not prompt.tied])
    for flag, count in (("--prompts", settings.prompts), ("--single-prompts", settings.single_prompts)):
        if not 1 <= count <= len(ordered):
            raise ParityError(f"{flag} {count}: expected 1 to {len(ordered)}, the prompts there are; give fewer")
    main, rest = ordered[: settings.prompts], ordered[settings.prompts :]
    return {
        "main": main,
        "single": ordered[: settings.single_prompts],
        "sweep": rest[:48] if len(rest) >= 24 else main[:48],
    }


def seed_of(prompt: Prompt, settings: Settings) -> int:
    """The noise key of a prompt, the same in every mode."""
    digest = hashlib.blake2b(f"{settings.seed}/{prompt.id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def arrivals(count: int, batch: int, seed: int) -> list[int]:
    """The engine step before which each request is added.

    Requests come 0 to 2 steps apart: the batch is soon full and stays so, and later ones join whenever one ends, beside
    others in the middle of theirs.
    """
    if batch == 1:
        return [index * ALONE for index in range(count)]
    rng = random.Random(f"arrivals/{seed}")
    steps = [0]
    for _ in range(count - 1):
        steps.append(steps[-1] + rng.randint(0, 2))
    return steps


def cases_of(settings: Settings) -> dict[EngineKey, list[Case]]:
    """The cases of every engine; plain first, then the engines that take longest."""
    swept = sweep_budget(settings) if settings.sweep else None
    budgets = sorted(settings.budgets, key=lambda budget: (budget != swept, -budget))
    tree_keys = [EngineKey("tree", budget) for budget in budgets]
    found: dict[EngineKey, list[Case]] = {key: [] for key in (EngineKey("plain"), *tree_keys, EngineKey("chain"))}
    for batch in settings.batches:
        kind = "single" if batch == 1 else "main"
        for temperature in settings.temperatures:
            for key in found:
                for options in _options_of(key, settings, temperature):
                    found[key].append(Case(key, temperature, batch, kind, options))
    if settings.sweep:
        for case in _sweep(settings):
            found[case.engine].append(case)
    return found


def _options_of(key: EngineKey, settings: Settings, temperature: float) -> Iterator[dict[str, Any]]:
    if key.mode == "plain":
        yield {}
    elif key.mode == "chain":
        default = {name: settings.options[name] for name in CHAIN_OPTIONS}
        yield default | {"ranking": "greedy"}
        if temperature > 0:
            # Where greedy is the default, coupled is decoded all the same: it is offered, so it must be right.
            yield default | ({"ranking": "coupled"} if default["ranking"] == "greedy" else {})
    else:
        for commit in settings.commits:
            yield tree_options(key.budget, settings) | {"commit": commit}
        # What ddtree runs with until a pair is promoted: a spine and a few leaves under the root.
        if key.budget == 15 and "flat" in settings.commits and 4 < settings.horizon + 4 >= key.budget:
            leaves = {"commit": "flat", "topology": "root_leaves", "root_leaves": 4, "spine": "full"}
            if settings.options["top_k"] > leaves["root_leaves"]:
                yield tree_options(key.budget, settings) | leaves


def tree_options(budget: int, settings: Settings, **changes: Any) -> dict[str, Any]:
    """The default options at a budget; a spine given as a number is cut to what fits."""
    options = {name: settings.options[name] for name in TREE_OPTIONS}
    options |= {"topology": "best_first", "root_leaves": 0} | changes
    if isinstance(options["spine"], int):
        options["spine"] = min(options["spine"], budget, settings.horizon)
    return options


def sweep_budget(settings: Settings) -> int:
    return min(settings.budgets, key=lambda budget: abs(budget - SWEEP_BUDGET))


def _sweep(settings: Settings) -> Iterator[Case]:
    """One option at a time around the middle of the others, `branch`, on the engine of one budget."""
    budget, batch = sweep_budget(settings), settings.max_num_seqs
    spines = ("full", 10, 5, "none")
    for temperature in settings.temperatures:
        yield Case(EngineKey("plain"), temperature, batch, "sweep", {})
        chains: list[dict[str, Any]] = [{"ranking": "greedy"}]
        trees: list[dict[str, Any]] = [{"ranking": "greedy", "spine": spine} for spine in spines]
        if temperature == 0:
            trees += [{"ranking": "greedy", "spine": "full", "top_k": top_k} for top_k in (4, 16)]
        else:
            for ranking in ("coupled", "mixed"):
                middle = {"ranking": ranking, "tau": 0.5, "mix": 0.5, "softness": 1.0, "spine": "full"}
                axes: dict[str, tuple[Any, ...]] = {"tau": (0.3, 0.7, 1.0), "softness": (0.5, 2.0), "spine": spines[1:]}
                if ranking == "mixed":
                    axes["mix"] = (0.25, 0.75)
                trees += [middle] + [middle | {name: value} for name, values in axes.items() for value in values]
            chains += [{"ranking": "coupled", "tau": tau} for tau in (0.3, 0.5, 0.7, 1.0)]
        for changes in chains:
            options = {name: settings.options[name] for name in CHAIN_OPTIONS} | changes
            yield Case(EngineKey("chain"), temperature, batch, "sweep", options)
        for changes in trees:
            options = tree_options(budget, settings, **changes) | {"commit": "branch"}
            yield Case(EngineKey("tree", budget), temperature, batch, "sweep", options)
