# SPDX-License-Identifier: Apache-2.0
"""Headers of safetensors files: names, dtypes and shapes of the tensors, without reading any of them.

Format: 8 bytes little-endian length N, N bytes of JSON, then the tensors' bytes without gaps (safetensors' README).
"""

import functools
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST = 100_000_000  # bytes of a header: the limit of the format's own library
POINTER = b"version https://git-lfs"  # what a clone without git-lfs leaves in place of a large file


@dataclass(frozen=True)
class Tensor:
    """dtype as the format writes it ("BF16", "U8", …); nbytes: its size in the file."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Broken(Exception):
    """A file that cannot be loaded. what: the last part of the failure's code; got, expected: as in Failure."""

    def __init__(self, what: str, got: str, expected: str) -> None:
        super().__init__(f"{got}, expected {expected}")
        self.what, self.got, self.expected = what, got, expected


def read_header(file: Path) -> dict[str, Tensor]:
    """Tensors of `file` by name. Raises Broken when the file is empty, cut off or no safetensors file, and OSError."""
    stat = file.stat()
    return _read(file, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _read(file: Path, size: int, _changed: int) -> dict[str, Tensor]:
    if size == 0:
        raise Broken("shard-empty", "an empty file", "tensors")
    with file.open("rb") as stream:
        start = stream.read(len(POINTER))
        if start == POINTER:
            raise Broken("shard-pointer", "a git-lfs pointer", "the file that it stands for")
        if size < 8:
            raise Broken("shard-truncated", f"{size} bytes long", "a safetensors file")
        (length,) = struct.unpack("<Q", start[:8])
        if length > LONGEST:
            raise Broken("shard-header", f"a file whose header would have {length} bytes", "a safetensors file")
        if 8 + length > size:
            raise Broken("shard-truncated", f"{size} bytes long", f"a header of {length} bytes and its tensors")
        stream.seek(8)
        raw = stream.read(length)
    try:
        entries = {name: entry for name, entry in json.loads(raw).items() if name != "__metadata__"}
        tensors = {name: _tensor(entry) for name, entry in entries.items()}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise Broken("shard-header", "a file with an unreadable header", "a safetensors file") from None
    expected = 8 + length + end
    if size != expected:
        what = "shard-truncated" if size < expected else "shard-header"
        raise Broken(what, f"{size} bytes long", f"{expected} bytes by its header")
    return tensors


def _tensor(entry: dict[str, Any]) -> Tensor:
    first, last = map(int, entry["data_offsets"])
    if not 0 <= first <= last:
        raise ValueError
    return Tensor(str(entry["dtype"]), tuple(map(int, entry["shape"])), last - first)
