# SPDX-License-Identifier: Apache-2.0
"""From the drafter's logits to a `DraftTree`: rank the candidates, then let the topology place them.

A topology is a function with the signature of `best_first` below, listed by name in `topologies.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aeon_ddtree.kernels.build_tree import build_root_leaves, build_tree, rank_candidates
from aeon_ddtree.tree.draft_tree import DraftTree
from aeon_ddtree.tree.policy import TreePolicy
from aeon_ddtree.tree.topologies import topology_builder


@dataclass(frozen=True)
class Candidates:
    """The drafter's candidates per position.

    token  [R, k, K] int64  best first; position d - 1 holds the candidates of depth d
    logp   [R, k, K] float  their log-probabilities, descending
    """

    token: Tensor
    logp: Tensor


@dataclass(frozen=True)
class Placement:
    """What a topology may use besides the candidates; all tensors optional, [R] or [R, C] int64 / bool.

    carried, num_carried  tokens already verified beyond the last bonus: depths 1 .. num_carried of the spine
    max_nodes             per-request cap on nodes (token budget, model length, max_tokens)
    chain_only            requests that must get the rank-0 path alone
    """

    carried: Tensor | None = None
    num_carried: Tensor | None = None
    max_nodes: Tensor | None = None
    chain_only: Tensor | None = None


def best_first(candidates: Candidates, root: Tensor, policy: TreePolicy, placement: Placement) -> DraftTree:
    """The spine first, then the nodes of greatest summed log-probability, children of depth d from position d."""
    return DraftTree(
        *build_tree(
            candidates.token,
            candidates.logp,
            root,
            policy.budget,
            spine=policy.spine_nodes,
            carried=placement.carried,
            num_carried=placement.num_carried,
            max_nodes=placement.max_nodes,
            chain_only=placement.chain_only,
        )
    )


def root_leaves(candidates: Candidates, root: Tensor, policy: TreePolicy, placement: Placement) -> DraftTree:
    """A spine of budget - root_leaves nodes and the next candidates of depth 1 as leaves under the root."""
    return DraftTree(
        *build_root_leaves(
            candidates.token,
            candidates.logp,
            root,
            policy.budget,
            policy.root_leaves,
            carried=placement.carried,
            num_carried=placement.num_carried,
            max_nodes=placement.max_nodes,
            chain_only=placement.chain_only,
        )
    )


def draft_candidates(
    logits: Tensor,
    policy: TreePolicy,
    *,
    temperature: Tensor,
    seed: Tensor,
    index: Tensor,
) -> Candidates:
    """Rank the drafter's `logits` [R, k, V] as the policy says.

    temperature [R] float, seed [R] int64, index [R] int64: output index of the token that depth 1 proposes. Coupled
    rankings perturb depth d with the noise of output token index + d - 1, which is the noise the target will draw with.
    """
    if logits.shape[1] != policy.horizon:
        raise ValueError(
            f"drafter logits have {logits.shape[1]} positions, the policy's horizon is {policy.horizon}: "
            "take the horizon from the drafter's block size"
        )
    token, logp = rank_candidates(
        logits,
        temperature,
        seed,
        index,
        min(policy.top_k, logits.shape[2]),
        ranking=policy.ranking,
        tau=policy.tau,
        mix=policy.mix,
        softness=policy.softness,
    )
    return Candidates(token, logp)


def build_tree_from(
    candidates: Candidates,
    root: Tensor,
    policy: TreePolicy,
    *,
    carried: Tensor | None = None,
    num_carried: Tensor | None = None,
    max_nodes: Tensor | None = None,
    chain_only: Tensor | None = None,
) -> DraftTree:
    """Trees of policy.width rows over `root` [R] (the last emitted token of every request).

    The optional tensors are those of `Placement`. Runs on the tensors' device without reading them on the host.
    """
    placement = Placement(carried, num_carried, max_nodes, chain_only)
    return topology_builder(policy.topology)(candidates, root, policy, placement)


def root_tree(root: Tensor) -> DraftTree:
    """Trees of one row, the root [R]: plain decoding as a special case."""
    token = root.to(torch.int64)[:, None]
    return DraftTree(token, torch.full_like(token, -1), torch.zeros_like(token), torch.zeros_like(token[:, 0]))


def chain_tree(root: Tensor, draft: Tensor, length: Tensor | None = None) -> DraftTree:
    """Chain-shaped trees: row i + 1 carries `draft` [R, k][:, i], the first length[r] of them ([R]; None = all k)."""
    requests, horizon = draft.shape
    rows = torch.arange(horizon + 1, device=draft.device)
    num_nodes = torch.full((requests,), horizon, dtype=torch.int64, device=draft.device)
    if length is not None:
        num_nodes = length.to(torch.int64).clamp(0, horizon)
    used = rows <= num_nodes[:, None]
    token = torch.cat((root.to(torch.int64)[:, None], draft.to(torch.int64)), dim=1)
    return DraftTree(
        token=torch.where(used, token, 0),
        parent=torch.where(used, rows - 1, -1),
        depth=torch.where(used, rows, 0),
        num_nodes=num_nodes,
    )
