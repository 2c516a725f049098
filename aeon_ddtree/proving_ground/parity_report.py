# SPDX-License-Identifier: Apache-2.0
"""The report of a parity run: one JSON object, and a short table for people."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from aeon_ddtree.proving_ground.parity_judge import Decoded
from aeon_ddtree.proving_ground.parity_plan import Settings
from aeon_ddtree.proving_ground.parity_run import Run, tokens_per_step

SCHEMA = 1
INSIDE_EXPECTED = 2
"""Differences inside the rule that a whole run may have before somebody should look."""


def by_category(run: Run) -> dict[str, float | None]:
    """Tokens per step of every category."""
    groups: dict[str, list[Decoded]] = {}
    for prompt, decoded in zip(run.prompts, run.decoded):
        groups.setdefault(prompt.category, []).append(decoded)
    return {category: tokens_per_step(group) for category, group in sorted(groups.items())}


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def describe(run: Run) -> dict[str, Any]:
    """A run for the report. Counters are per request-step and leave out the step that ends each prompt."""
    case, counters = run.case, run.counters
    categories = by_category(run)
    tokens = sum(len(each.tokens) for each in run.decoded)
    result: dict[str, Any] = {
        "name": str(case),
        "kind": case.kind,
        "mode": case.engine.mode,
        "budget": case.engine.budget or None,
        "temperature": case.temperature,
        "batch": case.batch,
        "options": dict(case.options),
        "sequences": len(run.decoded),
        "tokens": tokens,
        "steps": sum(each.steps for each in run.decoded),
        "tokens_per_step": tokens_per_step(run.decoded),
        "tokens_per_step_mean_of_categories": mean(categories.values()),
        "tokens_per_step_by_category": categories,
        "tokens_sha256": digest(run.decoded),
        "seconds": round(run.seconds, 2),
        "compared": run.compared,
        "different": len(run.differences),
    }
    if case.engine.mode != "plain":
        steps, length = counters["steps"], counters["length"]
        result |= {
            "verified_steps": steps,
            "emitted": counters["emitted"],
            "nodes_per_step": counters["nodes"] / steps if steps else None,
            "accepted_length": length,
            "accepted_at_depth": [sum(length[depth:]) for depth in range(1, len(length))],
            "offered_at_depth": counters["offered"],
            "off_spine": counters["off_spine"],
            "after_off_spine": counters["after_off_spine"],
            "fallbacks": counters["fallbacks"],
        }
    return result


def digest(decoded: Sequence[Decoded]) -> str:
    """SHA-256 of all tokens in order, to compare reports of different machines."""
    return hashlib.sha256(json.dumps([each.tokens for each in decoded]).encode()).hexdigest()


def ratios(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Every tree case against the chains of the same prompts, temperature and batch, by tokens per step."""
    rows = []
    for run in runs:
        if run.case.engine.mode == "tree":
            chains = [
                each
                for each in runs
                if each.case.engine.mode == "chain" and (each.case.reference, each.case.batch) == _place(run)
            ]
            rows += [_ratio(run, chain) for chain in chains]
    return rows


def _place(run: Run) -> tuple[Any, int]:
    return run.case.reference, run.case.batch


def _ratio(run: Run, chain: Run) -> dict[str, Any]:
    ours, theirs = by_category(run), by_category(chain)
    quotients = {name: divide(ours[name], theirs[name]) for name in ours}
    known = [value for value in quotients.values() if value is not None]
    return {
        "tree": str(run.case),
        "chain": str(chain.case),
        "budget": run.case.engine.budget,
        "temperature": run.case.temperature,
        "kind": run.case.kind,
        "commit": run.case.options["commit"],
        "topology": run.case.options["topology"],
        "ranking": run.case.options["ranking"],
        "chain_ranking": chain.case.options["ranking"],
        "pooled": divide(tokens_per_step(run.decoded), tokens_per_step(chain.decoded)),
        "mean": divide(mean(ours.values()), mean(theirs.values())),
        "least_category": min(known, default=None),
        "by_category": quotients,
    }


