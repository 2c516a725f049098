#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check that an environment holds what distributions ask for: check_requirements.py NAME... [--besides REGEX]...

Follows the requirements of each NAME, and theirs, without extras that nobody asked for. REGEX names distributions that
are left out on purpose and are not followed. A local version (2.11.0+cpu) counts as its public one. Exit code 1, and
one line each, for what is missing or has another version.
"""

import argparse
import importlib.metadata as metadata
import re
import sys

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


def complaints(roots: list[str], besides: list[str]) -> list[str]:
    """One line for each requirement that does not hold, in the order met."""
    found: list[str] = []
    seen: set[tuple[str, str]] = set()
    queue = [(root, "", "the command line") for root in roots]
    while queue:
        name, extra, asker = queue.pop(0)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            found.append(f"{name} is missing, expected because {asker} asks for it")
            continue
        for text in distribution.requires or []:
            requirement = Requirement(text)
            wanted = canonicalize_name(requirement.name)
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            if any(re.fullmatch(pattern, wanted) for pattern in besides):
                continue
            try:
                version = Version(metadata.version(wanted))
            except metadata.PackageNotFoundError:
                found.append(f"{wanted} is missing, expected {text!r} because {name} asks for it")
                continue
            specifier = re.sub(r"\+[A-Za-z0-9.]+", "", str(requirement.specifier))
            public = Requirement(f"{wanted}{specifier}").specifier
            if not public.contains(version.public, prereleases=True):
                found.append(f"{wanted} is {version}, expected {text!r} because {name} asks for it")
            queue += [(wanted, each, name) for each in ("", *requirement.extras)]
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check that an environment holds what distributions ask for.")
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--besides", action="append", default=[], metavar="REGEX")
    options = parser.parse_args(arguments)
    lines = complaints([canonicalize_name(name) for name in options.names], options.besides)
    for line in lines:
        print(f"check_requirements: {line}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
