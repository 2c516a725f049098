# SPDX-License-Identifier: Apache-2.0
"""Which rows of logits belong to the emitted tokens."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class HasPath(Protocol):
    """A plan or a walk: anything with the accepted rows `path` [R, P], root first, -1 after the end."""

    @property
    def path(self) -> Tensor: ...


def path_logits(logits: Tensor, plan: HasPath) -> Tensor:
    """[R, P, V]: emitted token i of request r was sampled from row [r, i] of the result.

    `logits` [R, W, V], raw or adjusted as the caller likes. Positions after the last emitted token repeat the root's
    row; the caller knows from num_emitted how many to keep.
    """
    row = plan.path.clamp(min=0)
    return logits.gather(1, row[:, :, None].expand(-1, -1, logits.shape[2]))
