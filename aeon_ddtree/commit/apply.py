# SPDX-License-Identifier: Apache-2.0
"""Carrying out a `CommitPlan`. Committed state (recurrent state, conv window, KV rows, sampling history) changes here,
and, for prompts and plain decoding, in the chain kernels that advance it token by token; nowhere else.

Every function takes `active` [R] bool: requests where it is False are left exactly as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from aeon_ddtree.commit.plan import CommitPlan
from aeon_ddtree.kernels.causal_conv_tree import conv_commit
from aeon_ddtree.kernels.compact_kv import compact_kv
from aeon_ddtree.kernels.gated_delta_tree import TreeFactors, fold_state
from aeon_ddtree.verify.history import record_emitted
from aeon_ddtree.verify.state import SamplingState

KVGroup = tuple[Sequence[tuple[Tensor, Tensor]], Tensor, Tensor]
"""One KV-cache group: its layers' (k_cache, v_cache), block_table [R, max_blocks], context_len [R]."""


def apply_recurrent(
    layers: Iterable[tuple[Tensor, TreeFactors]],
    slots: Tensor,
    plan: CommitPlan,
    *,
    has_state: Tensor | None = None,
    active: Tensor | None = None,
) -> None:
    """Fold the committed path into the state of every recurrent layer, in place.

    layers: (state [S, Hv, Dv, Dk], factors of this window) of *every* layer; slots [R]: request -> state slot;
    has_state [R] bool: False starts from a zero state.
    """
    length = plan.path_len(active)
    for state, factors in layers:
        fold_state(state, slots, factors, plan.path, length, has_state=has_state)


def apply_conv(
    layers: Iterable[tuple[Tensor, Tensor]],
    slots: Tensor,
    plan: CommitPlan,
    *,
    has_state: Tensor | None = None,
    active: Tensor | None = None,
) -> None:
    """Move the conv window of every layer along the committed path, in place.

    layers: (conv_state [S, K - 1, C], inputs of this window x [R, W, C]) of every layer.
    """
    length = plan.path_len(active)
    for conv_state, x in layers:
        conv_commit(conv_state, slots, x, plan.path, length, has_state=has_state)


def apply_kv(groups: Iterable[KVGroup], plan: CommitPlan, *, active: Tensor | None = None) -> None:
    """Bring the committed rows' keys and values to consecutive places, in every layer of every KV group.

    context_len [R] counts the committed positions before the root. Consecutive paths stay where they are.
    """
    length = plan.path_len(active)
    for caches, block_table, context_len in groups:
        compact_kv(list(caches), block_table, context_len, plan.path, length)


def apply_history(state: SamplingState, slots: Tensor, plan: CommitPlan, *, active: Tensor | None = None) -> None:
    """Append the emitted tokens to a persistent sampling history, in place; slots [R]: request -> row of `state`."""
    count = plan.num_emitted if active is None else torch.where(active, plan.num_emitted, 0)
    record_emitted(state, slots, plan.emitted, count)


def gather_rows(hidden: Tensor, plan: CommitPlan) -> Tensor:
    """[R, P, H]: the committed rows of `hidden` [R, W, H], root first; the root's row again after the end of the path.

    These are the target's hidden states for the drafter's context: root and accepted nodes, never the bonus.
    """
    row = plan.path.clamp(min=0)
    return hidden.gather(1, row[:, :, None].expand(-1, -1, hidden.shape[2]))