def divide(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def verdict(runs: Sequence[Run]) -> dict[str, Any]:
    """Whether the run shows losslessness, and if not, why.

    passed needs every difference to be inside the rule and, where trees ran, branches that were taken: a tree whose
    branches never matter shows nothing about them.
    """
    found = [difference for run in runs for difference in run.differences]
    trees = [run for run in runs if run.case.engine.mode == "tree"]
    outside = sum(not difference.allowed for difference in found)
    off_spine = sum(run.counters["off_spine"] for run in trees)
    reasons = []
    if outside:
        reasons.append(f"{outside} differences outside the rule")
    if trees and not off_spine:
        reasons.append("no branch off the spine was accepted, so nothing is shown about branches")
    return {
        "passed": not reasons,
        "reasons": reasons,
        "compared": sum(run.compared for run in runs),
        "identical": sum(run.compared - len(run.differences) for run in runs),
        "inside_rule": len(found) - outside,
        "outside_rule": outside,
        "off_spine": off_spine,
        "after_off_spine": sum(run.counters["after_off_spine"] for run in trees),
        "differences": [asdict(difference) for difference in found],
    }


def goals(runs: Sequence[Run], rows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> list[dict[str, Any]]:
    """What this project asks of the proving pair beyond losslessness, each with what was measured (None: nothing)."""

    def pick(**wanted: Any) -> list[dict[str, Any]]:
        return [
            row
            for row in rows
            if (row["kind"], row["topology"]) == ("main", "best_first")
            and all(row[name] == value for name, value in wanted.items())
        ]

    def least(chosen: list[dict[str, Any]], name: str) -> float | None:
        return min((row[name] for row in chosen if row[name] is not None), default=None)

    cold, hot = (pick(budget=31, commit="branch", temperature=t, chain_ranking="greedy") for t in (0.0, 1.0))
    # Against the chain with greedy drafts and, where it ran, the one with the tree's own ranking.
    wide = [row for row in pick() if row["budget"] >= 15 and row["chain_ranking"] in ("greedy", row["ranking"])]
    by_commit = {commit: [row for row in wide if row["commit"] == commit] for commit in ("flat", "branch")}
    fallbacks = sum(sum(run.counters["fallbacks"].values()) for run in runs if run.case.engine.mode != "plain")
    found = [
        ("differences inside the rule, at most", INSIDE_EXPECTED, summary["inside_rule"]),
        ("fallbacks to a chain, at most", 0, fallbacks),
        ("off-spine acceptances, at least", 1, summary["off_spine"]),
        ("right tokens after them, at least", 50, summary["after_off_spine"]),
        ("tree / chain, flat, least over budgets >= 15, at least", 1.0, least(by_commit["flat"], "mean")),
        ("tree / chain, branch, least over budgets >= 15, at least", 1.0, least(by_commit["branch"], "mean")),
        ("tree B=31 branch / chain at T=0, mean, at least", 1.12, least(cold, "mean")),
        ("tree B=31 branch / chain at T=0, least category, at least", 1.05, least(cold, "least_category")),
        ("tree B=31 branch / greedy chain at T=1, mean, at least", 1.15, least(hot, "mean")),
        ("tree B=31 branch / greedy chain at T=1, least category, at least", 1.05, least(hot, "least_category")),
    ]
    result = []
    for what, wanted, measured in found:
        met = None if measured is None else measured <= wanted if "at most" in what else measured >= wanted
        result.append({"what": what, "wanted": wanted, "measured": measured, "met": met})
    return result


def build(runs: Sequence[Run], settings: Settings, head: dict[str, Any]) -> dict[str, Any]:
    """The whole report; `head` names the run (recipe, command, device, versions, dates)."""
    summary, rows = verdict(runs), ratios(runs)
    return {
        "schema": SCHEMA,
        "kind": "parity",
        "passed": summary["passed"],
        **head,
        "settings": asdict(settings),
        "parity": summary,
        "goals": goals(runs, rows, summary),
        "ratios": rows,
        "runs": [describe(run) for run in runs],
    }


def table(report: dict[str, Any]) -> str:
    """Tokens per step of every case and the verdict, for a terminal."""
    lines = [f"{'tok/step':>8} {'vs chain':>8} {'off-spine':>9} {'same':>9}  case"]
    greedy = {row["tree"]: row["mean"] for row in reversed(report["ratios"]) if row["chain_ranking"] == "greedy"}
    for run in report["runs"]:
        ratio = greedy.get(run["name"])
        same = f"{run['compared'] - run['different']}/{run['compared']}" if run["compared"] else "-"
        speed, kind = run["tokens_per_step"], "" if run["kind"] == "main" else run["kind"] + ": "
        lines.append(
            f"{'-' if speed is None else f'{speed:.3f}':>8} {'-' if ratio is None else f'{ratio:.3f}':>8} "
            f"{run.get('off_spine', '-'):>9} {same:>9}  {kind}{run['name']}"
        )
    lines.append("")
    for goal in report["goals"]:
        measured, met = goal["measured"], {True: "met", False: "NOT met", None: "not measured"}[goal["met"]]
        shown = "" if measured is None else f" {round(measured, 3)}"
        lines.append(f"{goal['what']} {goal['wanted']}:{shown} ({met})")
    parity = report["parity"]
    lines.append(
        f"\n{parity['identical']} of {parity['compared']} sequences identical to plain decoding; "
        f"{parity['inside_rule']} differences inside the rule, {parity['outside_rule']} outside"
    )
    lines.append("passed" if report["passed"] else f"NOT passed: {'; '.join(parity['reasons'])}")
    return "\n".join(lines)
