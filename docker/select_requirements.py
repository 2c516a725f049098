#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print the part of a hash-checked lock file that an image needs.

    select_requirements.py LOCK [--without FILE]... [--without-matching REGEX]...

FILE lists distributions to leave out, one per line ('#' begins a comment). A name that the lock does not have is left
out already; a regular expression must match a whole name. Everything that stays keeps its version, marker and hashes.
Exit code 2, and one line, for a lock that holds anything else than pinned and hashed requirements.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PIN = re.compile(r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;\\]+)")


def normal(name: str) -> str:
    """A distribution's name as PEP 503 writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """(name, lines) of each requirement with its continuation lines. Raises ValueError for anything else."""
    current: tuple[str, list[str]] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if line[0].isspace():
            if current is None or not line.strip().startswith("--hash="):
                raise ValueError(f"line {number} is {line.strip()!r}, expected a pin or one of its hashes")
            current[1].append(line)
            continue
        match = PIN.match(line)
        if match is None:
            raise ValueError(f"line {number} is {line.strip()!r}, expected NAME==VERSION")
        if current is not None:
            yield current
        current = (normal(match["name"]), [line])
    if current is not None:
        yield current


def select(text: str, without: set[str], matching: list[str]) -> tuple[list[str], list[str]]:
    """(lines that stay, names left out). Raises ValueError for a requirement without a hash."""
    kept: list[str] = []
    dropped: list[str] = []
    for name, lines in blocks(text):
        if not any("--hash=" in line for line in lines):
            raise ValueError(f"{name} has no hash, expected at least one; write the lock again with scripts/lock")
        if name in without or any(re.fullmatch(pattern, name) for pattern in matching):
            dropped.append(name)
        else:
            kept += lines
    return kept, dropped


def names(file: Path) -> set[str]:
    lines = (line.split("#", 1)[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    return {normal(line) for line in lines if line}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Print the part of a lock that an image needs.")
    parser.add_argument("lock", type=Path)
    parser.add_argument("--without", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--without-matching", action="append", default=[], metavar="REGEX")
    options = parser.parse_args(arguments)
    without = set().union(*(names(file) for file in options.without))
    try:
        kept, dropped = select(options.lock.read_text(encoding="utf-8"), without, options.without_matching)
    except ValueError as error:
        print(f"select_requirements: {options.lock}: {error}", file=sys.stderr)
        return 2
    print("\n".join(kept))
    print(f"select_requirements: left out {', '.join(sorted(set(dropped))) or 'nothing'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
