# SPDX-License-Identifier: Apache-2.0
"""The committed pair: size, formats, picture prompts, held-out prompts."""

from __future__ import annotations

import random
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoProcessor, Qwen3_5ForConditionalGeneration

from aeon_ddtree.proving_ground.corpus import build, overlap, prompts, sources
from aeon_ddtree.proving_ground.pair import CATEGORIES, DRAFTER_DIR, TARGET_DIR, held_out_prompts
from aeon_ddtree.proving_ground.train import architecture as arch
from aeon_ddtree.proving_ground.train.checkpoint import load_tensors
from aeon_ddtree.proving_ground.train.package import LIMIT_BYTES


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TARGET_DIR / "tokenizer.json"))


def test_size_and_dtype() -> None:
    files = [f for d in (TARGET_DIR, DRAFTER_DIR) for f in d.iterdir()]
    assert sum(f.stat().st_size for f in files) <= LIMIT_BYTES
    for folder in (TARGET_DIR, DRAFTER_DIR):
        tensors = load_tensors(folder)
        assert all(t.dtype == torch.bfloat16 and torch.isfinite(t).all() for t in tensors.values())
    assert (TARGET_DIR / "tokenizer.json").read_bytes() == (DRAFTER_DIR / "tokenizer.json").read_bytes()


def test_tokenizer_round_trip_and_special_ids(tokenizer: Tokenizer) -> None:
    for text in ("def f(x):\n\treturn x ** 2  # naïve\r\n", '{"ключ": [1, 2.5]}\n', "日本語 🙂"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    for token, index in arch.TOKEN_ID.items():
        assert tokenizer.encode(token).ids == [index]


def test_picture_prompt_runs_and_matters() -> None:
    processor = AutoProcessor.from_pretrained(TARGET_DIR)
    model = Qwen3_5ForConditionalGeneration.from_pretrained(TARGET_DIR, dtype=torch.float32).eval()
    message = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}]
    text = processor.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>assistant\n")
    noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    results = []
    for picture in (Image.fromarray(noise), Image.new("RGB", (96, 64), (0, 128, 255))):
        inputs = processor(text=[text], images=[picture], return_tensors="pt")
        assert int((inputs["input_ids"] == arch.TOKEN_ID["<|image_pad|>"]).sum()) == 6
        with torch.no_grad():
            results.append(model(**inputs).logits[0, -1])
    assert torch.isfinite(results[0]).all() and (results[0] - results[1]).abs().max() > 1e-3


def test_prompts(tokenizer: Tokenizer) -> None:
    rows = held_out_prompts()
    assert Counter(r.category for r in rows) == dict.fromkeys(CATEGORIES, 40)
    assert len({r.prompt for r in rows}) == len({r.id for r in rows}) == 240
    assert [r.category for r in held_out_prompts(6)] == list(CATEGORIES)
    for row in rows:
        assert prompts.SHORTEST <= len(tokenizer.encode(row.prompt).ids) <= prompts.LONGEST
    with pytest.raises(ValueError, match="241"):
        held_out_prompts(241)


def test_generated_prompts_are_not_training_questions() -> None:
    """Arithmetic and reasoning need no documentation, so their whole training draw is repeated here."""
    for category in ("math", "reasoning"):
        item = build.GENERATED[category].item
        held = prompts.draw_items(item, f"{build.SEED}:prompts:{category}", [])
        _, refused = build.generated_documents(category, build.ITEMS // 40, f"{build.SEED}:held:{category}", [], set())
        refused |= {q for q, _ in held}
        _, asked = build.generated_documents(category, build.ITEMS, f"{build.SEED}:train:{category}", [], refused)
        assert not asked & refused and len(asked) > 50_000
        mine = [r.prompt for r in held_out_prompts() if r.category == category]
        known = {q.rstrip(" ") for q, _ in held}
        assert all(any(q in p for q in known) for p in mine)


@pytest.mark.slow
def test_coding_prompts_share_no_long_ngram_with_this_library(tokenizer: Tokenizer) -> None:
    """Against the non-held-out files of the interpreter that runs the test."""
    documents = list(sources.code_documents(Path(sysconfig.get_path("stdlib"))))
    train = [d.text for d in documents if not d.held_out]
    if len(train) < 100:
        pytest.skip("this interpreter comes without the standard library's sources")
    tokens, _ = build.encode(tokenizer, train)
    known = overlap.ngrams([tokens])
    rows = [np.array(tokenizer.encode(r.prompt).ids) for r in held_out_prompts() if r.category == "coding"]
    assert all(overlap.shared(row, known) == 0 for row in rows)
    assert overlap.shared(tokens[1000:1100], known) == 89


def test_overlap_finds_a_planted_window() -> None:
    rng = np.random.default_rng(1)
    train, fresh = rng.integers(0, 3000, 5000), rng.integers(0, 3000, 100)
    known = overlap.ngrams([train])
    assert overlap.shared(fresh, known) == 0
    fresh[40:52] = train[200:212]
    assert overlap.shared(fresh, known) == 1
    fresh[51] += 1
    assert overlap.shared(fresh, known) == 0


def test_generators_are_seeded_and_right() -> None:
    for category, module in build.GENERATED.items():
        a, b = ([module.item(random.Random(s), ["A plain sentence of words."]) for s in range(50)] for _ in range(2))
        assert a == b and all(q and x for q, x in a), category


def test_a_module_and_its_test_fall_on_one_side() -> None:
    names = ["heapq", "json", "bisect", "textwrap", "calendar", "graphlib", "sched", "shelve", "tabnanny", "wave"]
    assert all(sources.is_held_out(f"{n}.py") == sources.is_held_out(f"test/test_{n}.py") for n in names)
