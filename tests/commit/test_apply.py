# SPDX-License-Identifier: Apache-2.0
"""Carrying a plan out: afterwards every piece of committed state is what plain decoding of the same tokens leaves."""

import random

import pytest
import torch
import tree_oracles as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from aeon_ddtree.commit import apply_conv, apply_history, apply_kv, apply_recurrent, plan_for
from aeon_ddtree.kernels.causal_conv_tree import causal_conv_chain, causal_conv_tree
from aeon_ddtree.kernels.gated_delta_tree import gated_delta_chain, gated_delta_tree
from aeon_ddtree.verify import RequestParams, build_sampling_state, walk

VOCAB, HORIZON = 6, 9
P = HORIZON + 1
LAYERS, SLOTS = 3, 7
KEY_HEADS, VALUE_HEADS, DIM = 2, 4, 5
CHANNELS, TAPS = 6, 4

SEEDS = st.integers(0, 10**6)
BUDGETS = st.sampled_from([1, 4, 15, 31])
POLICY = st.sampled_from(["branch", "flat"])


class Case:
    """Three requests in slots of any order: one inactive, one without a state, all with walked trees."""

    def __init__(self, seed: int, budget: int, policy: str) -> None:
        rng = random.Random(seed)
        self.requests, self.width = 3, budget + 1
        trees = [oracle.random_tree(rng, rng.randint(0, budget), VOCAB, HORIZON) for _ in range(self.requests)]
        self.tree = oracle.batch(trees, self.width)
        sampled = torch.randint(VOCAB, (self.requests, self.width), generator=torch.Generator().manual_seed(seed))
        for r, tree in enumerate(trees):  # mostly a child of the row, so that walks get deep
            for row in range(tree.num_nodes, 0, -1):
                if rng.random() < 0.7:
                    sampled[r, tree.parent[row]] = tree.token[row]
        self.plan = plan_for(policy, self.tree, sampled, walk(self.tree, sampled, P))
        self.slots = torch.tensor(rng.sample(range(SLOTS), self.requests))
        self.active = torch.tensor([True, rng.random() < 0.5, True])
        self.has_state = torch.tensor([True, True, rng.random() < 0.5])
        self.length = torch.where(self.active, self.plan.num_accepted + 1, 0)
        self.noise = torch.Generator().manual_seed(seed)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self.noise)

    def along_path(self, x: torch.Tensor) -> torch.Tensor:
        """[R, P, ...]: the window's inputs in the order in which plain decoding would see them."""
        rows = self.plan.path.clamp(min=0)
        return x.gather(1, rows.view(*rows.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))

    def states(self, *shape: int) -> torch.Tensor:
        """[SLOTS, ...]; the slot of a request without a state holds what a predecessor left, here NaN."""
        state = self.random(SLOTS, *shape)
        state[self.slots[~self.has_state]] = float("nan")
        return state

    def check_others_untouched(self, before: torch.Tensor, after: torch.Tensor) -> None:
        others = torch.ones(SLOTS, dtype=torch.bool)
        others[self.slots[self.length > 0]] = False
        assert torch.equal(before[others].nan_to_num(7), after[others].nan_to_num(7))


@settings(max_examples=40, deadline=None)
@given(SEEDS, BUDGETS, POLICY)
def test_recurrent_state_of_every_layer_equals_plain_decoding(seed, budget, policy):
    case = Case(seed, budget, policy)
    window = (case.requests, case.width)
    layers, expected, before = [], [], []
    for _ in range(LAYERS):
        q, k = case.random(*window, KEY_HEADS, DIM), case.random(*window, KEY_HEADS, DIM)
        v = case.random(*window, VALUE_HEADS, DIM)
        a, b = case.random(*window, VALUE_HEADS), case.random(*window, VALUE_HEADS)
        A_log, dt_bias = case.random(VALUE_HEADS), case.random(VALUE_HEADS)
        state = case.states(VALUE_HEADS, DIM, DIM)
        _, factors = gated_delta_tree(
            q, k, v, a, b, A_log, dt_bias, state, case.slots, case.tree.parent, has_state=case.has_state
        )
        plain = state.clone()
        inputs = [case.along_path(x) for x in (q, k, v, a, b)]
        gated_delta_chain(*inputs, A_log, dt_bias, plain, case.slots, case.length, has_state=case.has_state)
        layers.append((state, factors))
        expected.append(plain)
        before.append(state.clone())
    apply_recurrent(layers, case.slots, case.plan, has_state=case.has_state, active=case.active)
    for (state, _), plain, old in zip(layers, expected, before):
        torch.testing.assert_close(state, plain, rtol=1e-9, atol=1e-9, equal_nan=True)
        case.check_others_untouched(old, state)
        assert not torch.equal(state[case.slots[0]], old[case.slots[0]])  # the root is folded, whatever was accepted


