# SPDX-License-Identifier: Apache-2.0
"""gated_delta_tree against the recurrence run token by token along every path, in fp64."""

import pytest
import torch
from gated_delta_truth import inputs, replay, replay_tree
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import SHAPES, WIDTHS, forest, num_rows, pack_paths, path_to, random_parents

from aeon_ddtree.kernels.ancestors import ancestor_mask
from aeon_ddtree.kernels.checks import enable_checks
from aeon_ddtree.kernels.gated_delta_tree import fold_state, gated_delta_chain, gated_delta_tree

NAMES = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state")
# Slots out of order, with gaps; 0 is an ordinary slot among them.
SLOTS = torch.tensor([7, 3, 0, 10, 5, 2])


def run(x, slots, parent, **options):
    return gated_delta_tree(*(x[name] for name in NAMES), slots, parent, **options)


def worst(x, out, slots, parent, scale=None, zero_state=()):
    """Largest error of any real row against the tree replayed in fp64; padding must be 0."""
    error = 0.0
    for r in range(parent.shape[0]):
        used = num_rows(parent[r])
        state = x["state"][slots[r]]
        truth, _ = replay_tree(x, r, parent[r, :used].tolist(), state * 0 if r in zero_state else state, scale)
        error = max(error, float((out[r, :used].double() - truth).abs().max()))
        assert (out[r, used:] == 0).all()
    return error


@pytest.mark.parametrize("width", WIDTHS)
def test_every_shape_and_width(width):
    """Pitfall, recurrence: any W (9 … 65 and beyond), arbitrary slots, parents' states in full precision."""
    x, parent = inputs(6, width, seed=width), forest(width, seed=width)
    before = x["state"].clone()
    out, factors = run(x, SLOTS, parent)
    assert worst(x, out, SLOTS, parent) < 1e-11
    assert torch.equal(x["state"], before), "verification must not write the committed state"
    assert factors.u.shape == x["v"].shape and factors.k.shape == x["k"].shape and factors.c.shape == x["a"].shape
    single = {name: value.float() for name, value in x.items()}
    out32, factors32 = run(single, SLOTS, parent)
    assert worst(single, out32, SLOTS, parent) < 1e-5
    assert out32.dtype == factors32.u.dtype == factors32.k.dtype == torch.float32


@given(st.lists(random_parents(), min_size=1, max_size=3), st.integers(0, 10**6), st.sampled_from([(1, 1), (2, 4)]))
@settings(deadline=None, max_examples=25)
def test_random_trees(parents, seed, heads):
    width = max(map(len, parents))
    parent = torch.tensor([p + [-1] * (width - len(p)) for p in parents])
    x = inputs(len(parents), width, *heads, dim=4, value_dim=3, seed=seed)
    out, _ = run(x, SLOTS[: len(parents)], parent)
    assert worst(x, out, SLOTS, parent) < 1e-11


def test_every_node_equals_its_path_replayed_alone():
    """Independent of the tree truth: a path is decoded as a plain sequence from the committed state."""
    x, parent = inputs(1, 17, 2, 4), torch.tensor([[-1, 0, 1, 2, 3, 0, 5, 1, 7, 7, 2, 6, 6, 12, 13, 14, 15]])
    out, _ = run(x, torch.tensor([4]), parent)
    for row in range(17):
        truth, _ = replay(x, 0, path_to(parent[0], row), x["state"][4])
        assert (out[0, row] - truth[-1]).abs().max() < 1e-12


