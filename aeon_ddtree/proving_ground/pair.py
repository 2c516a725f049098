# SPDX-License-Identifier: Apache-2.0
"""Where the embedded pair and its held-out prompts lie. No torch here: the dispatcher may import it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGET_DIR = HERE / "weights" / "target"
DRAFTER_DIR = HERE / "weights" / "drafter"
PROMPTS_FILE = HERE / "prompts.jsonl"
CATEGORIES = ("coding", "math", "reasoning", "prose", "language", "json")


@dataclass(frozen=True)
class HeldOutPrompt:
    """A plain completion prompt that shares no text with the training corpus.

    tied: where plain decoding meets two logits that fp32 cannot tell apart; empty for nearly all.
    """

    id: str
    category: str
    prompt: str
    tied: str = ""


def held_out_prompts(count: int | None = None) -> list[HeldOutPrompt]:
    """The first `count` prompts (all 240 by default), taken from the six categories in turn."""
    rows = [HeldOutPrompt(**json.loads(line)) for line in PROMPTS_FILE.read_text(encoding="utf-8").splitlines()]
    by_category = {c: [r for r in rows if r.category == c] for c in CATEGORIES}
    mixed = [r for group in zip(*by_category.values(), strict=True) for r in group]
    if count is not None and not 0 < count <= len(mixed):
        raise ValueError(f"asked for {count} held-out prompts; there are 1 … {len(mixed)}")
    return mixed[:count]
