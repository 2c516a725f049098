# SPDX-License-Identifier: Apache-2.0
"""What the dispatcher says when it refuses: one line with the place, what was got, what was expected, and the cure."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

LONGEST = 300  # characters of a value that are repeated: a damaged file may hold any


class Refusal(Exception):
    """Ends the command with exit code 2; its text is one line."""


@dataclass(frozen=True)
class Failure:
    """A check that did not pass.

    file: the file, folder, flag or variable at fault; field: the place inside it ("" for the whole);
    got, expected: values as the user would write them; cure: what to do, in the imperative.
    """

    file: str
    field: str
    got: Any
    expected: str
    cure: str

    def __str__(self) -> str:
        place = f"{self.file}: {self.field}" if self.field else self.file
        got = str(self.got)
        got = got if len(got) <= LONGEST else got[:LONGEST] + "…"
        line = f"{place} is {got}, expected {self.expected}; {self.cure}"
        return " ".join(line.split())


def nearest(name: str, known: Iterable[str]) -> str:
    """' (did you mean X?)' for the known name closest to `name`, or ''."""
    names = list(known)
    folded = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.5)
    return f" (did you mean {folded[close[0]]}?)" if close else ""
