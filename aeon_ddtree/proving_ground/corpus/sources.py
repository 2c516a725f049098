# SPDX-License-Identifier: Apache-2.0
"""Natural text of the corpus: the Python standard library, its documentation and its docstrings (PSF licence).

Held-out split: by module or page, decided by a hash of its name, so that a rebuilt corpus holds out the same files.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_SHARE = 0.04
_SKIP_PARTS = {"site-packages", "__pycache__", "pydoc_data", "encodings"}
_MAX_BYTES = 400_000


@dataclass(frozen=True)
class Document:
    """One file: `name` relative to its root, `text`, and whether it is held out from training."""

    name: str
    text: str
    held_out: bool


def is_held_out(name: str) -> bool:
    """True for a fixed 4 % of names; a module and its test share their stem, and so their side of the split."""
    stem = Path(name).stem.split(".")[0].removeprefix("test_").lower()
    digest = hashlib.sha256(f"held-out:{stem}".encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < HELD_OUT_SHARE


def code_documents(stdlib: Path, further: tuple[Path, ...] = ()) -> Iterator[Document]:
    """Each Python source file below `stdlib` (a `lib/python3.x` folder), tests included.

    Of the `further` libraries (other CPython versions) only the functions and methods not seen before are taken.
    """
    seen: set[int] = set()
    for document in _files(stdlib):
        seen.update(hash(b) for b in _blocks(document.text))
        yield document
    for root in further:
        for document in _files(root):
            fresh = [b for b in _blocks(document.text) if len(b) > 160 and hash(b) not in seen]
            seen.update(hash(b) for b in fresh)
            if sum(map(len, fresh)) > 400:
                yield Document(f"{root.name}/{document.name}", "\n".join(fresh), document.held_out)


def _blocks(text: str) -> list[str]:
    return re.split(r"\n(?=[ ]*(?:class|def|async def|@)\b)", text)


def _files(stdlib: Path) -> Iterator[Document]:
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        if _SKIP_PARTS & set(relative.parts) or path.stat().st_size > _MAX_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) > 400 and text.isascii():
            yield Document(str(relative), text, is_held_out(str(relative)))


def prose_documents(docs: Path, stdlib: Path, further: tuple[Path, ...] = ()) -> Iterator[Document]:
    """Documentation pages below `docs` (reStructuredText), then the docstrings of each module as one document."""
    pages = sorted(docs.rglob("*.rst.txt"))
    if not pages:
        raise FileNotFoundError(
            f"no .rst.txt page below {docs}; expected the _sources folder of the Python documentation"
        )
    for path in pages:
        relative = path.relative_to(docs)
        text = path.read_text(encoding="utf-8")
        if len(text) >= 400:
            yield Document(f"doc/{relative}", clean_page(text), is_held_out(relative.name))
    seen: set[str] = set()
    for document in (d for root in (stdlib, *further) for d in _files(root)):
        fresh = [t for t in docstrings(document.text) if t not in seen]
        seen.update(fresh)
        text = "\n\n".join(fresh)
        if len(text) > 300:
            yield Document(f"docstring/{document.name}", text, document.held_out)


def clean_page(text: str) -> str:
    """Drop index entries, labels and comment blocks; unwrap roles; join the lines of each paragraph."""
    lines = [line.rstrip() for line in text.splitlines()]
    lines = [x for x in lines if not re.match(r"\s*\.\. (index|_|module|sectionauthor|moduleauthor|testsetup)", x)]
    text = "\n".join(lines)
    text = re.sub(r":[a-zA-Z:+-]+:`[!~]?([^`<]+?)(?:\s*<[^`>]+>)?`", r"\1", text)
    text = re.sub(r"`([^`<]+?)\s*<[^`>]+>`_+", r"\1", text)
    text = re.sub(r"\n{3,}", "\n\n", text)
    # Re-flow plain paragraphs only: a paragraph whose lines share one indentation and hold no markup of their own.
    out = []
    for block in text.split("\n\n"):
        rows = block.split("\n")
        indents = {len(r) - len(r.lstrip()) for r in rows}
        plain = len(indents) == 1 and all(re.match(r"\s*[A-Za-z(*`\"']", r) for r in rows)
        if plain and len(rows) > 1 and not any(re.fullmatch(r"\s*[=*~^-]{3,}", r) for r in rows):
            out.append(" " * indents.pop() + " ".join(r.strip() for r in rows))
        else:
            out.append(block)
    return "\n\n".join(out)


def docstrings(source: str) -> list[str]:
    """Docstrings of at least 80 characters, dedented, in file order."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) >= 80:
                found.append((getattr(node, "lineno", 0), text))
    return [text for _, text in sorted(found, key=lambda pair: pair[0])]


def plain_sentences(text: str) -> list[str]:
    """Sentences of 5 … 22 plain words, for the free-text values of the generated kinds."""
    flat = re.sub(r"\s+", " ", text)
    found = re.findall(r"(?<=[.:] )([A-Z][a-z]*(?: [a-zA-Z]+[,;]?){4,21}\.)", flat)
    return [s for s in found if 25 < len(s) < 160]
