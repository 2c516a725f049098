# SPDX-License-Identifier: Apache-2.0
"""From the drafter's position distributions to a tree: ranking of candidates, best-first and root-leaf building."""

from __future__ import annotations

import torch
from torch import Tensor

from aeon_ddtree.kernels.build_tree import ranking as _ranking
from aeon_ddtree.kernels.build_tree import reference
from aeon_ddtree.kernels.checks import MAX_WIDTH, Shapes, require
from aeon_ddtree.kernels.dispatch import takes_triton

__all__ = ["RANKINGS", "build_root_leaves", "build_tree", "rank_candidates"]

RANKINGS = ("greedy", "coupled", "mixed")


def rank_candidates(
    logits: Tensor, temperature: Tensor, seed: Tensor, index: Tensor, top_k: int, *, ranking: str = "greedy",
    tau: float = 1.0, mix: float = 0.5, softness: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The top_k candidates of every position and the log weights that the builder adds up.

    logits float [R, k, V] of the drafter; temperature float [R] (below 1e-5: always greedy); seed int [R]; index int
    [R], output index of depth 1's token. With q = softmax(logits) and G = keyed_gumbel(seed, index + depth − 1, x):

        greedy   log q
        coupled  log softmax((log q / (tau · temperature) + G) / softness)
        mixed    log((1 − mix) q + mix · softmax((log q / (tau · temperature) + G) / softness))

    tau in (0, 1] sharpens the drafter, softness > 0 says how sure the perturbed ranking is, mix in [0, 1].
    Returns token int64, logp fp32 [R, k, top_k], logp falling, ties by lower token id. On a CUDA device logits of fp64
    and a top_k above 128 take the reference, all others Triton, which ranks by the score before it is normalised.
    """
    shapes = Shapes()
    shapes("logits", logits, "R k V", "float")
    shapes("temperature", temperature, "R", "float")
    shapes("seed", seed, "R", "int")
    shapes("index", index, "R", "int")
    require(1 <= top_k <= shapes["V"], f"top_k is {top_k}, expected 1 to {shapes['V']}, the vocabulary")
    require(ranking in RANKINGS, f"ranking is {ranking!r}, expected one of {', '.join(RANKINGS)}")
    require(0 < tau <= 1, f"tau is {tau}, expected a value in (0, 1]")
    require(0 <= mix <= 1, f"mix is {mix}, expected a value in [0, 1]")
    require(softness > 0, f"softness is {softness}, expected a value above 0")
    arguments = (logits, temperature, seed, index, top_k, ranking, tau, mix, softness)
    if takes_triton(logits) and logits.dtype != torch.float64 and top_k <= MAX_WIDTH:
        from aeon_ddtree.kernels.build_tree import triton_ranking

        return triton_ranking.rank(*arguments)
    return _ranking.rank(*arguments)


def _check(
    token: Tensor, logp: Tensor, root: Tensor, budget: int, carried: Tensor | None, num_carried: Tensor | None,
    max_nodes: Tensor | None, chain_only: Tensor | None,
) -> Shapes:  # fmt: skip
    shapes = Shapes()
    shapes("token", token, "R k K", "int")
    shapes("logp", logp, "R k K", "float")
    shapes("root", root, "R", "int")
    shapes("carried", carried, "R C", "int", optional=True)
    shapes("num_carried", num_carried, "R", "int", optional=True)
    shapes("max_nodes", max_nodes, "R", "int", optional=True)
    shapes("chain_only", chain_only, "R", "bool", optional=True)
    require(shapes["k"] >= 1 and shapes["K"] >= 1, f"token has shape {tuple(token.shape)}, expected k >= 1 and K >= 1")
    require(1 <= budget < MAX_WIDTH, f"budget is {budget}, expected 1 to {MAX_WIDTH - 1}")
    require(
        (carried is None) == (num_carried is None), "num_carried and carried go together: give both tensors or neither"
    )
    return shapes


def build_tree(
    token: Tensor, logp: Tensor, root: Tensor, budget: int, *, spine: int, carried: Tensor | None = None,
    num_carried: Tensor | None = None, max_nodes: Tensor | None = None, chain_only: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Best-first tree on summed logp; children of a node at depth d come from position d's candidates only.

    token int, logp float [R, k, K], candidates of depth 1 … k by falling logp (−inf: not a candidate); root int [R];
    budget = B, nodes without the root; spine 0 … k, rank-0 nodes placed before the search. Ties: lower rank, then the
    parent that entered the tree first.
    carried int [R, C], num_carried int [R]: tokens already verified, depths 1 … num_carried of the spine. There, rank 0
    is the carried token with logp 0, the drafter's candidate equal to it is dropped, the others follow as alternatives;
    carried nodes are always placed first. max_nodes int [R]: fewer nodes than the budget for this request (>= 0).
    chain_only bool [R]: only the rank-0 path, min(k, budget) nodes.

    Returns token, parent, depth int64 [R, B + 1] and num_nodes int64 [R] (root not counted). Row 0 is the root; then
    the rank-0 path as far as it is in the tree; then branches as they were selected, so parents come before children.
    Padding rows have token 0, parent −1, depth 0.
    """
    shapes = _check(token, logp, root, budget, carried, num_carried, max_nodes, chain_only)
    require(0 <= spine <= shapes["k"], f"spine is {spine}, expected 0 to {shapes['k']}, the horizon")
    if takes_triton(token):
        from aeon_ddtree.kernels.build_tree import triton

        return triton.build(token, logp, root, budget, spine, None, carried, num_carried, max_nodes, chain_only)
    return reference.best_first(token, logp, root, budget, spine, carried, num_carried, max_nodes, chain_only)


def build_root_leaves(
    token: Tensor, logp: Tensor, root: Tensor, budget: int, leaves: int, *, carried: Tensor | None = None,
    num_carried: Tensor | None = None, max_nodes: Tensor | None = None, chain_only: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """A spine of budget − leaves nodes (at most k), and the next `leaves` candidates of depth 1 as leaves of the root.

    Arguments and outputs as `build_tree`; leaves 0 … budget. Carried nodes are never given up for leaves; with a
    smaller max_nodes the spine is kept before the leaves.
    """
    _check(token, logp, root, budget, carried, num_carried, max_nodes, chain_only)
    require(0 <= leaves <= budget, f"leaves is {leaves}, expected 0 to {budget}, the budget")
    if takes_triton(token):
        from aeon_ddtree.kernels.build_tree import triton

        return triton.build(token, logp, root, budget, 0, leaves, carried, num_carried, max_nodes, chain_only)
    return reference.root_leaves(token, logp, root, budget, leaves, carried, num_carried, max_nodes, chain_only)