@settings(max_examples=40, deadline=None)
@given(SEEDS, BUDGETS, POLICY)
def test_convolution_window_of_every_layer_equals_plain_decoding(seed, budget, policy):
    case = Case(seed, budget, policy)
    layers, expected, before = [], [], []
    for _ in range(LAYERS):
        x, weight = case.random(case.requests, case.width, CHANNELS), case.random(CHANNELS, TAPS)
        conv_state = case.states(TAPS - 1, CHANNELS)
        causal_conv_tree(x, conv_state, weight, None, case.slots, case.tree.parent, has_state=case.has_state)
        plain = conv_state.clone()
        causal_conv_chain(case.along_path(x), plain, weight, None, case.slots, case.length, has_state=case.has_state)
        layers.append((conv_state, x))
        expected.append(plain)
        before.append(conv_state.clone())
    apply_conv(layers, case.slots, case.plan, has_state=case.has_state, active=case.active)
    for (conv_state, _), plain, old in zip(layers, expected, before):
        assert torch.equal(conv_state.nan_to_num(7), plain.nan_to_num(7))
        case.check_others_untouched(old, conv_state)


@settings(max_examples=40, deadline=None)
@given(SEEDS, BUDGETS, POLICY, st.sampled_from([2, 3, 16]))
def test_keys_and_values_stand_in_path_order_in_every_layer_of_every_group(seed, budget, policy, block):
    case = Case(seed, budget, policy)
    rng = random.Random(seed)
    context = torch.tensor([rng.randint(0, 9) for _ in range(case.requests)])
    blocks = -(-(9 + case.width) // block)
    groups, before = [], []
    for _ in range(2):  # two groups with block tables of their own, two layers each
        table = torch.randperm(case.requests * blocks, generator=case.noise).view(case.requests, blocks)
        caches = [(case.random(case.requests * blocks, block, 2, 3), case.random(case.requests * blocks, block, 2, 4))]
        caches.append((caches[0][0] + 1000, caches[0][1] + 1000))
        groups.append((caches, table, context))
        before.append([(k.clone(), v.clone()) for k, v in caches])

    def entry(cache: torch.Tensor, table: torch.Tensor, r: int, position: int) -> torch.Tensor:
        return cache[table[r, position // block], position % block]

    apply_kv(groups, case.plan, active=case.active)
    for (caches, table, _), olds in zip(groups, before):
        for new_pair, old_pair in zip(caches, olds):
            for new, old in zip(new_pair, old_pair):
                for r in range(case.requests):
                    start = int(context[r])
                    for position in range(start):  # committed before
                        assert torch.equal(entry(new, table, r, position), entry(old, table, r, position))
                    rows = case.plan.path[r, : int(case.length[r])].tolist()
                    for i, row in enumerate(rows):
                        assert torch.equal(entry(new, table, r, start + i), entry(old, table, r, start + row))
                    if not rows or not case.plan.moves[r]:
                        for row in range(case.width):
                            assert torch.equal(entry(new, table, r, start + row), entry(old, table, r, start + row))


@settings(max_examples=40, deadline=None)
@given(SEEDS, BUDGETS, POLICY)
def test_history_grows_by_the_emitted_tokens(seed, budget, policy):
    case = Case(seed, budget, policy)
    common = {
        "presence_penalty": 1.0,
        "bad_words_token_ids": [[1, 2, 3, 4]],
        "min_tokens": 99,
        "stop_token_ids": [0],
    }
    outputs = [[slot % VOCAB] * slot for slot in range(SLOTS)]
    state = build_sampling_state([RequestParams(output_ids=o, **common) for o in outputs], VOCAB)
    apply_history(state, case.slots, case.plan, active=case.active)
    for r, slot in enumerate(case.slots.tolist()):
        if case.active[r]:
            outputs[slot] = outputs[slot] + case.plan.emitted[r, : int(case.plan.num_emitted[r])].tolist()
    rebuilt = build_sampling_state([RequestParams(output_ids=o, **common) for o in outputs], VOCAB)
    for name, value in rebuilt.tensors().items():
        assert torch.equal(state.tensors()[name], value), name


@pytest.mark.parametrize("policy", ["branch", "flat"])
def test_select_takes_plans_of_some_requests(policy):
    case = Case(3, 15, policy)
    index = torch.tensor([2, 0])
    picked = case.plan.select(index)
    for name in vars(case.plan):
        assert torch.equal(getattr(picked, name), getattr(case.plan, name)[index]), name
