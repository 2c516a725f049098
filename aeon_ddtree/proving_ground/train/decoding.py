# SPDX-License-Identifier: Apache-2.0
"""Batched generation with the training-form target: rows of different prompt lengths, one CUDA graph replayed."""

from __future__ import annotations

import torch
from torch import Tensor

from aeon_ddtree.proving_ground.train.target import Target


@torch.no_grad()
def generate(target: Target, prompts: Tensor, lengths: Tensor, steps: int, sampled: Tensor) -> Tensor:
    """Continue each row to `prompts.shape[1] + steps` tokens.

    prompts [B, P] int64 (rows padded at the end with anything), lengths [B] (≥ 1) real prompt tokens, sampled [B] bool
    (True: T = 1 by Gumbel-max, False: greedy). Row r's own continuation starts at lengths[r]. Returns [B, P + steps].
    """
    batch, width = prompts.shape
    device, total = prompts.device, width + steps
    tokens = torch.zeros(batch, total, dtype=torch.long, device=device)
    tokens[:, :width] = prompts
    caches = target.new_cache(batch, total)
    at = torch.zeros(1, dtype=torch.long, device=device)

    def one() -> None:
        logits = target.decode(tokens.index_select(1, at)[:, 0], caches, at)
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp_(1e-20, 1 - 1e-7)))
        chosen = (logits + noise * sampled[:, None]).argmax(-1)
        following = at + 1
        given = tokens.index_select(1, following)[:, 0]
        tokens.index_copy_(1, following, torch.where(following < lengths, given, chosen)[:, None])
        at.add_(1)

    if device.type != "cuda":
        for _ in range(total - 1):
            one()
        return tokens
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        one()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one()
    # The warm-up step above has run (position 0 is done); capturing ran nothing.
    for _ in range(total - 2):
        graph.replay()
    torch.cuda.synchronize()
    return tokens


@torch.no_grad()
def features_of(target: Target, tokens: Tensor, rows: int = 128) -> Tensor:
    """Drafter features [N, L, F · hidden] (bf16 on CUDA, fp32 on the CPU) of tokens [N, L]."""
    dtype = torch.bfloat16 if tokens.is_cuda else torch.float32
    parts = []
    for start in range(0, len(tokens), rows):
        kept = target(tokens[start : start + rows], features=True)[1]
        assert kept is not None
        parts.append(kept.to(dtype))
    return torch.cat(parts)
