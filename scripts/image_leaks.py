# SPDX-License-Identifier: Apache-2.0
"""What of a builder's configuration must not be in an image, and how to find it in a layer (for image-check)."""

import configparser
import contextlib
import hashlib
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

# Files that only a builder's configuration would leave behind, as paths in a layer.
UNWANTED = re.compile(
    r"(^|/)(pip\.conf|\.netrc|\.pypirc|\.docker/config\.json|uv\.toml|\.git-credentials|\.ssh/.+|\.bash_history)$"
    r"|^(root/\.cache|var/lib/apt/lists|var/cache/apt/archives)/.+|^run/secrets/.+|^etc/apt/auth\.conf"
)
EXPECTED_EMPTY = re.compile(r"^(root/\.cache|var/lib/apt/lists|var/cache/apt/archives)/(partial|lock|auxfiles)/?$")
GENERIC = (
    rb"hf_[A-Za-z0-9]{34}\b",
    rb"gh[pousr]_[A-Za-z0-9]{36}\b",
    rb"https?://[^/\s:@'\"{}<>$]{3,64}:[^/\s:@'\"{}<>$]{3,64}@",
)


def machine_needles() -> Iterator[bytes]:
    """Texts of this machine's own package configuration and certificates."""
    for file in (os.environ.get("PIP_CONFIG_FILE", ""), "/etc/pip.conf", "~/.config/pip/pip.conf", "~/.pip/pip.conf"):
        config = configparser.RawConfigParser()
        with contextlib.suppress(configparser.Error):
            config.read(Path(file).expanduser() if file else [])
        for section in config.sections():
            for key in ("index-url", "extra-index-url", "find-links", "trusted-host", "proxy"):
                yield from (word.encode() for word in config.get(section, key, fallback="").split() if len(word) > 11)
    for file in Path("/usr/local/share/ca-certificates").glob("**/*.crt"):
        lines = [line for line in file.read_bytes().splitlines() if len(line) >= 60]
        yield from lines[3:4]  # enough to know it by, past what all certificates of one authority share


class Layer:
    """A layer's bytes, read once and hashed on the way: the sum is the layer's name in the image's RootFS."""

    def __init__(self, content: IO[bytes]) -> None:
        self.content, self.hash = content, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        chunk = self.content.read(size)
        self.hash.update(chunk)
        return chunk

    def name(self) -> str:
        while self.read(1 << 22):
            pass
        return f"sha256:{self.hash.hexdigest()}"


def look_through(layer: Layer, needles: list[bytes], seen: dict[str, int]) -> Iterator[str]:
    """One line for each file that should not be there, or holds a text that should be nowhere."""
    with tarfile.open(fileobj=layer, mode="r|*") as inner:  # type: ignore[arg-type]  # only read() is used
        for member in inner:
            name = member.name.removeprefix("./")
            deletion = name.rpartition("/")[2].startswith(".wh.")
            if UNWANTED.search(name) and not EXPECTED_EMPTY.match(name) and not member.isdir() and not deletion:
                yield f"a layer holds {name}"
            content = inner.extractfile(member) if member.isfile() else None
            tail = b""
            seen["files"] += content is not None
            while content is not None and (chunk := content.read(1 << 22)):
                seen["bytes"] += len(chunk)
                for needle in needles:
                    if needle in tail + chunk:
                        yield f"{name} holds {needle[:12].decode(errors='replace')!r}..."
                tail = chunk[-256:]
