# SPDX-License-Identifier: Apache-2.0
"""Reading a series of patches, and checking what must hold once they are applied: for scripts/apply_patches.

Standard library only, because it runs where nothing is installed yet."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

PACKAGE = "vllm"


class Refusal(Exception):
    """Why nothing is done: one line."""


@dataclass
class Hunk:
    """`old`: the lines the file must hold, one after the other; `line`: where, for messages."""

    line: int
    old: list[str] = field(default_factory=list)


@dataclass
class Patch:
    """files: path -> its hunks; None for a file that the patch adds."""

    name: str
    source: Path
    files: dict[str, list[Hunk] | None]
    conditions: list[dict[str, str]]


def read_series(folder: Path) -> list[Patch]:
    """The patches in order; Refusal when the folder contradicts itself."""
    listing = folder / "series"
    if not listing.is_file():
        raise Refusal(f"{listing}: missing, expected one patch name per line; give the folder with --series")
    lines = (line.split("#", 1)[0].strip() for line in listing.read_text(encoding="utf-8").splitlines())
    names = [line for line in lines if line]
    if not names:
        raise Refusal(f"{listing}: lists no patch, expected at least one; restore it")
    for name in names:
        if names.count(name) > 1:
            raise Refusal(f"{listing}: {name} is listed {names.count(name)} times, expected once; remove the others")
        if PurePosixPath(name).name != name or not (folder / name).is_file():
            raise Refusal(f"{listing}: {name} is not a file of {folder}; restore it, or take it off the list")
    for extra in sorted(path.name for path in folder.glob("*.patch")):
        if extra not in names:
            raise Refusal(f"{listing}: {extra} is there but not listed; list it, or remove the file")
    conditions = _read_conditions(folder / "postconditions.json", names)
    return [Patch(name, folder / name, _read_patch(folder / name), conditions[name]) for name in names]


def _read_conditions(file: Path, names: list[str]) -> dict[str, list[dict[str, str]]]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refusal(f"{file}: not readable as JSON ({error}); restore it") from None
    if not isinstance(found, dict) or sorted(found) != sorted(names):
        raise Refusal(f"{file}: has {sorted(found)}, expected a list of conditions for each of {sorted(names)}")
    for name, conditions in found.items():
        keys = [sorted(c) if isinstance(c, dict) else c for c in conditions] if isinstance(conditions, list) else []
        if not keys or any(k not in (["file", "holds"], ["file", "holds", "in"]) for k in keys):
            raise Refusal(f"{file}: {name} needs at least one condition, each with file, holds and perhaps in")
        for condition in conditions:
            try:
                ast.parse(condition["holds"])
            except SyntaxError as error:
                raise Refusal(f"{file}: {name}: `{condition['holds']}` is no Python ({error}); correct it") from None
    return found


_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")


def _read_patch(source: Path) -> dict[str, list[Hunk] | None]:
    """path -> hunks. What a patch may do is narrow, so reading it is too; git does the applying."""
    files: dict[str, list[Hunk] | None] = {}
    hunks: list[Hunk] | None = None
    old_left = new_left = 0
    before, in_diff = "", False
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), 1):
        if old_left or new_left:
            assert hunks
            kind = line[:1] or " "
            if kind not in " -+\\":
                raise Refusal(f"{source}:{number}: the hunk ends early; make the patch anew with git format-patch")
            old_left -= kind in " -"
            new_left -= kind in " +"
            if kind in " -":
                hunks[-1].old.append(line[1:])
        elif line.startswith("diff --git "):
            in_diff = True
        elif not in_diff:  # the commit message may say anything
            continue
        elif line.startswith("--- "):
            before = line[4:]
        elif line.startswith("+++ "):
            path = _inside(line[4:], source, number)
            if before not in (f"a/{path}", "/dev/null") or path in files:
                raise Refusal(f"{source}:{number}: {before} -> {path}; expected one change of a file in place")
            hunks = []
            files[path] = None if before == "/dev/null" else hunks
        elif found := _HUNK.match(line):
            if hunks is None:
                raise Refusal(f"{source}:{number}: a hunk without a file; make the patch anew with git format-patch")
            old_left, new_left = (int(count or 1) for count in found.group(2, 3))
            hunks.append(Hunk(int(found.group(1))))
        elif re.match(r"(rename|copy|deleted file|old mode|new mode|GIT binary|Binary files)\b", line):
            raise Refusal(f"{source}:{number}: {line}: patches may only change or add text files")
    if old_left or new_left:
        raise Refusal(f"{source}: the last hunk ends early; make the patch anew with git format-patch")
    if not files:
        raise Refusal(f"{source}: changes no file; make the patch anew with git format-patch")
    return files


def _inside(name: str, source: Path, number: int) -> str:
    path = PurePosixPath(name)
    if path.parts[:2] != ("b", PACKAGE) or len(path.parts) < 3 or ".." in path.parts:
        raise Refusal(f"{source}:{number}: changes {name}, expected a file below b/{PACKAGE}/")
    return str(PurePosixPath(*path.parts[1:]))


def broken_conditions(folder: Path, conditions: list[dict[str, str]]) -> Iterator[str]:
    """Post-conditions that do not hold of the Python files in `folder`, whatever their formatting."""
    for condition in conditions:
        path, place = condition["file"], condition.get("in", "")
        try:
            node: ast.AST = ast.parse((folder / path).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            yield f"{path} does not parse ({error})"
            continue
        for name in filter(None, place.split(".")):
            inner = [child for child in getattr(node, "body", []) if getattr(child, "name", None) == name]
            if len(inner) != 1:
                yield f"{path}: {place} is there {len(inner)} times, expected 1"
                break
            node = inner[0]
        else:
            wanted = ast.parse(condition["holds"]).body[0]
            wanted = wanted.value if isinstance(wanted, ast.Expr) else wanted
            if ast.dump(wanted) not in {ast.dump(n) for n in ast.walk(node) if type(n) is type(wanted)}:
                yield f"{path}: {place or 'the file'} does not hold `{condition['holds']}`"
