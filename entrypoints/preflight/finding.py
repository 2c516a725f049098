# SPDX-License-Identifier: Apache-2.0
"""What a check says: failures and warnings with a stable code, or why it could not look."""

from dataclasses import asdict, dataclass
from typing import Any

from ..failure import Failure


@dataclass(frozen=True)
class Finding(Failure):
    """A failure, or a warning, that can be looked up.

    code: "subject.what", never reused for something else; warning: True where a start is possible all the same.
    """

    code: str = ""
    warning: bool = False

    def __str__(self) -> str:
        return f"{super().__str__()} [{self.code}]"

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"got": self.got if isinstance(self.got, str | int | float | list) else str(self.got)}


class Skipped(Exception):
    """A check could not look; its text says why and, where there is one, names the cure."""
