# SPDX-License-Identifier: Apache-2.0
"""What changes the logits before temperature: every row sees the history of its own path.

The history of row i is the committed history of its request (which ends in the root) and the tokens of the nodes on
the way from the root to row i, row i included. Order and formulas are those of vLLM's sampler, so that a tree of the
root alone samples exactly as plain decoding does: allowed tokens, bad words, min_tokens, logit bias, repetition,
frequency and presence penalties.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aeon_ddtree.tree.draft_tree import DraftTree
from aeon_ddtree.verify.state import SamplingState

_FORBIDDEN = float("-inf")


def adjust_logits(logits: Tensor, state: SamplingState, tree: DraftTree) -> Tensor:
    """Logits [R, W, V] of every row, adjusted by `state` with the history of the row's path.

    Returns fp32 (fp64 for fp64), a new tensor whenever anything was changed; `logits` itself is never written.
    Padding rows get the values of a row without nodes. Temperature, min-p, top-k and top-p come later, in sampling.
    """
    if tuple(logits.shape[:2]) != tuple(tree.token.shape):
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} for trees of {tuple(tree.token.shape)}: expected [R, W, V] "
            "with one row of logits per row of the window"
        )
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if not state.adjusts:
        return logits.to(dtype)
    out = logits.to(dtype, copy=True)
    if state.allowed is not None:
        allowed = state.allowed if state.allowed.dim() == 3 else state.allowed[:, None]
        out.masked_fill_(~allowed, _FORBIDDEN)
    if state.bad_words is not None:
        _forbid_bad_words(out, state, tree)
    if state.min_tokens is not None:
        assert state.output_len is not None and state.stop_mask is not None
        too_short = state.output_len[:, None] + tree.depth < state.min_tokens[:, None]
        out.masked_fill_(too_short[:, :, None] & state.stop_mask[:, None], _FORBIDDEN)
    if state.logit_bias is not None:
        out += state.logit_bias[:, None].to(dtype)
    if state.has_penalties:
        _apply_penalties(out, state, tree)
    return out


def path_tail(tree: DraftTree, last_tokens: Tensor, count: int) -> Tensor:
    """[R, W, count] int64: the newest `count` tokens of every row's history, newest last, -1 where there is none.

    `last_tokens` [R, H] right-aligned output tokens, H >= count, the root's token at its end.
    """
    held = last_tokens.shape[1]
    row = torch.arange(tree.width, device=tree.device).expand_as(tree.parent)
    depth = tree.depth
    tail = []
    for back in range(count):  # steps up from the row itself; bounded by the longest bad word
        on_tree = back < depth
        committed = (held - 1 - (back - depth)).clamp(0, held - 1)  # row -> column of last_tokens
        tail.append(torch.where(on_tree, tree.token.gather(1, row), last_tokens.gather(1, committed)))
        row = tree.parent.gather(1, row).clamp(min=0)
    return torch.stack(tail[::-1], dim=2)


def _forbid_bad_words(logits: Tensor, state: SamplingState, tree: DraftTree) -> None:
    """Forbid the last token of every bad word whose earlier tokens end the row's history (output tokens only)."""
    words, length = state.bad_words, state.bad_words_len
    assert words is not None and length is not None
    longest = words.shape[2]
    matched = (length > 0)[:, None, :].expand(-1, tree.width, -1)
    if longest > 1:
        assert state.last_tokens is not None
        tail = path_tail(tree, state.last_tokens, longest - 1)
        column = torch.arange(longest - 1, device=words.device)
        before_word = column < longest - length[:, :, None]  # [R, n, m - 1]
        equal = tail[:, :, None, :] == words[:, None, :, :-1]
        matched = matched & (equal | before_word[:, None]).all(dim=3)
    # A minimum keeps several words with one last token from undoing each other.
    cap = torch.where(matched, _FORBIDDEN, float("inf")).to(logits.dtype)
    last = words[:, None, :, -1].clamp(0, logits.shape[2] - 1).expand_as(cap)
    logits.scatter_reduce_(2, last, cap, reduce="amin", include_self=True)


def _apply_penalties(logits: Tensor, state: SamplingState, tree: DraftTree) -> None:
    """Penalise all rows by the committed history, then put right the few entries that the tree's own tokens change.

    A row's counts differ from the committed ones only at tokens that stand in its window, so W entries per row are
    recomputed instead of holding counts of [R, W, V]. Writes `logits`.
    """
    base_counts, prompt_mask = state.output_counts, state.prompt_mask
    assert base_counts is not None
    token = tree.token.clamp(0, logits.shape[2] - 1)
    index = token[:, None, :].expand(-1, tree.width, -1)
    entries = logits.gather(2, index)
    # on_path[r, i, j]: how often the token of row j stands among the nodes on the path to row i
    nodes_above = (tree.ancestors() & tree.is_node[:, None, :]).to(torch.float32)
    same_token = (token[:, :, None] == token[:, None, :]).to(torch.float32)
    on_path = torch.bmm(nodes_above, same_token).to(base_counts.dtype)
    counts = base_counts.gather(1, token)[:, None, :] + on_path
    in_prompt = None if prompt_mask is None else prompt_mask.gather(1, token)[:, None, :]
    _penalise(entries, counts, in_prompt, state)
    _penalise(logits, base_counts[:, None], None if prompt_mask is None else prompt_mask[:, None], state)
    # Rows of equal token write equal values, so the order of the writes does not matter.
    logits.scatter_(2, index, entries)


def _penalise(logits: Tensor, counts: Tensor, in_prompt: Tensor | None, state: SamplingState) -> None:
    """The three penalties on `logits` [R, *, X], in place; `counts` and `in_prompt` broadcast to it.

    Repetition: x / penalty where x > 0, else x * penalty, for tokens of prompt or output; frequency: x - penalty *
    count in the output; presence: x - penalty for tokens of the output.
    """
    seen = counts > 0
    if state.repetition_penalty is not None:
        assert in_prompt is not None
        penalty = state.repetition_penalty.to(logits.dtype)[:, None, None]
        penalty = torch.where(in_prompt | seen, penalty, 1.0)
        # The halves above and below 0 apart: exact, -inf included, and several times faster than a broadcast where.
        below = logits.clamp(max=0).mul_(penalty)
        logits.clamp_(min=0).mul_(1.0 / penalty).add_(below)
    if state.frequency_penalty is not None:
        logits -= state.frequency_penalty.to(logits.dtype)[:, None, None] * counts
    if state.presence_penalty is not None:
        logits -= state.presence_penalty.to(logits.dtype)[:, None, None] * seen
