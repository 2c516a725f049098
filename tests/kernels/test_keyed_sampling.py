# SPDX-License-Identifier: Apache-2.0
"""Philox against published vectors and Python integers; keyed_sample against the exact distribution."""

import math

import pytest
import torch

from aeon_ddtree.kernels.keyed_sampling import keyed_gumbel, keyed_sample, keyed_uniform, reference
from aeon_ddtree.kernels.keyed_sampling.memo import NoiseMemo
from aeon_ddtree.kernels.keyed_sampling.philox import gumbel_of, philox4x32, uniform_at

# kat_vectors of Random123 1.14.0, philox4x32-10: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return tuple(int(word, 16) for word in text.split())


def philox(counter, key):
    """The generator again, in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def draw(seed, index, x):
    """w(seed, index, x) from its definition."""
    low, high = (lambda n: n & 0xFFFFFFFF), (lambda n: (n >> 32) & 0xFFFFFFFF)
    bits = philox((x // 4, low(index), high(index), 0), (low(seed), high(seed)))[x % 4]
    one = torch.tensor(float(bits), dtype=torch.float64).float()
    return float(((one + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24))


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_known_answers(counter, key, result):
    tensors = [tuple(torch.tensor([word]) for word in words(text)) for text in (counter, key)]
    assert [int(word) for word in philox4x32(*tensors)] == list(words(result))
    assert philox(words(counter), words(key)) == list(words(result))


@pytest.mark.parametrize("vocab", [1, 3, 4, 1000, 70001])
def test_uniform_follows_its_definition(vocab):
    """Keys with high words, negative seeds, vocabularies that are no multiple of four or span several batches."""
    seeds, indices = [0, 2**40 + 5, -1, -(2**63)], [0, 7, 2**33 + 1, 3]
    w = keyed_uniform(torch.tensor(seeds), torch.tensor(indices), vocab)
    assert w.shape == (4, vocab) and w.dtype == torch.float32
    ids = sorted({0, vocab // 3, vocab // 2, vocab - 1, max(0, vocab - 2)})
    for r in range(4):
        assert [float(w[r, x]) for x in ids] == [draw(seeds[r], indices[r], x) for x in ids]
    at = uniform_at(torch.tensor(seeds), torch.tensor(indices), torch.tensor([ids] * 4))
    assert torch.equal(at, w[:, ids])
    assert torch.equal(
        w, keyed_uniform(torch.tensor(seeds, dtype=torch.int64), torch.tensor(indices), vocab + 3)[:, :vocab]
    )


def test_a_real_vocabulary_works_in_one_call():
    w = keyed_uniform(torch.tensor([12, 13]), torch.tensor([5, 5]), 248320)
    assert float(w[1, 248319]) == draw(13, 5, 248319) and float(w[0, 131077]) == draw(12, 5, 131077)


def test_gumbel_is_finite_and_distributed_right():
    """Moments over 4 million draws, within 5 standard errors; the extreme words give finite noise.

    With u itself in fp32, u rounds to 1 for some words and G is infinite: one draw in 2^25 would pick any token.
    """
    g = keyed_gumbel(torch.arange(8), torch.arange(8), 500_000).double()
    n = g.numel()
    assert abs(float(g.mean()) - 0.5772156649) < 5 * math.sqrt(math.pi**2 / 6 / n)
    # Var of the sample variance: (kurtosis − 1) σ⁴ / n with kurtosis 27/5.
    assert abs(float(g.var()) - math.pi**2 / 6) < 5 * math.pi**2 / 6 * math.sqrt(4.4 / n)
    for level in (-1.0, 0.0, 2.0, 8.0):
        share = 1 - math.exp(-math.exp(-level))
        assert abs(float((g > level).double().mean()) - share) < 5 * math.sqrt(share / n)
    extremes = torch.tensor([0.0, 1.0, 2.0**32 - 1]).add(0.5).mul(2.0**-32).clamp(max=1 - 2.0**-24)
    truth = [-math.log(-math.log1p(-float(w))) for w in extremes]
    noise = gumbel_of(extremes)
    assert noise.isfinite().all() and noise[0] > 22 and noise[2] < -2.8
    assert noise.tolist() == pytest.approx(truth, rel=1e-5)


def test_remembered_noise_is_the_same_noise():
    """Hits, misses, repeats, rows pushed out by others of the same call, and more rows than there is room for."""
    memo = NoiseMemo(9, rows=5)
    gen = torch.Generator().manual_seed(0)
    for size in (1, 3, 5, 4, 12, 2, 5, 40, 3) * 3:
        seed, index = (torch.randint(-2, 2, (size,), generator=gen) for _ in "ab")
        got = memo.gumbel(seed, index)
        assert torch.equal(got, gumbel_of(keyed_uniform(seed, index, 9)))
        got.fill_(7)  # the caller's own copy
    one = torch.tensor([1])
    for vocab in (9, 13, 9):
        assert torch.equal(keyed_gumbel(one, one, vocab), gumbel_of(keyed_uniform(one, one, vocab)))


def test_neighbouring_keys_are_independent():
    """Adjacent seeds, indices and ids: correlation of uniforms within 5 standard errors of 0."""
    w = keyed_uniform(torch.tensor([1, 2, 1]), torch.tensor([1, 1, 2]), 200_000) - 0.5
    bound = 5 / math.sqrt(200_000) / 12
    for a, b in ((w[0], w[1]), (w[0], w[2]), (w[0, :-1], w[0, 1:])):
        assert abs(float((a * b).mean())) < bound


def exact(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities in Python doubles: temperature, min-p, top-k, top-p, in this order, ties at the k-th value kept."""
    scaled = [x / temperature for x in logits]
    weight = [math.exp(x - max(scaled)) for x in scaled]
    alive = [w >= min_p for w in weight]
    if 0 < top_k < len(scaled):
        kth = sorted((x if a else -math.inf for x, a in zip(scaled, alive)), reverse=True)[top_k - 1]
        alive = [a and x >= kth for x, a in zip(scaled, alive)]
    total = sum(w for w, a in zip(weight, alive) if a)
    if top_p < 1:
        above = 0.0
        for n, x in enumerate(sorted(range(len(scaled)), key=lambda x: (-scaled[x], x))):
            if not alive[x]:
                continue
            if n and above >= top_p:
                alive[x] = False
            above += weight[x] / total
    total = sum(w for w, a in zip(weight, alive) if a)
    return [w / total if a else 0.0 for w, a in zip(weight, alive)]


