# SPDX-License-Identifier: Apache-2.0
"""`CommitPlan`: which rows of the window become committed state, and which tokens are emitted."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class CommitPlan:
    """R requests, P = horizon + 1.

    path          [R, P] int64  committed rows, root first, -1 after the end; never empty: the root is always folded
    parent_rows   [R, P] int64  row -> parent row along the path; -1 for the root and after the end
    num_accepted  [R]    int64  accepted nodes: committed rows - 1
    num_emitted   [R]    int64  emitted tokens: num_accepted + 1, the bonus is emitted but not committed
    bonus         [R]    int64  the last emitted token, root of the next tree
    emitted       [R, P] int64  accepted tokens, then the bonus, -1 after it
    moves         [R]    bool   True where the committed rows are not 0, 1, 2 …, so that KV rows must be moved
    carried       [R, P] int64  verified tokens beyond the bonus, -1 after the end: they head the next tree's spine
    num_carried   [R]    int64
    """

    path: Tensor
    parent_rows: Tensor
    num_accepted: Tensor
    num_emitted: Tensor
    bonus: Tensor
    emitted: Tensor
    moves: Tensor
    carried: Tensor
    num_carried: Tensor

    @property
    def max_len(self) -> int:
        """P, the most rows that a plan commits."""
        return self.path.shape[1]

    def select(self, index: Tensor) -> CommitPlan:
        """The plans of the requests in `index` [N]."""
        return CommitPlan(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def path_len(self, active: Tensor | None = None) -> Tensor:
        """[R] int64: committed rows, root included; 0 where `active` [R] bool is False (nothing is touched there)."""
        length = self.num_accepted + 1
        return length if active is None else torch.where(active, length, 0)

    def cut(self, max_emitted: Tensor) -> CommitPlan:
        """Emit at most max_emitted[r] tokens ([R] int64, values below 1 count as 1): EOS, max_tokens, model length.

        The token at the cut becomes the bonus, so no state advances past it; nothing is carried over a cut.
        """
        limit = max_emitted.to(torch.int64).clamp(min=1)
        is_cut = limit < self.num_emitted
        num_emitted = torch.minimum(self.num_emitted, limit)
        steps = torch.arange(self.max_len, device=self.path.device)
        on_path = steps < num_emitted[:, None]
        path = torch.where(on_path, self.path, -1)
        last = self.emitted.gather(1, num_emitted[:, None] - 1).squeeze(1)
        return CommitPlan(
            path=path,
            parent_rows=torch.where(on_path, self.parent_rows, -1),
            num_accepted=num_emitted - 1,
            num_emitted=num_emitted,
            bonus=torch.where(is_cut, last, self.bonus),
            emitted=torch.where(on_path, self.emitted, -1),
            moves=((path != steps) & on_path).any(dim=1),
            carried=torch.where(is_cut[:, None], -1, self.carried),
            num_carried=torch.where(is_cut, 0, self.num_carried),
        )
