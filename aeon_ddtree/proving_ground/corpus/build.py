# SPDX-License-Identifier: Apache-2.0
"""Rebuild the tokenised corpus: `python -m aeon_ddtree.proving_ground.corpus.build --docs DIR --out DIR`.

Writes per category `<category>.npz` (uint16 tokens, documents joined by the end-of-text token; `train` and `held_out`
arrays with their UTF-8 byte counts), `tokenizer.json`, `prompts.jsonl` and `recipe.json` (seeds, sizes, digests).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from aeon_ddtree.proving_ground.corpus import (
    json_items,
    language_items,
    math_items,
    overlap,
    prompts,
    reasoning_items,
    sources,
)
from aeon_ddtree.proving_ground.train import architecture as arch
from aeon_ddtree.proving_ground.train.tokenizer import train_bpe, write_json

CATEGORIES = ["coding", "math", "reasoning", "prose", "language", "json"]
GENERATED = {"math": math_items, "reasoning": reasoning_items, "language": language_items, "json": json_items}
CHAT_SHARE = 0.12
ITEMS = 12000
SEED = 20261129


def generated_documents(
    category: str, count: int, seed: str, sentences: list[str], refused: set[str]
) -> tuple[list[str], set[str]]:
    """`count` documents of 3 … 9 items each, and the set of their questions; questions in `refused` are redrawn."""
    rng, item = random.Random(seed), GENERATED[category].item
    documents, questions = [], set()
    for _ in range(count):
        chat, parts = rng.random() < CHAT_SHARE, []
        for _ in range(rng.randint(1, 3) if chat else rng.randint(3, 9)):
            question, answer = item(rng, sentences)
            while question in refused:
                question, answer = item(rng, sentences)
            questions.add(question)
            if chat:
                parts.append(
                    f"<|im_start|>user\n{question.strip()}<|im_end|>\n<|im_start|>assistant\n{answer.strip()}<|im_end|>\n"
                )
            else:
                parts.append(question + answer)
        documents.append("".join(parts) if chat else "\n".join(parts))
    return documents, questions


def encode(tokenizer: Tokenizer, documents: list[str]) -> tuple[np.ndarray, int]:
    """Documents as one uint16 array (end-of-text after each), and their size in UTF-8 bytes."""
    pieces = []
    for start in range(0, len(documents), 512):
        for encoding in tokenizer.encode_batch(documents[start : start + 512]):
            pieces.append(np.array([*encoding.ids, arch.END_OF_TEXT], dtype=np.uint16))
    return np.concatenate(pieces), sum(len(d.encode()) for d in documents)


def build(stdlib: Path, further: tuple[Path, ...], docs: Path, out: Path, items: int) -> None:
    """Write the whole corpus below `out`; `items` is the number of documents of each generated kind."""
    started = time.time()
    out.mkdir(parents=True, exist_ok=True)
    natural = {
        "coding": list(sources.code_documents(stdlib, further)),
        "prose": list(sources.prose_documents(docs, stdlib, further)),
    }
    train = {c: [d.text for d in ds if not d.held_out] for c, ds in natural.items()}
    held = {c: [d.text for d in ds if d.held_out] for c, ds in natural.items()}
    pool = {
        side: sorted({s for text in texts["prose"] for s in sources.plain_sentences(text)})
        for side, texts in (("train", train), ("held", held))
    }
    held_questions: dict[str, list[tuple[str, str]]] = {}
    for category in GENERATED:
        # Held-out text is drawn first: training redraws whatever it would share with it.
        held[category], refused = generated_documents(
            category, items // 40, f"{SEED}:held:{category}", pool["held"], set()
        )
        held_questions[category] = prompts.draw_items(
            GENERATED[category].item, f"{SEED}:prompts:{category}", pool["held"]
        )
        refused |= {q for q, _ in held_questions[category]}
        train[category], asked = generated_documents(
            category, items, f"{SEED}:train:{category}", pool["train"], refused
        )
        if asked & refused:
            raise AssertionError(f"{category}: {len(asked & refused)} training questions are held out")
    rng = random.Random(SEED)
    sample = [t for c in CATEGORIES for t in rng.sample(train[c], min(len(train[c]), 900 if c in natural else 2500))]
    tokenizer = train_bpe(sample)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    sizes, arrays = {}, {}
    for category in CATEGORIES:
        tokens, size = encode(tokenizer, train[category])
        held_tokens, held_size = encode(tokenizer, held[category])
        arrays[category] = tokens
        np.savez_compressed(
            out / f"{category}.npz", train=tokens, train_bytes=size, held_out=held_tokens, held_out_bytes=held_size
        )
        sizes[category] = {
            "train_documents": len(train[category]), "train_tokens": len(tokens), "train_bytes": size,
            "held_out_documents": len(held[category]), "held_out_tokens": len(held_tokens), "held_out_bytes": held_size,
            "sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
        }  # fmt: skip
    known = overlap.ngrams([arrays["coding"], arrays["prose"]])
    rows = prompts.natural_prompts(tokenizer, held, known, SEED) + prompts.generated_prompts(tokenizer, held_questions)
    (out / "prompts.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
    recipe = {
        "seed": SEED, "python": [p.name for p in (stdlib, *further)], "documents_per_generated_kind": items,
        "chat_share": CHAT_SHARE, "held_out_share": sources.HELD_OUT_SHARE, "sizes": sizes, "prompts": len(rows),
        "tokenizer_sha256": hashlib.sha256((out / "tokenizer.json").read_bytes()).hexdigest(),
    }  # fmt: skip
    write_json(out / "recipe.json", recipe)
    print(
        json.dumps({c: s["train_tokens"] for c, s in sizes.items()}), f"{time.time() - started:.0f} s", file=sys.stderr
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--further", type=Path, nargs="*", default=[], help="lib folders of other CPython versions")
    parser.add_argument("--docs", type=Path, required=True, help="_sources folder of the Python documentation")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--items", type=int, default=ITEMS, help="documents of each generated kind")
    options = parser.parse_args()
    build(options.stdlib, tuple(options.further), options.docs, options.out, options.items)


if __name__ == "__main__":
    main()
