# SPDX-License-Identifier: Apache-2.0
"""`aeon-ddtree`: the commands. A refusal is one line on stderr and exit code 2."""

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from . import command, references
from .failure import Refusal, nearest
from .resolve import Resolved, resolve
from .settings import ALIASES, MODES, SERVER, TREE, known_variables

DEFAULT_RECIPE = "proving-ground"
SUMMARIES = {
    "baseline": "Serve the target alone: plain decoding, what everything is compared with.",
    "dflash": "Serve target and drafter with a chain.",
    "ddtree": "Serve target and drafter with a tree; commits flat until the pair is promoted.",
    "unsafe-full-branch": "Serve with branch commits, unpromoted: research only.",
}


# Commands in modules of their own, imported when they are called: name -> (module:attribute, one line for --help).
LAZY = {
    "ddtree-tree-test": ("aeon_entrypoints.tree_test:tree_test", "Test tree, verify, commit and kernels on this CPU."),
    "doctor": ("aeon_entrypoints.doctor:doctor", "Run every check of a recipe on this machine, as a table."),
    "download": ("aeon_entrypoints.download:download", "Fetch a recipe's models from the Hugging Face hub."),
    "health": ("aeon_entrypoints.health:health", "Whether the running server generates: 0 when it does."),
}


def load_lazily(name: str) -> click.Command:
    """The command of the table LAZY. Raises Refusal when its module is not installed."""
    module, _, attribute = LAZY[name][0].partition(":")
    if importlib.util.find_spec(module) is None:
        raise Refusal(f"{name}: not in this build; use a build with the module {module}")
    return getattr(importlib.import_module(module), attribute)


class Commands(click.Group):
    """Accepts aliases, loads lazily, and names the nearest command when there is none of that name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *LAZY])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = ALIASES.get(cmd_name, cmd_name)
        return load_lazily(cmd_name) if cmd_name in LAZY else super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        eager = [(name, command.get_short_help_str(90)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(sorted([*eager, *((name, text) for name, (_, text) in LAZY.items())]))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            known = [*self.list_commands(ctx), *ALIASES]
            raise Refusal(f"unknown command {args[0]}{nearest(args[0], known)}; known: {', '.join(known)}")
        return super().resolve_command(ctx, args)


EPILOG = "Each value: command line, else its variable, else the recipe, else the default. Variables: " + ", ".join(
    known_variables()
)


@click.group(cls=Commands, epilog=EPILOG)
def cli() -> None:
    """Serve a language model with lossless tree speculative decoding."""


def value_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds a flag per setting. Values stay text here: settings.py reads them, whatever their origin."""
    for setting in reversed((*SERVER, *TREE)):
        help_text = f"{setting.help} [{setting.what}; {setting.variable}]"
        function = click.option(setting.flag, setting.name, default=None, metavar="VALUE", help=help_text)(function)
    recipe = click.option(
        "--recipe", "recipe_name", default=None, help=f"Name or path of a recipe [{DEFAULT_RECIPE}; DDTREE_RECIPE]."
    )
    return recipe(function)


def prepare(mode: str, recipe_name: str | None, values: dict[str, Any], extra: list[str]) -> Resolved:
    from .recipe import load_recipe

    file = references.find_recipe(recipe_name or os.environ.get("DDTREE_RECIPE") or DEFAULT_RECIPE)
    return resolve(mode, load_recipe(file), file, values, os.environ, extra)


def tell(resolved: Resolved) -> None:
    for note in resolved.notes:
        click.echo(f"aeon-ddtree: {note}", err=True)


