# SPDX-License-Identifier: Apache-2.0
"""`aeon-ddtree doctor`: every check of a start on this machine, as a table; nothing is started."""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import click

from . import cli, command
from .failure import Refusal
from .preflight import CHECKS, Machine, Row, Situation, Skipped, run_all
from .preflight.memory import plan
from .resolve import Resolved

VALUES = "recipe and values"
STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}


def examine(resolved: Resolved, machine: Machine) -> Iterator[Row]:
    """A row per check, the values' own first."""
    try:
        command.check_values(resolved, machine.environ)
        command.build_argv(resolved)  # what cannot be passed on is refused there
        yield Row(VALUES, "ok", f"{resolved.recipe.name}, mode {resolved.mode}")
    except Refusal as refusal:
        yield Row(VALUES, "failed", str(refusal))
    yield from run_all(Situation(resolved, machine))


def as_json(resolved: Resolved | None, rows: list[Row], machine: Machine) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "passed": all(row.status != "failed" for row in rows),
        "recipe": None if resolved is None else resolved.recipe.name,
        "mode": None if resolved is None else resolved.mode,
        "device": None if resolved is None else resolved.device,
        "checks": [row.as_json() for row in rows],
        "memory": None,
        "machine": {
            "architecture": machine.architecture,
            "memory": None if machine.memory is None else dataclasses.asdict(machine.memory),
            "gpus": [dataclasses.asdict(gpu) for gpu in machine.gpus],
            "vllm": machine.vllm_version,
        },
    }
    if resolved is not None:
        try:
            answer["memory"] = plan(Situation(resolved, machine)).as_json()
        except (Skipped, Refusal, OSError):
            pass  # the rows say why
    return answer


def draw(rows: list[Row]) -> None:
    """The table, then a line for each failure and warning, unbroken so that it can be searched and pasted."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        raise Refusal(
            "doctor: the package rich is not installed, which draws the table; install it, or give --json"
        ) from None

    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(box=None, pad_edge=False)
    for heading in ("check", "status", "detail"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        codes = " ".join(dict.fromkeys(finding.code for finding in row.findings))
        detail = "; ".join(part for part in (codes, "" if row.status == "failed" else row.detail) if part)
        table.add_row(row.check, Text(row.status, STYLES[row.status]), Text(detail))
    console.print(table)
    for row in rows:
        lines = [str(finding) for finding in row.findings]
        if row.status == "failed" and not lines:
            lines = [row.detail]
        for line in lines:
            click.echo(f"{row.check}: {line}")


@click.command()
@cli.recipe_option
@cli.mode_option
@click.option("--json", "in_json", is_flag=True, help="As JSON.")
@cli.value_options
@click.argument("vllm_args", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM_ARGS...]")
@click.pass_context
def doctor(
    ctx: click.Context,
    recipe_name: str | None,
    mode: str | None,
    in_json: bool,
    vllm_args: tuple[str, ...],
    profile: str | None,
    **values: Any,
) -> None:
    """Run every check of a recipe on this machine, as a table. Exit code 2 when a start would be refused."""
    machine = ctx.find_object(Machine) or Machine(os.environ)
    resolved = None
    try:
        resolved = cli.prepare(mode, recipe_name, values, list(vllm_args), profile)
        rows = list(examine(resolved, machine))
    except Refusal as refusal:
        rows = [Row(VALUES, "failed", str(refusal))]
        rows += [Row(check.name, "skipped", "there are no values to check") for check in CHECKS]
    if in_json:
        click.echo(json.dumps(as_json(resolved, rows, machine), indent=2))
    else:
        draw(rows)
    failed = sum(row.status == "failed" for row in rows)
    if failed:
        click.echo(f"aeon-ddtree: {failed} of {len(rows)} checks failed; a start would be refused", err=True)
        sys.exit(2)
