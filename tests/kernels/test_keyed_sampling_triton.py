# SPDX-License-Identifier: Apache-2.0
"""keyed_uniform, keyed_gumbel and keyed_sample in Triton against the PyTorch reference."""

import pytest
import torch
from poison import poisoned

from aeon_ddtree.kernels.keyed_sampling import keyed_gumbel, keyed_sample, keyed_uniform, philox, reference

triton = pytest.importorskip("aeon_ddtree.kernels.keyed_sampling.triton", exc_type=ImportError)
SEEDS = torch.tensor([0, 2**40 + 5, -1, -(2**63), 2**63 - 1])
INDICES = torch.tensor([0, 7, 2**33 + 1, 3, 2**40])


@pytest.mark.parametrize("vocab", [1, 3, 4, 2048, 5001])
def test_noise_is_bit_equal(device, vocab):
    """w bit by bit everywhere; G too on a GPU, where both use the same logarithms."""
    seed, index = SEEDS.to(device), INDICES.to(device)
    with poisoned():
        w, noise = keyed_uniform(seed, index, vocab), keyed_gumbel(seed, index, vocab)
    assert torch.equal(w.cpu(), philox.uniform(SEEDS, INDICES, vocab))
    if device == "cuda":
        assert torch.equal(noise, philox.gumbel_of(philox.uniform(seed, index, vocab)))
    torch.testing.assert_close(noise.cpu(), reference.noise(SEEDS, INDICES, vocab), atol=2e-6, rtol=1e-6)


def logits_of(kind: str, rows: int, vocab: int, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=gen) * 3
    if kind == "ties":
        logits = logits.round()
    if kind == "masked":
        logits = logits.masked_fill(torch.rand(rows, vocab, generator=gen) < 0.7, -torch.inf)
        logits[:, vocab // 2] = 0.0
    return logits


@pytest.mark.parametrize("kind", ["smooth", "ties", "masked"])
@pytest.mark.parametrize(
    ("filters", "vocab"),
    [*((name, 50) for name in ("none", "k", "p", "m", "kp", "kpm")), ("none", 2100), ("kpm", 2100)],
)
def test_draws_equal_the_reference(device, kind, filters, vocab):
    """Every row with other parameters, the filters' limits among them; any allowed token may come up."""
    rows = 8 if vocab < 100 else 5
    gen = torch.Generator().manual_seed(vocab)
    logits = logits_of(kind, rows, vocab, vocab)

    def choice(*values):
        return torch.tensor(values)[torch.randint(0, len(values), (rows,), generator=gen)]

    temperature = choice(0.0, 0.2, 0.7, 1.0, 1.5)
    top_k = choice(0, 1, 3, 40, vocab - 1, vocab, vocab + 1, -1) if "k" in filters else None
    top_p = choice(0.0, 0.3, 0.5, 0.9, 0.999, 1.0) if "p" in filters else None
    min_p = choice(0.0, 0.02, 0.1, 0.5, 1.0) if "m" in filters else None
    seed, index = torch.randint(-(2**62), 2**62, (2, rows), generator=gen)
    cpu = (logits, temperature, top_k, top_p, min_p, seed, index)
    wanted, wanted_gap = reference.sample(*cpu, True)
    with poisoned():
        token, gap = keyed_sample(*(None if x is None else x.to(device) for x in cpu), return_scores=True)
    sure = (wanted_gap > 1e-4) | (temperature < 1e-5)  # nearer than that, the last bits of G may decide
    assert torch.equal(token.cpu()[sure], wanted[sure])
    assert sure.float().mean() > 0.7
    torch.testing.assert_close(gap.cpu()[sure], wanted_gap[sure], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("seed", range(4))
def test_allowed_set_equals_the_references(device, seed):
    """The cutoff itself, token by token: top-k keeps ties, top-p keeps lower ids at a tie."""
    gen = torch.Generator().manual_seed(seed)
    rows, vocab = 8, 300
    logits = torch.randn(rows, vocab, generator=gen).mul(4).round().div(4 if seed % 2 else 1)
    temperature = torch.full((rows,), (1.0, 0.5, 2.0)[seed % 3])
    top_k = torch.randint(1, vocab, (rows,), generator=gen)
    top_p = torch.rand(rows, generator=gen)
    on = [x.to(device) for x in (logits, temperature, top_k, top_p)]
    low, tie = triton.cutoff(on[0], on[1], on[2], on[3], None)
    scaled = logits / temperature[:, None]
    ids = torch.arange(vocab)
    got = (scaled > low.cpu()[:, None]) | ((scaled == low.cpu()[:, None]) & (ids <= tie.cpu()[:, None]))
    value, order = scaled.sort(dim=-1, descending=True, stable=True)
    kept = reference._filter(value, None, top_k, top_p) > -torch.inf
    wanted = torch.zeros_like(kept).scatter_(1, order, kept)
    assert torch.equal(got, wanted)


def test_bf16_and_strided_logits(device):
    """A slice of wider rows, as a padded vocabulary gives; fp32 arithmetic on bf16 values."""
    wide = logits_of("smooth", 5, 700, 1).bfloat16()
    arguments = (torch.ones(5), torch.full((5,), 20), None, None, SEEDS, INDICES)
    wanted, _ = reference.sample(wide[:, :650].float(), *arguments, False)
    token = keyed_sample(wide.to(device)[:, :650], *(None if x is None else x.to(device) for x in arguments))
    assert torch.equal(token.cpu(), wanted)


def test_no_rows(device):
    empty = torch.empty(0, device=device)
    none = empty.long()
    token = keyed_sample(torch.empty(0, 9, device=device), empty, none, empty, empty, none, none)
    assert token.shape == (0,) and token.dtype == torch.int64


def test_bad_input_is_named(device):
    good = [torch.randn(3, 9), torch.ones(3), None, None, None, torch.zeros(3).long(), torch.zeros(3).long()]
    for place, name, value in (
        (0, "logits", torch.zeros(3, 9, dtype=torch.int64)),
        (1, "temperature", torch.ones(4)),
        (2, "top_k", torch.ones(3)),
        (5, "seed", torch.zeros(3)),
    ):
        bad = [x.to(device) if x is not None else None for x in [*good[:place], value, *good[place + 1 :]]]
        with pytest.raises(ValueError, match=f"^{name} "):
            keyed_sample(*bad)
