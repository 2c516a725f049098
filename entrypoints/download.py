# SPDX-License-Identifier: Apache-2.0
"""`aeon-ddtree download`: a recipe's models, or one model, from the Hugging Face hub.

HF_TOKEN, HF_HUB_CACHE, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean to huggingface_hub.
"""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click

from . import cli, references
from .failure import Refusal
from .preflight import Machine

# What no server of ours reads: other frameworks' weights, and the original checkpoint beside the converted one.
UNREAD = ["*.pth", "*.gguf", "*.onnx", "*.msgpack", "*.h5", "*.ot", "onnx/*", "original/*", "consolidated*"]
SECOND_COPY = ["*.bin", "*.pt"]  # not read where there are safetensors
MARGIN = 1 << 30  # bytes that stay free on the disk
GIB = 1 << 30


@dataclass(frozen=True)
class Wanted:
    """field: "model" or "drafter"; revision None: the main branch; folder: its name under --to.

    A recipe that expects its models in mounted folders gives their names, so that the parent can be mounted as it is.
    """

    field: str
    repository: str
    revision: str | None
    folder: str

    def __str__(self) -> str:
        return self.repository + (f"@{self.revision}" if self.revision else "")


def wanted_by(recipe_name: str | None, notes: list[str]) -> Iterator[Wanted]:
    """Models of a recipe that the hub has; what is local already goes to `notes`. Raises Refusal."""
    from .recipe import load_recipe

    file = references.find_recipe(recipe_name or os.environ.get("DDTREE_RECIPE") or cli.DEFAULT_RECIPE)
    recipe = load_recipe(file)
    found = False
    for name in ("model", "drafter"):
        reference = getattr(recipe, name)
        if reference is None:
            continue
        source = getattr(recipe.sources, name) or reference
        repository, revision = references.split_revision(source)
        if source.startswith(references.PACKAGE) or not references.HUB_ID.fullmatch(repository):
            notes.append(f"{name} {reference} is no model of the hub: nothing to download")
            continue
        found = True
        folder = repository if source == reference else reference
        yield Wanted(name, repository, revision or getattr(recipe, f"{name}_revision"), Path(folder).name)
    if not found and not any(note.startswith("model package:") for note in notes):
        raise Refusal(f"{file}: names no model of the Hugging Face hub; add `sources:`, or give ORG/NAME")


def fetch(wanted: Wanted, to: Path | None, machine: Machine) -> Path:
    """Downloads what is not there yet; the folder it lies in. to: parent of that folder, None for the hub's cache.

    Raises Refusal, one line, on anything that goes wrong.
    """
    try:
        from huggingface_hub import constants, snapshot_download
    except ImportError:
        raise Refusal(
            "download: the package huggingface-hub is not installed; install it (it comes with vLLM)"
        ) from None
    place = None if to is None else to / wanted.folder
    arguments: dict[str, Any] = {"repo_id": wanted.repository, "revision": wanted.revision, "local_dir": place}
    try:
        if constants.HF_HUB_OFFLINE:
            return Path(snapshot_download(**arguments, local_files_only=True))
        listed = snapshot_download(**arguments, ignore_patterns=UNREAD, dry_run=True)
        assert isinstance(listed, list)
        ignored = UNREAD
        if any(file.filename.endswith(".safetensors") for file in listed):
            ignored = UNREAD + SECOND_COPY
            listed = [file for file in listed if not any(fnmatch(file.filename, name) for name in SECOND_COPY)]
        size = sum(file.file_size for file in listed if file.will_download)
        folder = place or Path(constants.HF_HUB_CACHE)
        left = machine.disk[folder]
        if size + MARGIN > left:
            raise Refusal(
                f"{folder}: {left / GIB:.1f} GiB free, expected {size / GIB:.1f} GiB for {wanted} and 1 to spare; "
                "free some space, or give another folder with --to or HF_HUB_CACHE"
            )
        commit = next((file.commit_hash for file in listed if file.commit_hash), None)
        files = sum(file.will_download for file in listed)
        click.echo(
            f"{wanted.field}: {wanted} at {commit or 'an unknown commit'}: "
            + (f"{files} files, {size / GIB:.2f} GiB" if files else "complete already"),
            err=True,
        )
        if commit is not None:
            arguments["revision"] = commit  # what was weighed is what is fetched
        return Path(snapshot_download(**arguments, ignore_patterns=ignored))
    except Refusal:
        raise
    except Exception as error:
        raise Refusal(_explain(wanted, error)) from None