def test_siblings_are_blind_to_each_other():
    """Pitfall, recurrence: a row continues from its parent. What a sibling's row holds changes nothing, bit for bit."""
    x, parent = inputs(1, 9), torch.tensor([[-1, 0, 0, 1, 1, 2, 3, 4, 5]])
    out, _ = run(x, torch.tensor([4]), parent)
    for name in ("q", "k", "v", "a", "b"):
        x[name][:, [2, 5, 8]] = 99.0
    other, _ = run(x, torch.tensor([4]), parent)
    assert torch.equal(out[:, [0, 1, 3, 4, 6, 7]], other[:, [0, 1, 3, 4, 6, 7]])
    assert not torch.equal(out[:, 5], other[:, 5])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_padding_rows_full_of_nan_do_not_leak(dtype):
    """Padding of the window, of the batch (slot −1), and a stale slot behind has_state = False are all NaN."""
    width = 17
    x, parent = inputs(4, width, dtype=dtype), forest(width, shapes=("padded", "chain", "random", "padded"))
    parent[0, 5:], parent[3, 9:] = -1, -1
    for r, used in ((0, 5), (3, 9)):
        for name in ("q", "k", "v", "a", "b"):
            x[name][r, used:] = torch.nan
    for name in ("q", "k", "v", "a", "b"):
        x[name][1] = torch.nan
    x["state"][[0, 6]] = torch.nan
    slots = torch.tensor([7, -1, 0, 10])
    has_state = torch.tensor([True, True, False, True])
    out, factors = run(x, slots, parent, has_state=has_state)
    assert all(part.isfinite().all() for part in (out, *factors))
    assert (out[1] == 0).all() and out.dtype == dtype
    x["state"][0] = 0
    rows = torch.tensor([0, 2, 3])
    picked = {name: value[rows] if name in ("q", "k", "v", "a", "b") else value for name, value in x.items()}
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert worst(picked, out[rows], slots[rows], parent[rows]) < tolerance
    if dtype == torch.bfloat16:
        assert factors.u.dtype == torch.float32, "factors stay fp32 for half-precision inputs"


def test_root_row_updates_like_any_node():
    """Pitfall, recurrence: first-level nodes continue from the root's state, not from the committed one."""
    x, parent = inputs(1, 3), torch.tensor([[-1, 0, 0]])
    out, _ = run(x, torch.tensor([1]), parent)
    _, after_root = replay(x, 0, [0], x["state"][1])
    for row in (1, 2):
        truth, _ = replay(x, 0, [row], after_root)
        without_root, _ = replay(x, 0, [row], x["state"][1])
        assert (out[0, row] - truth[0]).abs().max() < 1e-12 < (out[0, row] - without_root[0]).abs().max()