def chi_square_bound(freedom):
    """A value that chi-square with `freedom` degrees exceeds with probability below 1e-6 (Laurent and Massart, 2000):

    P(X >= d + 2 sqrt(d x) + 2 x) <= exp(−x), with x = ln 10^6. Seeds are fixed: a passing test cannot flicker.
    """
    x = math.log(1e6)
    return freedom + 2 * math.sqrt(freedom * x) + 2 * x


FILTERS = [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.08}, {"top_k": 9, "top_p": 0.85, "min_p": 0.02}]


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [20, 400])
def test_same_distribution(options, vocab, temperature=0.8):
    """10 000 draws with different seeds against the exact distribution; nothing outside the allowed set.

    400 tokens take the short list of candidates, 20 the whole vocabulary. Cells expected below 5 are pooled.
    """
    n = 10_000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    logits[3] = logits[7]

    def column(name, dtype):
        return torch.full((n,), options[name], dtype=dtype) if name in options else None

    token = keyed_sample(
        logits.expand(n, vocab), torch.full((n,), temperature), column("top_k", torch.int64),
        column("top_p", torch.float32), column("min_p", torch.float32), torch.arange(n) * 7919, torch.arange(n) % 13,
    )  # fmt: skip
    probability = torch.tensor(exact(logits.tolist(), temperature, **options), dtype=torch.float64)
    count = token.bincount(minlength=vocab).double()
    assert (count[probability == 0] == 0).all()
    wanted = probability * n
    rare = wanted < 5
    wanted = torch.cat([wanted[~rare], wanted[rare].sum()[None]])
    count = torch.cat([count[~rare], count[rare].sum()[None]])
    cells = wanted > 0
    statistic = float(((count - wanted)[cells].square() / wanted[cells]).sum())
    assert statistic < chi_square_bound(int(cells.sum()) - 1)
    # The bound is not idle: half a step of temperature away it fails.
    off = torch.tensor(exact(logits.tolist(), temperature * 1.5, **options), dtype=torch.float64) * n
    off = torch.cat([off[~rare], off[rare].sum()[None]])[cells]
    assert float(((count[cells] - off).square() / off.clamp(min=1e-9)).sum()) > chi_square_bound(int(cells.sum()) - 1)


