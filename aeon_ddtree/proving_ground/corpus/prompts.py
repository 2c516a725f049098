# SPDX-License-Identifier: Apache-2.0
"""Cut the held-out prompts: 40 a category, 16 … 200 tokens, free of text that training has seen."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from tokenizers import Tokenizer

from aeon_ddtree.proving_ground.corpus import overlap
from aeon_ddtree.proving_ground.corpus.math_items import Item

PER_CATEGORY = 40
SHORTEST, LONGEST = 16, 200


def draw_items(item: Callable[[random.Random, list[str]], Item], seed: str, sentences: list[str]) -> list[Item]:
    """Enough fresh items to cut the prompts of one generated kind from."""
    rng = random.Random(seed)
    return [item(rng, sentences) for _ in range(PER_CATEGORY * 6)]


def natural_prompts(
    tokenizer: Tokenizer, held: dict[str, list[str]], known: np.ndarray, seed: int
) -> list[dict[str, str]]:
    """Prompts of coding and prose: line- or sentence-aligned slices with no 12-token window in `known`."""
    rows = []
    for category in ("coding", "prose"):
        rng, tries = random.Random(f"{seed}:prompts:{category}"), 0
        found: set[str] = set()
        while len(found) < PER_CATEGORY:
            tries += 1
            if tries > 200_000:
                raise RuntimeError(f"{category}: only {len(found)} of {PER_CATEGORY} prompts are free of training text")
            text = rng.choice(held[category])
            start = rng.randrange(max(1, len(text) - 1200))
            start = text.find("\n", start) + 1
            ids = tokenizer.encode(text[start : start + 1200]).ids[: rng.randint(24, LONGEST)]
            if len(ids) < 24 or overlap.shared(np.array(ids), known):
                continue
            piece = tokenizer.decode(ids, skip_special_tokens=False)
            if piece.strip() and "\ufffd" not in piece and tokenizer.encode(piece).ids == ids:
                found.add(piece)
        rows += [{"id": f"{category}-{i:02d}", "category": category, "prompt": p} for i, p in enumerate(sorted(found))]
    return rows


def generated_prompts(tokenizer: Tokenizer, items: dict[str, list[Item]]) -> list[dict[str, str]]:
    """Prompts of the generated kinds: up to two solved items, then a question (and, rarely, its answer's beginning)."""
    rows = []
    for category, drawn in items.items():
        rng, queue, index = random.Random(f"prompts:{category}"), list(drawn), 0
        while index < PER_CATEGORY:
            if not queue:
                raise RuntimeError(f"{category}: ran out of items after {index} prompts")
            question, answer = queue.pop()
            text = question + (answer[: rng.randint(1, len(answer))] if rng.random() < 0.2 else "")
            for _ in range(rng.randint(0, 2)):
                q, a = queue.pop() if queue else ("", "")
                text = f"{q}{a}\n{text}" if q else text
            text = text.rstrip(" ")
            if SHORTEST <= len(tokenizer.encode(text).ids) <= LONGEST:
                rows.append({"id": f"{category}-{index:02d}", "category": category, "prompt": text})
                index += 1
    return rows
