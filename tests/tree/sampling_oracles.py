# SPDX-License-Identifier: Apache-2.0
"""The sampler of one token in plain Python doubles, written from the definitions, one history at a time."""

from __future__ import annotations

import math
import random

from aeon_ddtree.verify import RequestParams

FORBIDDEN = -math.inf


def adjust(logits: list[float], params: RequestParams, output: list[int]) -> list[float]:
    """Logits of the token after prompt + output, before temperature."""
    out = list(logits)
    for x in range(len(out)):
        if params.allowed_token_ids is not None and x not in params.allowed_token_ids:
            out[x] = FORBIDDEN
    for word in params.bad_words_token_ids:
        if len(word) and list(word[:-1]) == output[len(output) - (len(word) - 1) :] and len(word) - 1 <= len(output):
            out[word[-1]] = FORBIDDEN
    if len(output) < params.min_tokens:
        for x in params.stop_token_ids:
            out[x] = FORBIDDEN
    for x, bias in params.logit_bias.items():
        out[x] += bias
    for x in range(len(out)):
        count = output.count(x)
        if count or x in params.prompt_ids:
            out[x] = out[x] / params.repetition_penalty if out[x] > 0 else out[x] * params.repetition_penalty
        out[x] -= params.frequency_penalty * count
        out[x] -= params.presence_penalty * (count > 0)
    return out


def distribution(adjusted: list[float], params: RequestParams) -> list[float]:
    """Probabilities after temperature, min-p, top-k and top-p, in that order."""
    if params.temperature < 1e-5:
        best = adjusted.index(max(adjusted))
        return [float(x == best) for x in range(len(adjusted))]
    scaled = [x / params.temperature for x in adjusted]
    p = _softmax(scaled)
    if params.min_p > 0:
        scaled = [s if q >= params.min_p * max(p) else FORBIDDEN for s, q in zip(scaled, p)]
    if 0 < params.top_k < len(scaled):
        kth = sorted(scaled, reverse=True)[params.top_k - 1]
        scaled = [s if s >= kth else FORBIDDEN for s in scaled]
    if params.top_p < 1:
        p = _softmax(scaled)
        below = 0.0
        for x in sorted(range(len(p)), key=lambda x: p[x]):  # from the least likely: drop while the tail is <= 1 - p
            below += p[x]
            if below <= 1 - params.top_p and scaled[x] != max(scaled):
                scaled[x] = FORBIDDEN
    return _softmax(scaled)


def _softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


def random_params(rng: random.Random, vocab: int, output: list[int], temperature: float | None = None) -> RequestParams:
    """Any mix of features; about half the requests use none of a given kind."""

    def maybe(value, off):
        return value if rng.random() < 0.5 else off

    def word() -> list[int]:
        length = rng.randint(1, 4)
        if output and rng.random() < 0.6:  # often one that the history really ends in
            prefix = output[-(length - 1) :] if length > 1 else []
            return [*prefix, rng.randrange(vocab)]
        return [rng.randrange(vocab) for _ in range(length)]

    return RequestParams(
        temperature=rng.choice([0.0, 0.7, 1.0]) if temperature is None else temperature,
        seed=rng.getrandbits(64),
        top_k=maybe(rng.randint(1, vocab), 0),
        top_p=maybe(rng.uniform(0.3, 1.0), 1.0),
        min_p=maybe(rng.uniform(0.0, 0.3), 0.0),
        repetition_penalty=maybe(rng.uniform(0.7, 1.8), 1.0),
        frequency_penalty=maybe(rng.uniform(-1.0, 1.0), 0.0),
        presence_penalty=maybe(rng.uniform(-1.0, 1.0), 0.0),
        prompt_ids=[rng.randrange(vocab) for _ in range(rng.randint(1, 5))],
        output_ids=output,
        logit_bias=maybe({x: rng.uniform(-3, 3) for x in rng.sample(range(vocab), 3)}, {}),
        allowed_token_ids=maybe(rng.sample(range(vocab), max(2, vocab * 2 // 3)), None),
        bad_words_token_ids=maybe([word() for _ in range(rng.randint(1, 4))], []),
        min_tokens=maybe(rng.randint(0, len(output) + 6), 0),
        stop_token_ids=maybe(rng.sample(range(vocab), 2), []),
    )
