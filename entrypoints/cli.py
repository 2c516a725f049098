# SPDX-License-Identifier: Apache-2.0
"""`aeon-ddtree`: the commands. A refusal is one line on stderr and exit code 2."""

import importlib
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Callable
from typing import Any

import click

from . import command, passthrough, references, variables
from .failure import Refusal, nearest
from .resolve import Resolved, resolve
from .settings import ALIASES, BY_NAME, MODES, SERVER, TREE, WATCH

DEFAULT_RECIPE = "qwen36-27b-xs"
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
    """Accepts aliases, loads lazily; a word that is no command is run as a program when it is one."""

    def known(self, ctx: click.Context) -> list[str]:
        return [*self.list_commands(ctx), *ALIASES, *passthrough.NOT_YET]

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *LAZY])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = ALIASES.get(cmd_name, cmd_name)
        return load_lazily(cmd_name) if cmd_name in LAZY else super().get_command(ctx, cmd_name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Before anything is parsed: a program's arguments are its own, `--help` and `--` included.
        if args and not args[0].startswith("-"):
            if args[0] in passthrough.NOT_YET:
                raise passthrough.not_yet(args[0])
            if args[0] not in self.known(ctx):
                passthrough.run_program(args, self.known(ctx))
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        eager = [(name, each.get_short_help_str(90)) for name, each in self.commands.items()]
        rows = sorted([*eager, *((name, text) for name, (_, text) in LAZY.items())])
        with formatter.section("Commands"):
            formatter.write_dl([*rows, ("bash, vllm, ...", "Any other program: run unchanged.")])


EPILOG = (
    "Each value: command line, else its variable, else the profile, else the recipe, else the default. Variables: "
    + ", ".join(variables.known_variables())
    + ". Of other images, honoured: "
    + ", ".join(variables.usual_variables())
    + "."
)


@click.group(cls=Commands, epilog=EPILOG, invoke_without_command=True)
@click.version_option(package_name="aeon-ddtree", message="%(package)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Serve a language model with lossless tree speculative decoding."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def value_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds a flag per setting. Values stay text here: settings.py reads them, whatever their origin."""
    for setting in reversed((*SERVER, *WATCH, *TREE)):
        if setting.bare is not None:
            text = f"{setting.help} [{setting.variable}={setting.bare[1]}]"
            option = click.option(setting.flag, setting.name, flag_value=setting.bare[1], default=None, help=text)
        else:
            text = f"{setting.help} [{setting.what}; {setting.variable}]"
            option = click.option(setting.flag, setting.name, default=None, metavar="VALUE", help=text)
        function = option(function)
    return click.option(
        "--profile", default=None, metavar="NAME", help="Profile of the recipe [DDTREE_PROFILE, PROFILE]."
    )(function)


def recipe_option(function: Callable[..., Any]) -> Callable[..., Any]:
    text = f"Name or path of a recipe [{DEFAULT_RECIPE}; DDTREE_RECIPE]."
    return click.option("--recipe", "recipe_name", default=None, metavar="RECIPE", help=text)(function)


def serve_options(function: Callable[..., Any]) -> Callable[..., Any]:
    arguments = click.argument("vllm_args", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM_ARGS...]")
    dry = click.option("--dry-run", is_flag=True, help="Print the command and its environment as JSON; start nothing.")
    return value_options(dry(arguments(function)))


def prepare(
    mode: str | None, recipe_name: str | None, values: dict[str, Any], extra: list[str], profile: str | None = None
) -> Resolved:
    """mode None: `ddtree`, or the first that the recipe has."""
    from .recipe import load_recipe

    file = references.find_recipe(recipe_name or os.environ.get("DDTREE_RECIPE") or DEFAULT_RECIPE)
    recipe = load_recipe(file)
    if mode is None:
        mode = "ddtree" if recipe.mode("ddtree") is not None else (recipe.mode_names() or ["ddtree"])[0]
    return resolve(ALIASES.get(mode, mode), recipe, file, values, os.environ, extra, profile)


def tell(resolved: Resolved) -> None:
    for note in resolved.notes:
        click.echo(f"aeon-ddtree: {note}", err=True)


def serve(
    mode: str | None,
    recipe_name: str | None,
    dry_run: bool,
    vllm_args: tuple[str, ...],
    profile: str | None,
    values: dict[str, Any],
) -> None:
    if vllm_args and not vllm_args[0].startswith("-"):
        # The server would take it for a model's name, and ignore it.
        raise Refusal(f"unexpected argument {vllm_args[0]!r}: give --recipe NAME; arguments for vLLM go after --")
    resolved = prepare(mode, recipe_name, values, list(vllm_args), profile)
    argv, env = command.build_argv(resolved), command.build_env(resolved, os.environ)
    command.check(resolved, os.environ, dry_run)
    click.echo(f"aeon-ddtree: {command.headline(resolved, os.environ)}", err=True)
    tell(resolved)
    if not dry_run:
        command.start(argv, env, resolved)
        return
    plain_env = {name: value.value for name, value in env.items()}
    plan = {"mode": resolved.mode, "recipe": resolved.recipe.name, "argv": argv, "env": plain_env}
    words = [*(f"{name}={value}" for name, value in plain_env.items()), *argv]
    plan["command"] = shlex.join(["env", *words] if plain_env else words)
    click.echo(json.dumps(plan, indent=2))


def make_mode(mode: str) -> None:
    @cli.command(mode, help=SUMMARIES[mode] + " Arguments after -- go to vLLM as they are.")
    @recipe_option
    @serve_options
    def _(
        recipe_name: str | None, dry_run: bool, vllm_args: tuple[str, ...], profile: str | None, **values: Any
    ) -> None:
        serve(mode, recipe_name, dry_run, vllm_args, profile, values)


for _mode in MODES:
    make_mode(_mode)

mode_option = click.option(
    "--mode", type=click.Choice([*MODES, *ALIASES]), default=None, help="Default: ddtree, else the recipe's first."
)


@cli.command()
@click.argument("recipe_name", metavar="RECIPE")
@mode_option
@serve_options
def run(
    recipe_name: str, mode: str | None, dry_run: bool, vllm_args: tuple[str, ...], profile: str | None, **values: Any
) -> None:
    """Serve a recipe in any of its modes. Arguments after -- go to vLLM as they are."""
    serve(mode, recipe_name, dry_run, vllm_args, profile, values)


@cli.command("qwen25-m2")
@mode_option
@serve_options
def qwen25_m2(mode: str | None, dry_run: bool, vllm_args: tuple[str, ...], profile: str | None, **values: Any) -> None:
    """Serve the proving ground with plain attention: the recipe qwen25-m2."""
    serve(mode, "qwen25-m2", dry_run, vllm_args, profile, values)


@cli.command("list")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def list_recipes(as_json: bool) -> None:
    """List recipes, their modes and what they are."""
    from .recipe import load_recipe

    recipes = [load_recipe(references.find_recipe(name)) for name in references.recipe_names()]
    usual = os.environ.get("DDTREE_RECIPE") or DEFAULT_RECIPE
    if as_json:
        rows = [
            {"name": each.name, "description": each.description, "modes": each.mode_names(),
             "profiles": list(each.profiles), "default": each.name == usual}
            for each in recipes
        ]  # fmt: skip
        click.echo(json.dumps(rows, indent=2))
        return
    for each in recipes:
        default = " (default)" if each.name == usual else ""
        profiles = f"; profiles: {', '.join(each.profiles)}" if each.profiles else ""
        click.echo(f"{each.name:20} {each.description}{default}")
        click.echo(f"{'':20} modes: {', '.join(each.mode_names())}{profiles}")


@cli.command()
@click.argument("recipe_name", metavar="[RECIPE]", required=False)
@click.option("--resolved", "as_resolved", is_flag=True, help="Print each value and where it came from, for one mode.")
@mode_option
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@value_options
def show(
    recipe_name: str | None, as_resolved: bool, mode: str | None, as_json: bool, profile: str | None, **values: Any
) -> None:
    """Show a recipe, or with --resolved what a start would use."""
    from .recipe import load_recipe
    from .show import groups_of, rows_of

    if not as_resolved:
        given = [BY_NAME[name].flag for name, value in values.items() if value is not None]
        if given or profile or mode:
            raise Refusal(f"show: {(given or ['--profile' if profile else '--mode'])[0]} needs --resolved; add it")
        file = references.find_recipe(recipe_name or os.environ.get("DDTREE_RECIPE") or DEFAULT_RECIPE)
        content = load_recipe(file).model_dump(exclude_none=True, exclude_defaults=True, by_alias=True)
        click.echo(json.dumps(content, indent=2) if as_json else file.read_text(encoding="utf-8"), nl=as_json)
        return
    resolved = prepare(mode, recipe_name, values, [], profile)
    groups = groups_of(resolved, os.environ)
    if as_json:
        table = {
            group: {name: {"value": each.value, "origin": each.origin} for name, each in found.items()}
            for group, found in groups.items()
        }
        click.echo(json.dumps(table, indent=2))
        return
    for row in rows_of(groups):
        click.echo(row)
    tell(resolved)


@cli.command()
@click.argument("recipe_names", metavar="RECIPE...", nargs=-1, required=True)
def validate(recipe_names: tuple[str, ...]) -> None:
    """Check recipes: keys, values, and that every mode and profile resolves. Models need not be there."""
    from .recipe import load_recipe

    for name in recipe_names:
        file = references.find_recipe(name)
        recipe = load_recipe(file)
        for mode in recipe.mode_names():
            for profile in (None, *recipe.profiles):
                environ = {command.preflight.UNSAFE_VARIABLE: "1"}
                resolved = resolve(mode, recipe, file, {}, environ, [], profile)
                command.check(resolved, environ, dry_run=True)
                command.build_argv(resolved)
        profiles = f"; profiles: {', '.join(recipe.profiles)}" if recipe.profiles else ""
        click.echo(f"{file}: valid ({', '.join(recipe.mode_names())}{profiles})")


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
    except click.NoSuchOption as error:
        known = error.ctx.command.params if error.ctx is not None else []
        flags = [flag for parameter in known for flag in parameter.opts if flag.startswith("-")]
        message = f"unknown option {error.option_name}{nearest(error.option_name, flags)}; see --help"
    except click.ClickException as error:
        message = error.format_message()
    except click.Abort:
        sys.exit(130)
    click.echo(f"aeon-ddtree: {' '.join(message.split())}", err=True)
    sys.exit(2)
