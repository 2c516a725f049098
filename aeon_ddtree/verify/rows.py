# SPDX-License-Identifier: Apache-2.0
"""Sampling every row of the window with its request's own parameters and keyed noise."""

from __future__ import annotations

from torch import Tensor

from aeon_ddtree.kernels.keyed_sampling import keyed_sample
from aeon_ddtree.tree.draft_tree import DraftTree
from aeon_ddtree.verify.adjust import adjust_logits
from aeon_ddtree.verify.state import SamplingState


def sample_rows(logits: Tensor, state: SamplingState, tree: DraftTree, *, base_index: Tensor) -> Tensor:
    """The target's token after every row: [R, W] int64 from `logits` [R, W, V].

    base_index [R] int64 is the output index of the token sampled at the root row, that is the length of the output so
    far; row i draws output token base_index + depth, so it uses the very noise that plain decoding would use there.
    Padding rows are sampled too, with a valid but meaningless result: the walk never reaches them.
    """
    return sample_adjusted(adjust_logits(logits, state, tree), state, tree, base_index=base_index)


def sample_adjusted(adjusted: Tensor, state: SamplingState, tree: DraftTree, *, base_index: Tensor) -> Tensor:
    """As `sample_rows`, for logits that `adjust_logits` has already seen (when the caller also needs them)."""
    if state.temperature is None:
        return adjusted.argmax(dim=2)
    assert state.seed is not None
    width = tree.width

    def per_row(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.repeat_interleave(width)

    token = keyed_sample(
        adjusted.reshape(-1, adjusted.shape[2]),
        state.temperature.repeat_interleave(width),
        per_row(state.top_k),
        per_row(state.top_p),
        per_row(state.min_p),
        state.seed.repeat_interleave(width),
        (base_index[:, None] + tree.depth).reshape(-1),
    )
    return token.view(-1, width)