def make_mode(mode: str) -> None:
    @cli.command(mode, help=SUMMARIES[mode] + " Arguments after -- go to vLLM as they are.")
    @value_options
    @click.option("--dry-run", is_flag=True, help="Print the command and its environment as JSON; start nothing.")
    @click.argument("vllm_args", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM_ARGS...]")
    def serve(recipe_name: str | None, dry_run: bool, vllm_args: tuple[str, ...], **values: Any) -> None:
        if vllm_args and not vllm_args[0].startswith("-"):
            # The server would take it for a model's name, and ignore it.
            raise Refusal(f"unexpected argument {vllm_args[0]!r}: give --recipe NAME; arguments for vLLM go after --")
        resolved = prepare(mode, recipe_name, values, list(vllm_args))
        command.check(resolved, os.environ, dry_run)
        argv, env = command.build_argv(resolved), command.build_env(resolved, os.environ)
        tell(resolved)
        if dry_run:
            plain_env = {name: value.value for name, value in env.items()}
            click.echo(
                json.dumps({"mode": mode, "recipe": resolved.recipe.name, "argv": argv, "env": plain_env}, indent=2)
            )
        else:
            command.start(argv, env)


for _mode in MODES:
    make_mode(_mode)


@cli.command("list")
def list_recipes() -> None:
    """List recipes, their modes and what they are."""
    from .recipe import load_recipe

    for name in references.recipe_names():
        recipe = load_recipe(references.find_recipe(name))
        click.echo(f"{name:20} {recipe.description}\n{'':20} modes: {', '.join(recipe.mode_names())}")


@cli.command()
@click.argument("recipe_name", metavar="RECIPE")
@click.option("--resolved", "as_resolved", is_flag=True, help="Print each value and where it came from, for one mode.")
@click.option("--mode", type=click.Choice(MODES), default="ddtree", help="The mode for --resolved.", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def show(recipe_name: str, as_resolved: bool, mode: str, as_json: bool) -> None:
    """Show a recipe."""
    from .recipe import load_recipe

    file = references.find_recipe(recipe_name)
    recipe = load_recipe(file)
    if not as_resolved:
        content = recipe.model_dump(exclude_none=True, exclude_defaults=True, by_alias=True)
        click.echo(json.dumps(content, indent=2) if as_json else file.read_text(encoding="utf-8"), nl=as_json)
        return
    resolved = resolve(mode, recipe, file, {}, os.environ, [])
    groups = {
        "settings": resolved.settings,
        "ddtree": resolved.options,
        "vllm": resolved.flags,
        "env": command.build_env(resolved, os.environ),
    }
    if as_json:
        table = {
            group: {k: {"value": v.value, "origin": v.origin} for k, v in values.items()}
            for group, values in groups.items()
        }
        click.echo(json.dumps(table, indent=2))
        return
    rows = [
        (f"{group}.{name}", str(value.value), value.origin)
        for group, values in groups.items()
        for name, value in values.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, origin in rows:
        click.echo(f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}")
    tell(resolved)


@cli.command()
@click.argument("recipe_names", metavar="RECIPE...", nargs=-1, required=True)
def validate(recipe_names: tuple[str, ...]) -> None:
    """Check recipes: keys, values, and that every mode resolves. Models need not be there."""
    from .recipe import load_recipe

    for name in recipe_names:
        file = references.find_recipe(name)
        recipe = load_recipe(file)
        for mode in recipe.mode_names():
            environ = {command.preflight.UNSAFE_VARIABLE: "1"}
            resolved = resolve(mode, recipe, file, {}, environ, [])
            command.check(resolved, environ, dry_run=True)
        click.echo(f"{file}: valid ({', '.join(recipe.mode_names())})")


@cli.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def parity(arguments: tuple[str, ...]) -> None:
    """Compare plain, chain and tree token by token, offline; --help lists its arguments."""
    from aeon_ddtree.proving_ground.parity import main as run_parity

    sys.exit(run_parity(list(arguments)))


def main() -> None:
    try:
        sys.exit(cli.main(prog_name="aeon-ddtree", standalone_mode=False))
    except Refusal as refusal:
        message = str(refusal)
    except click.ClickException as error:
        message = error.format_message()
    except click.Abort:
        sys.exit(130)
    click.echo(f"aeon-ddtree: {' '.join(message.split())}", err=True)
    sys.exit(2)
