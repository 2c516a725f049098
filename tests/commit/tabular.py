# SPDX-License-Identifier: Apache-2.0
"""A tabular target, a drafter that is sometimes right, and the whole step around them, for many requests at once.

The target's logits are a table of the last two tokens, so every row of every tree has exact logits without a model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from aeon_ddtree.commit import CommitPlan, apply_history, plan_for
from aeon_ddtree.tree import Candidates, DraftTree, TreePolicy, build_tree_from, chain_tree, draft_candidates, root_tree
from aeon_ddtree.verify import RequestParams, build_sampling_state, sample_rows, walk


@dataclass
class Tabular:
    """target [V, V, V]: logits after (token before last, last). A drafter is the target's own table, disturbed."""

    vocab: int
    seed: int
    disturb: float = 1.0
    target: Tensor = field(init=False)
    draft: Tensor = field(init=False)

    def __post_init__(self) -> None:
        noise = torch.Generator().manual_seed(self.seed)
        shape = (self.vocab,) * 3
        self.target = torch.randn(shape, generator=noise) * 2
        self.draft = self.target + torch.randn(shape, generator=noise) * self.disturb

    def draft_logits(self, before: Tensor, last: Tensor, horizon: int) -> Tensor:
        """[R, horizon, V]: position by position along the drafter's own greedy continuation."""
        rows = []
        for _ in range(horizon):
            logits = self.draft[before, last]
            rows.append(logits)
            before, last = last, logits.argmax(1)
        return torch.stack(rows, dim=1)

    def window_logits(self, tree: DraftTree, before: Tensor) -> Tensor:
        """[R, W, V]: the target's logits after every row; `before` [R] is the committed token in front of the root."""
        above = torch.where(tree.parent >= 0, tree.token.gather(1, tree.parent.clamp(min=0)), before[:, None])
        return self.target[above, tree.token]


@dataclass
class Step:
    tree: DraftTree
    plan: CommitPlan
    chain: CommitPlan | None


@dataclass
class Decoded:
    outputs: list[list[int]]
    steps: list[Step]


def decode(
    model: Tabular,
    params: list[RequestParams],
    length: int,
    policy: TreePolicy | None,
    commit: str = "branch",
    shrink: bool = False,
    persistent: bool = False,
    beside_chain: bool = False,
) -> Decoded:
    """`length` tokens for every request after its prompt (>= 2 tokens); policy None is plain decoding, window 1.

    The first token is sampled from the prompt's last row, as an engine does after its prefill. With `shrink` windows
    are truncated and some requests run as chains, changing from step to step. With `persistent` the sampling state is
    built once, lives in slots of another order, and is advanced on the device; otherwise it is rebuilt from lists.
    `beside_chain` also plans, for every step, what a chain of the same candidates would have accepted.
    """
    requests = len(params)
    outputs: list[list[int]] = [[] for _ in params]
    carried: Tensor | None = None
    num_carried: Tensor | None = None
    result = Decoded(outputs, [])

    def history(back: int) -> Tensor:
        return torch.tensor([(list(p.prompt_ids) + out)[-back] for p, out in zip(params, outputs)])

    slots = torch.arange(requests).flip(0)
    held = build_sampling_state([replace(p, output_ids=()) for p in params[::-1]], model.vocab)
    turn = 0
    while min(len(out) for out in outputs) < length:
        if persistent:
            state = held.select(slots)
        else:
            now = [replace(p, output_ids=list(out)) for p, out in zip(params, outputs)]
            state = build_sampling_state(now, model.vocab)
        index = torch.tensor([len(out) for out in outputs])
        before, root = history(2), history(1)
        if policy is None or turn == 0:
            tree, chain = root_tree(root), None
            max_len = 1
        else:
            logits = model.draft_logits(before, root, policy.horizon)
            temperature = torch.tensor([p.temperature for p in params])
            seed = torch.zeros(requests, dtype=torch.int64) if state.seed is None else state.seed
            candidates = draft_candidates(logits, policy, temperature=temperature, seed=seed, index=index)
            limits = {}
            if shrink:
                limits["chain_only"] = (torch.arange(requests) + turn) % 5 == 0
                limits["max_nodes"] = (torch.arange(requests) * 3 + turn) % (policy.budget + 2)
            tree = build_tree_from(candidates, root, policy, carried=carried, num_carried=num_carried, **limits)
            tree.validate(vocab_size=model.vocab, horizon=policy.horizon)
            if shrink:
                tree = tree.truncate((torch.arange(requests) + turn) % policy.width + 1)
                tree.validate(vocab_size=model.vocab, horizon=policy.horizon)
            chain = _chain_of(candidates, root, policy, carried, num_carried) if beside_chain else None
            max_len = policy.max_path
        plan = _verify(model, tree, state, before, index, max_len, commit)
        beside = None if chain is None else _verify(model, chain, state, before, index, max_len, "branch")
        result.steps.append(Step(tree, plan, beside))
        if persistent:
            apply_history(held, slots, plan)
        for r, (count, row) in enumerate(zip(plan.num_emitted.tolist(), plan.emitted.tolist())):
            outputs[r] += row[:count]
        carried, num_carried = plan.carried, plan.num_carried
        turn += 1
    return result


def _verify(model, tree, state, before, index, max_len, commit) -> CommitPlan:
    sampled = sample_rows(model.window_logits(tree, before), state, tree, base_index=index)
    return plan_for(commit, tree, sampled, walk(tree, sampled, max_len))


def _chain_of(
    candidates: Candidates, root: Tensor, policy: TreePolicy, carried: Tensor | None, num_carried: Tensor | None
) -> DraftTree:
    """What a chain of the same candidates would verify: rank 0 per position, the carried tokens in front."""
    draft = candidates.token[:, :, 0]
    if carried is not None and num_carried is not None:
        ahead = torch.arange(policy.horizon) < num_carried[:, None]
        columns = torch.nn.functional.pad(carried, (0, policy.horizon), value=0)[:, : policy.horizon]
        draft = torch.where(ahead, columns, draft)
    return chain_tree(root, draft, torch.full((root.shape[0],), min(policy.horizon, policy.budget)))
