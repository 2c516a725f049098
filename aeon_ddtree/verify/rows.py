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
    token = keyed_sample(*_per_row(adjusted, state, tree, base_index))
    assert isinstance(token, Tensor)
    return token.view(-1, tree.width)


def sample_gaps(
    adjusted: Tensor, state: SamplingState, tree: DraftTree, *, base_index: Tensor
) -> tuple[Tensor, Tensor]:
    """As `sample_adjusted`, and by how much each token won: (sampled [R, W] int64, gap [R, W] fp32).

    The gap is that between the best and the second-best score: of adjusted logits where the request is greedy, else of
    logits / temperature + noise over the allowed set. Infinite where nothing else was allowed.
    """
    if state.temperature is None:
        if adjusted.shape[2] == 1:
            return adjusted.argmax(dim=2), adjusted.new_full(adjusted.shape[:2], float("inf"))
        best, second = adjusted.topk(2, dim=2).values.unbind(2)
        return adjusted.argmax(dim=2), best - second
    token, gap = keyed_sample(*_per_row(adjusted, state, tree, base_index), return_scores=True)
    return token.view(-1, tree.width), gap.view(-1, tree.width)


def _per_row(
    adjusted: Tensor, state: SamplingState, tree: DraftTree, base_index: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor, Tensor]:
    """The arguments of `keyed_sample`, request parameters repeated for every row of the window."""
    assert state.temperature is not None and state.seed is not None

    def spread(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.repeat_interleave(tree.width)

    return (
        adjusted.flatten(0, 1),
        state.temperature.repeat_interleave(tree.width),
        spread(state.top_k),
        spread(state.top_p),
        spread(state.min_p),
        state.seed.repeat_interleave(tree.width),
        (base_index[:, None] + tree.depth).flatten(),
    )