def _explain(wanted: Wanted, error: Exception) -> str:
    """One line for what the hub's library raised."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.DryRunError | errors.LocalEntryNotFoundError) and isinstance(
        error.__cause__, Exception
    ):
        error = error.__cause__  # why the hub could not be asked
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        said = f"{wanted} needs its licence accepted: open the model's page, accept, and set HF_TOKEN"
    elif isinstance(error, errors.RevisionNotFoundError):
        said = f"{wanted.repository} has no revision {wanted.revision}; correct it"
    elif isinstance(error, errors.RepositoryNotFoundError):
        token = "is not for it" if os.environ.get("HF_TOKEN") else "is not set"
        said = f"{wanted} does not exist, or is private and HF_TOKEN {token}; correct the name or set HF_TOKEN"
    elif isinstance(error, errors.HFValidationError):
        said = f"{wanted.repository} is no name of a model, expected ORG/NAME; correct it"
    elif constants.HF_HUB_OFFLINE or isinstance(error, errors.OfflineModeIsEnabled):
        cache = constants.HF_HUB_CACHE
        said = f"{wanted} is not in the cache {cache}, and HF_HUB_OFFLINE forbids the network; unset it"
    elif status is not None:
        said = f"{wanted}: {constants.ENDPOINT} answered {status}; " + (
            "set HF_TOKEN to a valid token" if status in (401, 403) else "try again later"
        )
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        said = f"{wanted}: the disk is full; free some space and run it again: it goes on where it stopped"
    elif isinstance(error, PermissionError):
        said = f"{error.filename}: user {os.getuid()} cannot write there; give another folder with --to or HF_HUB_CACHE"
    else:
        reason = " ".join(str(error).split()) or type(error).__name__
        said = f"{wanted}: {constants.ENDPOINT} cannot be reached ({reason}); check the network, or set HF_ENDPOINT"
    return f"download: {said}"


@click.command()
@cli.recipe_option
@click.argument("repository", metavar="[ORG/NAME[@REVISION]]", required=False)
@click.option("--revision", default=None, help="Commit, tag or branch, for ORG/NAME.")
@click.option(
    "--to", type=click.Path(path_type=Path, file_okay=False), default=None, metavar="DIR",
    help="Put each model into DIR/NAME instead of the hub's cache; NAME as the recipe has it.",
)  # fmt: skip
@click.pass_context
def download(
    ctx: click.Context, recipe_name: str | None, repository: str | None, revision: str | None, to: Path | None
) -> None:
    """Fetch a recipe's models, or ORG/NAME, from the Hugging Face hub. What is there already is not fetched again."""
    notes: list[str] = []
    if repository is not None:
        if recipe_name is not None:
            raise Refusal("download: both --recipe and ORG/NAME are given, expected one of them; leave one out")
        name, pinned = references.split_revision(repository)
        if not references.HUB_ID.fullmatch(name):
            cure = f"give --recipe {repository}" if repository in references.recipe_names() else "correct it"
            raise Refusal(f"download: {repository} is no name of a model, expected ORG/NAME; {cure}")
        if pinned and revision and pinned != revision:
            raise Refusal(f"download: revision is {revision} and {pinned}, expected one; leave one out")
        wanted = [Wanted("model", name, revision or pinned, name.rpartition("/")[2])]
    else:
        if revision is not None:
            raise Refusal("download: --revision is given without ORG/NAME; a recipe pins its own")
        wanted = list(wanted_by(recipe_name, notes))
    machine = ctx.find_object(Machine) or Machine(os.environ)
    for note in notes:
        click.echo(f"aeon-ddtree: {note}", err=True)
    if to is not None and os.path.lexists(to) and not to.is_dir():
        raise Refusal(f"download: --to is {to}, which is a file, expected a folder; give another")
    for one in wanted:
        click.echo(f"--{one.field} {fetch(one, to, machine)}")