def test_token_is_the_argmax_of_its_own_noise():
    """The definition itself, row by row with mixed options: logits / T + G over the allowed set; and the gap."""
    gen = torch.Generator().manual_seed(5)
    n, vocab = 64, 300
    logits = torch.randn(n, vocab, generator=gen) * 3
    logits[:, 17] = -torch.inf
    temperature = torch.tensor([0.0, 0.5, 1.0, 1.7]).repeat(16)
    top_k = torch.tensor([0, 3, 40, 300, 1, 1000, -1, 60]).repeat(8)
    top_p = torch.tensor([1.0, 0.9, 0.5, 0.99, 0.1]).repeat(13)[:n]
    min_p = torch.tensor([0.0, 0.05, 0.0]).repeat(22)[:n]
    seed, index = torch.arange(n) // 4, torch.arange(n) % 5
    token, gap = keyed_sample(logits, temperature, top_k, top_p, min_p, seed, index, return_scores=True)
    noise = keyed_gumbel(seed, index, vocab).double()
    assert token.dtype == torch.int64 and gap.dtype == torch.float32
    for r in range(n):
        if temperature[r] < 1e-5:
            score = logits[r].double()
        else:
            t = float(temperature[r])
            allowed = torch.tensor(exact(logits[r].tolist(), t, int(top_k[r]), float(top_p[r]), float(min_p[r]))) > 0
            score = torch.where(allowed, logits[r].double() / t + noise[r], -torch.inf)
        best, second = score.topk(2).values.tolist()
        assert token[r] == score.argmax()
        if second == -math.inf:
            assert gap[r] == math.inf
        else:
            assert abs(float(gap[r]) - (best - second)) < 1e-4


def test_draw_depends_on_its_row_alone():
    """Batching, order, neighbours, duplicated keys and the length of the short list change no draw."""
    n, vocab = 40, 500
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(1))
    args = (
        torch.tensor([1.0, 0.8]).repeat(20), torch.tensor([0, 20, 5, 200]).repeat(10),
        torch.tensor([0.9, 1.0, 0.5, 0.95, 0.3]).repeat(8), torch.tensor([0.0, 0.1]).repeat(20),
        torch.arange(n) // 8, torch.arange(n) % 3,
    )  # fmt: skip
    together = keyed_sample(logits, *args)
    for r in range(n):
        assert keyed_sample(logits[r : r + 1], *(a[r : r + 1] for a in args)) == together[r]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(2))
    assert torch.equal(keyed_sample(logits[order], *(a[order] for a in args)), together[order])


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999])
def test_short_list_equals_full_sort(monkeypatch, top_p):
    """Flat rows outgrow the short list, and ties stand at its edge: the result is that of sorting everything."""
    n, vocab = 60, 700
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(4)) * torch.linspace(0.1, 6, n)[:, None]
    logits[::3] = logits[::3].round()
    top_k = torch.tensor([0, 130, 30, 128, 127, 600]).repeat(10)
    args = (torch.ones(n), top_k, torch.full((n,), top_p), None, torch.arange(n), torch.zeros(n, dtype=torch.int64))
    short, gap = keyed_sample(logits, *args, return_scores=True)
    monkeypatch.setattr(reference, "_short_list_length", lambda top_k, vocab: vocab)
    full, full_gap = keyed_sample(logits, *args, return_scores=True)
    assert torch.equal(short, full)
    torch.testing.assert_close(gap, full_gap)


def test_greedy_takes_the_lowest_id_at_a_tie():
    logits = torch.zeros(3, 50)
    logits[1, [7, 30]] = 2
    logits[2, 40:] = 1
    zeros = torch.zeros(3, dtype=torch.int64)
    token, gap = keyed_sample(logits, torch.zeros(3), None, None, None, zeros, zeros, return_scores=True)
    assert token.tolist() == [0, 7, 40] and gap.tolist() == [0, 0, 0]


def test_top_k_keeps_ties_and_top_p_lower_ids():
    """Two sampler conventions: all logits equal to the k-th stay; the nucleus is cut among equals by id."""
    n = 4000
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0]).expand(n, 6)
    keys = (torch.arange(n), torch.zeros(n, dtype=torch.int64))
    seen = keyed_sample(logits, torch.ones(n), torch.full((n,), 2), None, None, *keys).unique()
    assert seen.tolist() == [1, 2, 3, 4]
    seen = keyed_sample(torch.zeros(n, 8), torch.ones(n), None, torch.full((n,), 0.5), None, *keys).unique()
    assert seen.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logits", torch.zeros(3)),
        ("logits", torch.zeros(3, 0)),
        ("temperature", torch.ones(2)),
        ("top_k", torch.ones(3)),
        ("top_p", torch.ones(3, dtype=torch.int64)),
        ("min_p", torch.ones(3, 1)),
        ("seed", torch.zeros(3)),
        ("index", torch.zeros(4, dtype=torch.int64)),
    ],
)
def test_bad_input_is_named(name, value):
    whole = torch.zeros(3, dtype=torch.int64)
    arguments = {
        "logits": torch.zeros(3, 5), "temperature": torch.ones(3), "top_k": None, "top_p": None, "min_p": None,
        "seed": whole, "index": whole,
    }  # fmt: skip
    keyed_sample(**arguments)
    with pytest.raises(ValueError, match=name):
        keyed_sample(**{**arguments, name: value})
    with pytest.raises(ValueError, match="vocab"):
        keyed_gumbel(whole, whole, 0)