@pytest.mark.parametrize("width", [1, 16, 64])
def test_chain_shaped_tree_equals_sequential_decoding(width):
    """Pitfall, recurrence: a chain-shaped tree equals the chain, in fp32, state included, at several lengths."""
    x = inputs(3, width, 2, 4, dtype=torch.float32)
    parent = forest(width, shapes=("chain",) * 3)
    length = torch.tensor([width, (width + 1) // 2, 1])
    slots = torch.tensor([9, 0, 4])
    out, factors = run(x, slots, parent)
    tree_state, chain_state = x["state"].clone(), x["state"].clone()
    fold_state(tree_state, slots, factors, torch.arange(width).expand(3, width), length)
    x["state"] = chain_state
    for t in range(width):
        one = {name: value[:, t : t + 1] if name in ("q", "k", "v", "a", "b") else value for name, value in x.items()}
        step = gated_delta_chain(*(one[name] for name in NAMES), slots, (length > t).long())
        active = length > t
        assert (step[active, 0] - out[active, t]).abs().max() < 1e-5
    assert (tree_state - chain_state).abs().max() < 1e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_near_parallel_keys(shape):
    """The hardest solve: keys almost equal, beta almost 1, no decay; the inverse has entries of both signs near 1."""
    width = 65
    x = inputs(1, width, 1, 2, seed=3)
    x["k"] = x["k"][:, :1] + 1e-3 * x["k"]
    x["b"] = x["b"] * 0 + 8
    x["A_log"] = x["A_log"] * 0 - 8
    parent = forest(width, shapes=(shape,))
    out, _ = run(x, torch.tensor([4]), parent)
    assert worst(x, out, torch.tensor([4]), parent) < 1e-10
    single = {name: value.float() for name, value in x.items()}
    out32, _ = run(single, torch.tensor([4]), parent)
    assert worst(single, out32, torch.tensor([4]), parent) < 1e-5


@pytest.mark.parametrize("level", [-8.0, 0.0, 20.0, 60.0])
def test_long_and_mixed_decays(level):
    """exp(c_i − c_j) overflows for pairs that are not above each other, and c reaches thousands: neither may show.

    Half of the rows forget at `level`, the others hardly at all, so small differences of large sums matter.
    """
    width = 65
    x = inputs(6, width, seed=5)
    x["A_log"] = x["A_log"] * 0 + 2
    x["a"][:, ::2] = level
    x["a"][:, 1::2] = -6
    parent = forest(width, seed=5)
    out, factors = run(x, SLOTS, parent)
    assert out.isfinite().all() and worst(x, out, SLOTS, parent) < 1e-10
    single = {name: value.float() for name, value in x.items()}
    out32, factors32 = run(single, SLOTS, parent)
    assert worst(single, out32, SLOTS, parent) < 1e-5
    path, path_len = pack_paths([path_to(parent[r], num_rows(parent[r]) - 1) for r in range(6)], width)
    fold_state(x["state"], SLOTS, factors, path, path_len)
    fold_state(single["state"], SLOTS, factors32, path, path_len)
    assert (x["state"] - single["state"]).abs().max() < 1e-5


def test_options_and_strides():
    """An own scale, int32 indices, a precomputed mask, and strided views give the same numbers."""
    x, parent = inputs(2, 9, 2, 4), forest(9, shapes=("random", "padded"))
    slots = torch.tensor([6, 2])
    out, _ = run(x, slots, parent)
    again, _ = run(x, slots.int(), parent.int(), ancestors=ancestor_mask(parent))
    assert torch.equal(out, again)
    scaled, _ = run(x, slots, parent, scale=0.5)
    assert worst(x, scaled, slots, parent, scale=0.5) < 1e-12
    wide = torch.randn(11, 2, 4, 6, 8, dtype=torch.float64)
    wide[:, 1] = x["state"]
    qkv = torch.cat([x["q"].flatten(2), x["k"].flatten(2), x["v"].flatten(2)], dim=-1)
    views = {
        "q": qkv[..., :16].unflatten(-1, (2, 8)),
        "k": qkv[..., 16:32].unflatten(-1, (2, 8)),
        "v": qkv[..., 32:].unflatten(-1, (4, 6)),
    }
    strided, _ = run({**x, **views, "state": wide[:, 1]}, slots, parent)
    assert torch.equal(out, strided)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("k", lambda t: t[:, :, :, :-1]),
        ("q", lambda t: t.long()),
        ("v", lambda t: t[:, :, :1].repeat(1, 1, 3, 1)),
        ("a", lambda t: t[:, :-1]),
        ("b", lambda t: t[..., 0]),
        ("A_log", lambda t: t[:-1]),
        ("dt_bias", lambda t: t.to("meta")),
        ("state", lambda t: t.half()),
        ("state", lambda t: t.transpose(-1, -2)),
    ],
)
def test_bad_tensor_is_named(name, change):
    """Pitfall, recurrence: fp16 states are refused, they overflow. (bf16 states drift: the engine refuses those.)"""
    x, parent = inputs(2, 5, 2, 4), forest(5, shapes=("chain", "star"))
    x[name] = change(x[name])
    with pytest.raises(ValueError, match=name):
        run(x, SLOTS[:2], parent)


def test_bad_indices_are_named():
    x, parent = inputs(2, 5), forest(5, shapes=("chain", "star"))
    with pytest.raises(ValueError, match="slots"):
        run(x, SLOTS[:3], parent)
    with pytest.raises(ValueError, match="parent"):
        run(x, SLOTS[:2], parent[:, :-1])
    with pytest.raises(ValueError, match="has_state"):
        run(x, SLOTS[:2], parent, has_state=torch.ones(2))
    with pytest.raises(ValueError, match="129 rows"):
        run(inputs(1, 129), SLOTS[:1], torch.zeros(1, 129, dtype=torch.int64))
    enable_checks(True)
    try:
        with pytest.raises(ValueError, match="slots"):
            run(x, torch.tensor([3, 11]), parent)
        with pytest.raises(ValueError, match="slots"):
            run(x, torch.tensor([3, 3]), parent)
    finally:
        enable_checks(None)
