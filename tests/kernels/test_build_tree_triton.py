# SPDX-License-Identifier: Apache-2.0
"""rank_candidates, build_tree and build_root_leaves in Triton against the PyTorch reference."""

import pytest
import torch
from poison import poisoned

from aeon_ddtree.kernels.build_tree import build_root_leaves, build_tree, rank_candidates, ranking, reference

triton_ranking = pytest.importorskip("aeon_ddtree.kernels.build_tree.triton_ranking", exc_type=ImportError)

RANKINGS = ("greedy", "coupled", "mixed")


@pytest.mark.parametrize("kind", ["smooth", "ties", "masked"])
@pytest.mark.parametrize(("top_k", "vocab"), [(1, 17), (17, 17), (2, 300), (8, 300)])
def test_ranks_equal_the_reference(device, monkeypatch, kind, top_k, vocab):
    """300 ids in 5 chunks: more than are looked at closely for two candidates, fewer than for eight."""
    monkeypatch.setattr(triton_ranking, "_BLOCK", 64)
    gen = torch.Generator().manual_seed(top_k)
    logits = torch.randn(3, 1, vocab, generator=gen) * 3
    if kind == "ties":
        logits = logits.round()
    if kind == "masked":
        logits[..., torch.rand(vocab, generator=gen) < 0.5] = -torch.inf
        logits[..., :1] = 0.0
    temperature = torch.tensor([0.0, 1.0, 0.7])
    seed, index = torch.randint(-(2**62), 2**62, (2, 3), generator=gen)
    for name in RANKINGS:
        options = (top_k, name, 0.7, 0.3, 1.3)
        wanted_token, wanted = ranking.rank(logits, temperature, seed, index, *options)
        with poisoned():
            token, logp = rank_candidates(
                *(x.to(device) for x in (logits, temperature, seed, index)),
                top_k, ranking=name, tau=0.7, mix=0.3, softness=1.3,
            )  # fmt: skip
        real = wanted > -torch.inf
        assert token.dtype == torch.int64 and token.shape == logp.shape == (3, 1, top_k)
        torch.testing.assert_close(logp.cpu(), wanted, atol=3e-5, rtol=1e-5)
        # Candidates nearer than rounding may change places; their weights above say that they are as good.
        assert (token.cpu() == wanted_token)[real].float().mean() > 0.99
        if name == "greedy":
            assert torch.equal(token.cpu()[real], wanted_token[real])


def test_coupled_first_choice_is_the_draw(device):
    """Where the drafter equals the target and tau = 1, rank 0 is the very token that the target will draw."""
    from aeon_ddtree.kernels.keyed_sampling import keyed_sample

    gen = torch.Generator().manual_seed(0)
    logits = (torch.randn(4, 3, 300, generator=gen) * 2).to(device)
    seed, index = torch.randint(0, 2**60, (2, 4), generator=gen).to(device)
    temperature = torch.tensor([0.5, 1.0, 1.5, 0.9], device=device)
    token, _ = rank_candidates(logits, temperature, seed, index, 4, ranking="coupled")
    for depth in range(3):
        drawn = keyed_sample(logits[:, depth], temperature, None, None, None, seed, index + depth)
        assert torch.equal(drawn, token[:, depth, 0])


@pytest.mark.parametrize("trial", range(42))
def test_trees_equal_the_reference(device, trial):
    gen = torch.Generator().manual_seed(trial)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=gen)

    horizon, ranks = (1, 4, 7, 15)[trial % 4], (1, 3, 8, 5, 17)[trial % 5]
    budget = (1, 3, 8, 15, 31, 63, 127)[trial % 7]
    logp = (torch.randn(3, horizon, 40, generator=gen) * 2).log_softmax(-1)
    if trial % 3 == 0:
        logp = (logp * 2).round() / 2  # ties
    logp, token = logp.topk(ranks, dim=-1)
    if trial % 6 == 1:
        logp[:, :, ranks // 2 + 1 :] = -torch.inf
    if trial % 11 == 1:
        logp[1, horizon // 2] = -torch.inf
    options = dict.fromkeys(("carried", "num_carried", "max_nodes", "chain_only"))
    if trial % 2:
        options["carried"] = token[:, :5, 0].clone() if trial % 8 == 1 else integers(0, 40, 3, 5)
        options["num_carried"] = integers(0, options["carried"].shape[1] + 1, 3)
    if trial % 4 == 2:
        options["max_nodes"] = integers(-1, budget + 3, 3)
    if trial % 5 == 3:
        options["chain_only"] = torch.tensor([True, False, True])
    root, spine = integers(0, 40, 3), int(integers(0, horizon + 1, 1))
    leaves = int(integers(0, min(budget, ranks) + 1, 1))
    on = {name: None if x is None else x.to(device) for name, x in options.items()}
    inputs = [x.to(device) for x in (token, logp, root)]
    with poisoned():
        best = build_tree(*inputs, budget, spine=spine, **on)
        flat = build_root_leaves(*inputs, budget, leaves, **on)
    for name, got, wanted in zip(
        ("token", "parent", "depth", "num_nodes") * 2,
        (*best, *flat),
        (
            *reference.best_first(token, logp, root, budget, spine, *options.values()),
            *reference.root_leaves(token, logp, root, budget, leaves, *options.values()),
        ),
    ):
        assert torch.equal(got.cpu(), wanted), name


def test_bad_input_is_named(device):
    token, logp = torch.zeros(2, 3, 4, dtype=torch.int64, device=device), torch.zeros(2, 3, 4, device=device)
    root = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"^logp "):
        build_tree(token, logp[:, :, :3], root, 7, spine=3)
    with pytest.raises(ValueError, match=r"^budget "):
        build_tree(token, logp, root, 128, spine=3)
    with pytest.raises(ValueError, match=r"^spine "):
        build_tree(token, logp, root, 7, spine=4)
    with pytest.raises(ValueError, match=r"^logits "):
        rank_candidates(token, logp[:, 0, 0], root, root, 2)


def test_no_requests(device):
    token = torch.zeros(0, 3, 4, dtype=torch.int64, device=device)
    built = build_tree(token, token.float(), token[:, 0, 0], 7, spine=3)
    assert [tuple(x.shape) for x in built] == [(0, 8), (0, 8), (0, 8), (0,)]
