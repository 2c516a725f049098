# SPDX-License-Identifier: Apache-2.0
"""Every row's logits against a plain-Python sampler given that row's own history."""

import random

import pytest
import sampling_oracles as sampler
import torch
import tree_oracles as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from aeon_ddtree.tree import root_tree
from aeon_ddtree.verify import RequestParams, SamplingState, adjust_logits, build_sampling_state
from aeon_ddtree.verify.adjust import path_tail

VOCAB = 13


def histories(rng: random.Random, trees: list[oracle.OracleTree]) -> list[list[int]]:
    """Outputs that end in the root of each tree."""
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(0, 6))] + [tree.token[0]] for tree in trees]


def check_rows(logits, state, trees, params, width):
    got = adjust_logits(logits, state, oracle.batch(trees, width))
    for r, tree in enumerate(trees):
        for row in range(tree.num_nodes + 1):
            output = list(params[r].output_ids) + [tree.token[i] for i in oracle.path_to(tree, row)]
            expected = torch.tensor(sampler.adjust(logits[r, row].tolist(), params[r], output), dtype=got.dtype)
            torch.testing.assert_close(got[r, row], expected, rtol=2e-6, atol=2e-6)
    return got


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0, 1, 4, 15]))
def test_rows_see_their_own_path(seed, budget):
    rng = random.Random(seed)
    trees = [oracle.random_tree(rng, rng.randint(0, budget), VOCAB, 6) for _ in range(3)]
    params = [sampler.random_params(rng, VOCAB, output) for output in histories(rng, trees)]
    logits = torch.randn(3, budget + 1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    before = logits.clone()
    got = check_rows(logits, build_sampling_state(params, VOCAB), trees, params, budget + 1)
    assert torch.equal(logits, before)
    assert not got.isnan().any()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_fp64_stays_fp64_and_half_becomes_fp32(seed):
    rng = random.Random(seed)
    trees = [oracle.random_tree(rng, 5, VOCAB, 6)]
    params = [sampler.random_params(rng, VOCAB, output) for output in histories(rng, trees)]
    logits = torch.randn(1, 6, VOCAB, generator=torch.Generator().manual_seed(seed)).bfloat16()
    state = build_sampling_state(params, VOCAB)
    assert check_rows(logits, state, trees, params, 6).dtype == torch.float32
    assert check_rows(logits.double(), state, trees, params, 6).dtype == torch.float64


def test_nothing_in_use_costs_nothing():
    state = build_sampling_state([RequestParams(), RequestParams(temperature=0.5, seed=3)], VOCAB)
    assert sorted(state.tensors()) == ["seed", "temperature"]
    assert not state.adjusts
    logits = torch.randn(2, 1, VOCAB)
    assert adjust_logits(logits, state, root_tree(torch.tensor([0, 1]))) is logits


def test_all_greedy_needs_no_tensor_at_all():
    state = build_sampling_state([RequestParams(top_k=3, top_p=0.5, min_p=0.1)] * 2, VOCAB)
    assert state.tensors() == {}


def test_a_siblings_tokens_do_not_count():
    # root -> 1 and root -> 2: the row of token 1 must not be penalised for token 2, nor the root for either.
    tree = oracle.OracleTree([0])
    tree.add(1, 0)
    tree.add(2, 0)
    tree.add(3, 2)
    params = [RequestParams(frequency_penalty=1.0, output_ids=[0])]
    got = adjust_logits(torch.zeros(1, 4, VOCAB), build_sampling_state(params, VOCAB), oracle.batch([tree], 4))
    assert got[0, :, :4].tolist() == [[-1, 0, 0, 0], [-1, -1, 0, 0], [-1, 0, -1, 0], [-1, 0, -1, -1]]


def test_a_token_met_twice_on_a_path_counts_twice():
    tree = oracle.OracleTree([5])
    for parent in range(3):
        tree.add(5, parent)
    params = [RequestParams(frequency_penalty=0.5, presence_penalty=0.25, output_ids=[5])]
    got = adjust_logits(torch.zeros(1, 4, VOCAB), build_sampling_state(params, VOCAB), oracle.batch([tree], 4))
    assert got[0, :, 5].tolist() == [-0.75, -1.25, -1.75, -2.25]


def test_min_tokens_ends_inside_the_window():
    tree = oracle.OracleTree([1])
    for parent in range(3):
        tree.add(2, parent)
    params = [RequestParams(min_tokens=4, stop_token_ids=[9], output_ids=[3, 1])]
    got = adjust_logits(torch.zeros(1, 4, VOCAB), build_sampling_state(params, VOCAB), oracle.batch([tree], 4))
    assert got[0, :, 9].isinf().tolist() == [True, True, False, False]
    done = build_sampling_state([RequestParams(min_tokens=2, stop_token_ids=[9], output_ids=[3, 1])], VOCAB)
    assert done.min_tokens is None


def test_bad_word_across_the_border_of_tree_and_history():
    tree = oracle.OracleTree([4])
    tree.add(5, 0)
    tree.add(6, 0)
    params = [RequestParams(bad_words_token_ids=[[3, 4, 5, 7], [8], [5, 7, 7]], output_ids=[3, 4])]
    got = adjust_logits(torch.zeros(1, 3, VOCAB), build_sampling_state(params, VOCAB), oracle.batch([tree], 3))
    assert [got[0, row].isinf().nonzero().flatten().tolist() for row in range(3)] == [[8], [7, 8], [8]]


def test_bad_words_look_at_the_output_not_at_the_prompt():
    params = [RequestParams(bad_words_token_ids=[[3, 4]], prompt_ids=[3], output_ids=[])]
    got = adjust_logits(torch.zeros(1, 1, VOCAB), build_sampling_state(params, VOCAB), root_tree(torch.tensor([3])))
    assert not got.isinf().any()


def test_two_bad_words_with_one_last_token():
    # The first matches, the second does not: it must not lift the ban.
    params = [RequestParams(bad_words_token_ids=[[4, 7], [5, 7]], output_ids=[4])]
    got = adjust_logits(torch.zeros(1, 1, VOCAB), build_sampling_state(params, VOCAB), root_tree(torch.tensor([4])))
    assert got[0, 0].isinf().nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("held", [3, 5])
def test_path_tail_with_a_longer_history_than_needed(held):
    tree = oracle.OracleTree([4])
    tree.add(5, 0)
    tree.add(6, 1)
    last = torch.tensor([[-1] * (held - 2) + [3, 4]])
    tail = path_tail(oracle.batch([tree], 4), last, 3)
    assert tail[0, :3].tolist() == [[-1, 3, 4], [3, 4, 5], [4, 5, 6]]


def test_allowed_may_differ_by_row():
    allowed = torch.ones(1, 2, VOCAB, dtype=torch.bool)
    allowed[0, 1, :5] = False
    tree = oracle.OracleTree([4])
    tree.add(5, 0)
    got = adjust_logits(torch.zeros(1, 2, VOCAB), SamplingState(allowed=allowed), oracle.batch([tree], 2))
    assert got.isinf().sum(2).tolist() == [[0, 5]]


def test_padding_rows_are_harmless_whatever_they_carry():
    tree = oracle.batch([oracle.OracleTree([4])], 4)
    tree.token[0, 1:] = torch.tensor([-1, VOCAB + 100, 2])
    params = [
        RequestParams(
            repetition_penalty=1.3,
            frequency_penalty=0.3,
            prompt_ids=[1],
            output_ids=[4],
            bad_words_token_ids=[[4, 2]],
            min_tokens=5,
            stop_token_ids=[0],
        )
    ]
    logits = torch.randn(1, 1, VOCAB).expand(1, 4, VOCAB)
    got = adjust_logits(logits, build_sampling_state(params, VOCAB), tree)
    assert torch.equal(got, got[:, :1].expand_as(got))
    assert not got.isnan().any()


def test_logits_of_another_window_are_refused():
    with pytest.raises(ValueError, match=r"expected \[R, W, V\]"):
        adjust_logits(torch.zeros(1, 3, VOCAB), SamplingState(), root_tree(torch.tensor([1])))
