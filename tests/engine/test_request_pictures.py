# SPDX-License-Identifier: Apache-2.0
"""Pictures in the prompt: positions run by M-RoPE there, so a position is not a count of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image
from shapes import Pair, same_as_plain, staggered

from aeon_ddtree.engine.decoder import Decoder, DecodeRequest

pytestmark = pytest.mark.engine

PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


def picture(seed: int, width: int, height: int) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BILINEAR)


def prompt(text: str, *pictures: Image.Image) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(pictures)}}


def both(mapping: dict[str, Any], seed: int, **params: Any) -> list[DecodeRequest]:
    common = {"max_tokens": 32, "ignore_eos": True, **params}
    return [
        DecodeRequest(mapping, {"temperature": 0.0, **common}),
        DecodeRequest(mapping, {"temperature": 1.0, "seed": seed, **common}),
    ]


def test_text_after_a_picture(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    """Wide and tall pictures take the positions of their longer side only."""
    requests = [
        *both(prompt(PICTURE + pair.prompts[60], picture(1, 192, 64)), 1),
        *both(prompt(pair.prompts[80][:80] + PICTURE + pair.prompts[82], picture(2, 64, 160)), 2),
    ]
    for run in same_as_plain(plain, tree, requests):
        run.branched()
        counts = [len(done[0].prompt_token_ids or ()) for done in run.decoded]
        assert min(counts) > 0


def test_the_picture_matters(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    """Otherwise nothing here would show a wrong position: other pictures and other places change log-probabilities."""
    text = pair.prompts[60]
    requests = [
        DecodeRequest(mapping, {"temperature": 0.0, "max_tokens": 8, "logprobs": 3})
        for mapping in (
            prompt(PICTURE + text, picture(1, 128, 64)),
            prompt(PICTURE + text, picture(7, 128, 64)),
            prompt(PICTURE + text, picture(1, 64, 128)),
            prompt(text, *()),
        )
    ]
    (run,) = same_as_plain(plain, tree, requests, ("branch",))
    first = [done[0].logprobs[0] for done in run.decoded if done[0].logprobs]
    assert len({tuple(sorted(entry.items())) for entry in first}) == 4


def test_several_pictures_beside_text(plain: Decoder, tree: Decoder, pair: Pair) -> None:
    mixed = prompt(f"{PICTURE} and {PICTURE}\n{pair.prompts[61]}", picture(3, 96, 96), picture(4, 64, 128))
    requests = staggered(
        [
            *both(mixed, 5),
            DecodeRequest(pair.prompts[62], {"max_tokens": 32, "temperature": 1.0, "seed": 8}),
            *both(prompt(pair.prompts[63] + PICTURE, picture(5, 256, 64)), 9, presence_penalty=0.4, logprobs=1),
        ],
        every=2,
    )
    for run in same_as_plain(plain, tree, requests):
        run.branched()


def test_a_picture_across_prompt_chunks_and_preemption(plain: Decoder, small: Decoder, pair: Pair) -> None:
    requests = staggered(
        [
            *both(prompt(pair.prompts[64][:150] + PICTURE + pair.prompts[65][:100], picture(6, 192, 192)), 6),
            *both(prompt(PICTURE + pair.prompts[66][:200], picture(8, 128, 192)), 8),
        ],
        every=3,
    )
    for run in same_as_plain(plain, small, requests):
        assert run.fallbacks.keys() <= {"token_budget"}
        assert run.stats["off_spine"] > 0
