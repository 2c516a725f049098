# SPDX-License-Identifier: Apache-2.0
"""Random requests that use everything at once, drawn from a seed; and the search for the smallest case that fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image
from shapes import BUDGET, SMALL_MODEL_LEN

from aeon_ddtree.engine.decoder import DecodeRequest

W = BUDGET + 1
ORDINARY_TOKENS = 3000
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
GRAMMARS: list[dict[str, Any]] = [
    {"choice": ["yes", "no", "none of these"]},
    {"regex": r"[A-Z][a-z]{2,9} \d{1,4}(, [a-z]+)*\."},
    {"grammar": 'root ::= "[" item ("," item)* "]"\nitem ::= [0-9] | "x" | root'},
    {
        "json": {
            "type": "object",
            "properties": {"id": {"type": "integer"}, "tag": {"type": "string", "maxLength": 9}},
            "required": ["id", "tag"],
        }
    },
]


def random_mix(rng: random.Random, prompts: Sequence[str], fits_small: bool) -> list[DecodeRequest]:
    """2 to 11 requests; with fits_small each is within the small engine's context."""
    return [random_request(rng, prompts, fits_small) for _ in range(rng.randint(2, 11))]


def random_request(rng: random.Random, prompts: Sequence[str], fits_small: bool) -> DecodeRequest:
    params: dict[str, Any] = {
        "max_tokens": rng.choice([1, 2, 5, 16, 24, 40]),
        "temperature": rng.choice([0.0, 0.0, 0.5, 1.0, 1.0, 1.5]),
        "seed": rng.getrandbits(40),
    }
    longest = SMALL_MODEL_LEN - params["max_tokens"] if fits_small else 700
    params |= _distribution(rng) | _ends(rng)
    # A grammar and a ban that leave no token between them have no right answer.
    params |= {"structured_outputs": rng.choice(GRAMMARS)} if rng.random() < 0.12 else _logits(rng)
    if "structured_outputs" in params:
        params.pop("min_tokens", None)
    elif "min_tokens" in params:
        params["min_tokens"] = rng.randint(0, params["max_tokens"])
    if rng.random() < 0.15 and params["temperature"]:
        params["n"] = rng.randint(2, 3)
    if rng.random() < 0.25:
        params["logprobs"] = rng.randint(0, 4)
    if rng.random() < 0.1:
        params["prompt_logprobs"] = rng.randint(0, 2)
    return DecodeRequest(
        _prompt(rng, prompts, longest),
        params,
        arrival=rng.choice([0, 0, rng.randrange(25)]),
        abort_after=rng.randint(0, 12) if rng.random() < 0.12 and "n" not in params else None,
        stream=rng.random() < 0.3,
    )


def _prompt(rng: random.Random, prompts: Sequence[str], longest: int) -> Any:
    kind = rng.random()
    text = rng.choice(prompts)
    if kind < 0.08 and longest > 200:
        side = [rng.choice([32, 64, 96, 160]) for _ in range(2)]
        noise = np.random.default_rng(rng.getrandbits(32)).integers(0, 256, (*side, 3), dtype=np.uint8)
        return {"prompt": text[:40] + PICTURE + text[40:90], "multi_modal_data": {"image": [Image.fromarray(noise)]}}
    if kind < 0.6:
        return text[: rng.randint(1, min(len(text), longest))]  # a token has at least one character
    count = rng.choice([1, 2, W - 1, W, W + 1, rng.randint(1, 60), rng.randint(1, 250), rng.randint(1, 700), longest])
    return [rng.randrange(ORDINARY_TOKENS) for _ in range(min(count, longest))]


def _distribution(rng: random.Random) -> dict[str, Any]:
    choices: dict[str, list[Any]] = {
        "top_k": [1, 5, 50],
        "top_p": [0.3, 0.9],
        "min_p": [0.02, 0.2],
    }
    return {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.2}


def _logits(rng: random.Random) -> dict[str, Any]:
    def some(count: int) -> list[int]:
        return rng.sample(range(ORDINARY_TOKENS), count)

    found = {
        "presence_penalty": round(rng.uniform(-1, 2), 2),
        "frequency_penalty": round(rng.uniform(-0.5, 1), 2),
        "repetition_penalty": round(rng.uniform(0.8, 1.5), 2),
        "logit_bias": {token: round(rng.uniform(-5, 4), 1) for token in some(5)},
        "bad_words": rng.sample(["the", " self", "):", "e", " and", "return"], 2),
        "allowed_token_ids": some(rng.choice([3, 1500, 2900])),
    }
    return {name: value for name, value in found.items() if rng.random() < 0.12}


def _ends(rng: random.Random) -> dict[str, Any]:
    found = {
        "stop": rng.sample(["\n", "e", "th", "):", " = ", "self."], 2),
        "stop_token_ids": rng.sample(range(ORDINARY_TOKENS), 200),
        "min_tokens": 1,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    return {name: value for name, value in found.items() if rng.random() < 0.2}


def random_options(rng: random.Random) -> dict[str, Any]:
    """Tree options that need no restart."""
    return {
        "spine": rng.choice(["full", "full", "none", 3]),
        "ranking": rng.choice(["greedy", "coupled", "mixed"]),
        "tau": rng.choice([0.3, 0.7, 1.0]),
        "top_k": rng.choice([4, 8, 20]),
    }


def smallest(requests: list[DecodeRequest], fails: Callable[[list[DecodeRequest]], bool]) -> list[DecodeRequest]:
    """Drop requests one by one as long as the rest still fails."""
    index = 0
    while index < len(requests) and len(requests) > 1:
        rest = requests[:index] + requests[index + 1 :]
        if fails(rest):
            requests = rest
        else:
            index += 1
    return requests
