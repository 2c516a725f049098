# SPDX-License-Identifier: Apache-2.0
"""Words that are no command of ours: run unchanged when they are a program, refused with the nearest name when not."""

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterable

from .failure import Refusal, nearest

# Commands of the design that are still to come -> what does part of it today.
NOT_YET = {
    "bench": "bench/ holds what was measured so far",
    "canary": "`aeon-ddtree health` says whether a running server has generated, and still does",
    "gate": "`aeon-ddtree parity` is the part of it that exists",
    "qwen25-tree-mask-verifier": "`aeon-ddtree ddtree-tree-test` checks the tree's mask",
    "qwen25-tree-oracle-suite": "`aeon-ddtree ddtree-tree-test` checks trees against references",
}


def not_yet(name: str) -> Refusal:
    return Refusal(f"{name}: not yet in this version; {NOT_YET[name]}")


def run_program(arguments: list[str], known: Iterable[str]) -> None:
    """Becomes the program that `arguments` name, its arguments untouched. Raises Refusal when there is none."""
    word = arguments[0]
    program = shutil.which(word)
    if program is None:
        names = sorted(known)
        raise Refusal(
            f"unknown command {shlex.quote(word)}{nearest(word, names)}, and no program of that name is on PATH; "
            f"known: {', '.join(names)}"
        )
    # Python ignores these two, and what is executed would inherit that: `yes | head` would then complain.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(program, arguments)
    except OSError as error:
        raise Refusal(
            f"{word}: {program} cannot be executed ({error.strerror}); use one built for this machine"
        ) from None
