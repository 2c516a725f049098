# SPDX-License-Identifier: Apache-2.0
"""causal_conv_tree, conv_commit and causal_conv_chain against a convolution written out along every path."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import WIDTHS, forest, num_rows, pack_paths, path_to, poison_int, random_parents

from aeon_ddtree.kernels.causal_conv_tree import causal_conv_chain, causal_conv_tree, conv_commit

SLOTS = torch.tensor([7, 3, 0, 10, 5, 2])


def inputs(requests, width, taps=4, channels=5, seed=0, dtype=torch.float64):
    gen = torch.Generator().manual_seed(seed)
    shapes = {"x": (requests, width, channels), "conv_state": (11, taps - 1, channels), "weight": (channels, taps)}
    made = {n: torch.randn(*s, generator=gen, dtype=torch.float64).to(dtype) for n, s in shapes.items()}
    return {**made, "bias": torch.randn(channels, generator=gen, dtype=torch.float64).to(dtype)}


def one(x, window, weight, bias, activation="silu"):
    """The last tap-many inputs of window + x, convolved, channel by channel in Python floats."""
    line = [*window.tolist(), *x.tolist()]
    out = []
    for c in range(weight.shape[0]):
        taps = weight[c].tolist()
        y = sum(w * row[c] for w, row in zip(taps, line[-len(taps) :])) + (0.0 if bias is None else float(bias[c]))
        out.append(y / (1 + math.exp(-y)) if activation else y)
    return torch.tensor(out, dtype=torch.float64)


def worst(i, y, slots, parent, **options):
    error = 0.0
    for r in range(parent.shape[0]):
        for row in range(parent.shape[1]):
            if row and parent[r, row] < 0:
                assert (y[r, row] == 0).all()
                continue
            truth = one(
                i["x"][r, path_to(parent[r], row)], i["conv_state"][slots[r]], i["weight"], i["bias"], **options
            )
            error = max(error, float((y[r, row] - truth).abs().max()))
    return error


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_every_shape_and_width(width, taps):
    """Pitfall, convolution: the window runs up the ancestors, it is not flat."""
    i, parent = inputs(6, width, taps, channels=2, seed=width), forest(width, seed=width)
    before = i["conv_state"].clone()
    y = causal_conv_tree(**i, slots=SLOTS, parent=parent)
    assert worst(i, y, SLOTS, parent) < 1e-12
    assert torch.equal(i["conv_state"], before)
    single = {name: value.float() for name, value in i.items()}
    y32 = causal_conv_tree(**single, slots=SLOTS, parent=parent)
    assert y32.dtype == torch.float32 and (y32 - y).abs().max() < 1e-5


@given(st.lists(random_parents(), min_size=1, max_size=3), st.integers(0, 10**6))
@settings(deadline=None, max_examples=30)
def test_random_trees(parents, seed):
    width = max(map(len, parents))
    parent = torch.tensor([p + [-1] * (width - len(p)) for p in parents])
    i = inputs(len(parents), width, channels=2, seed=seed)
    y = causal_conv_tree(**i, slots=SLOTS[: len(parents)], parent=parent)
    assert worst(i, y, SLOTS, parent) < 1e-12


def test_siblings_differ_from_a_flat_window():
    """Pitfall, convolution: a flat window would give the second sibling another result (about one token lost)."""
    i, parent = inputs(1, 4), torch.tensor([[-1, 0, 0, 2]])
    y = causal_conv_tree(**i, slots=torch.tensor([4]), parent=parent)
    flat = causal_conv_tree(**i, slots=torch.tensor([4]), parent=torch.tensor([[-1, 0, 1, 2]]))
    assert torch.equal(y[:, :2], flat[:, :2])
    assert (y[:, 2:] - flat[:, 2:]).abs().min() > 1e-6


def test_no_bias_no_activation_and_half_precision():
    i, parent = inputs(2, 9), forest(9, shapes=("random", "comb"))
    i["bias"] = None
    y = causal_conv_tree(**i, slots=SLOTS[:2], parent=parent, activation=None)
    assert worst(i, y, SLOTS, parent, activation=None) < 1e-12
    half = {name: None if value is None else value.bfloat16() for name, value in i.items()}
    y16 = causal_conv_tree(**half, slots=SLOTS[:2], parent=parent)
    exact = {name: None if value is None else value.double() for name, value in half.items()}
    assert y16.dtype == torch.bfloat16
    assert (y16 - causal_conv_tree(**exact, slots=SLOTS[:2], parent=parent)).abs().max() < 4e-2


def test_nan_padding_and_stale_windows_do_not_leak():
    i, parent = inputs(4, 9), forest(9, shapes=("padded", "chain", "random", "star"))
    parent[0, 4:] = -1
    i["x"][0, 4:], i["x"][1] = torch.nan, torch.nan
    i["conv_state"][[0, 6]] = torch.nan
    slots, has_state = torch.tensor([7, -1, 0, 10]), torch.tensor([True, True, False, True])
    y = causal_conv_tree(**i, slots=slots, parent=parent, has_state=has_state)
    assert y.isfinite().all() and (y[1] == 0).all()
    i["conv_state"][0] = 0
    rows = torch.tensor([0, 2, 3])
    assert worst({**i, "x": i["x"][rows]}, y[rows], slots[rows], parent[rows]) < 1e-12


@pytest.mark.parametrize("taps", [2, 3, 4])
def test_commit_takes_the_last_inputs_of_the_path(taps):
    """Pitfall, convolution: snapshot, then write. Every path length from none to deep; other slots keep their bytes."""
    i = inputs(6, 17, taps, seed=taps)
    parent = forest(17, seed=taps, shapes=("chain",) * 6)
    paths = [[], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3, 4], list(range(17))]
    state = i["conv_state"].clone()
    state[1] = torch.nan
    before = state.clone()
    conv_commit(state, SLOTS, i["x"], *pack_paths(paths, 17))
    for r, rows in enumerate(paths):
        assert [path_to(parent[r], rows[-1]) if rows else []] == [rows]
        line = torch.cat([before[SLOTS[r]], i["x"][r, rows]])
        assert torch.equal(state[SLOTS[r]], line[len(line) - (taps - 1) :])
    rest = [s for s in range(11) if s not in SLOTS.tolist()]
    assert torch.equal(state[rest].nan_to_num(7), before[rest].nan_to_num(7))


def test_commit_leaves_inactive_slots_alone():
    i = inputs(3, 9, dtype=torch.float32)
    state = poison_int((11, 3, 5))
    before = state.clone()
    path, path_len = pack_paths([[], [0, 2], [0, 5, 8]], 4)
    conv_commit(state, torch.tensor([4, -1, 4]), i["x"], path, path_len)
    changed = [s for s in range(11) if not torch.equal(state[s], before[s])]
    assert changed == [4] and torch.equal(state[4], i["x"][2, [0, 5, 8]])
    conv_commit(state, torch.tensor([4, -1, 0]), i["x"], path, torch.tensor([0, 2, 0]))
    assert torch.equal(state[0], before[0]) and torch.equal(state[4], i["x"][2, [0, 5, 8]])


def test_sixty_steps_equal_sequential_decoding():
    """Pitfall, convolution: several steps with more accepted than the window is long, windows never mixed up.

    Windows hold copies of inputs, so they must be equal bit for bit.
    """
    rng = random.Random(2)
    fixed = inputs(3, 9, dtype=torch.float32)
    state, chain_state = fixed["conv_state"].clone(), fixed["conv_state"].clone()
    slots = torch.tensor([10, 0, 4])
    for step in range(60):
        x = inputs(3, 9, seed=step, dtype=torch.float32)["x"]
        parent = forest(9, seed=step, shapes=("random", "padded", "chain"))
        y = causal_conv_tree(x, state, fixed["weight"], fixed["bias"], slots, parent)
        paths = [path_to(parent[r], rng.randrange(num_rows(parent[r]))) for r in range(3)]
        if step % 5 == 2:
            paths[rng.randrange(3)] = []  # this request sits the step out
        path, path_len = pack_paths(paths, 9)
        conv_commit(state, slots, x, path, path_len)
        for t in range(9):
            at = path[:, t].clamp(min=0)
            now = x[torch.arange(3), at][:, None]
            live = path_len > t
            out = causal_conv_chain(now, chain_state, fixed["weight"], fixed["bias"], slots, live.long())
            torch.testing.assert_close(out[live, 0], y[torch.arange(3), at][live], rtol=0, atol=1e-6)
        assert torch.equal(state, chain_state)


def test_chain_with_mixed_lengths():
    """Prefill beside decoding, NaN beyond each length, a stale window, a padding request, an empty one."""
    i = inputs(6, 33)
    slots, length = torch.tensor([7, 3, 0, 10, -1, 2]), torch.tensor([33, 1, 2, 20, 9, 0])
    has_state = torch.tensor([True, False, True, True, True, True])
    i["conv_state"][3] = torch.nan
    for r in range(6):
        i["x"][r, int(length[r]) :] = torch.nan
    before = i["conv_state"].clone()
    y = causal_conv_chain(**i, slots=slots, length=length, has_state=has_state)
    for r in range(4):
        n = int(length[r])
        window = torch.zeros_like(before[0]) if r == 1 else before[slots[r]]
        for t in range(n):
            assert (y[r, t] - one(i["x"][r, : t + 1], window, i["weight"], i["bias"])).abs().max() < 1e-12
        assert torch.equal(i["conv_state"][slots[r]], torch.cat([window, i["x"][r, :n]])[-3:])
        assert (y[r, n:] == 0).all()
    assert (y[4:] == 0).all()
    rest = [1, 2, 4, 5, 6, 8, 9]
    assert torch.equal(i["conv_state"][rest], before[rest])


def test_strided_window():
    """A window stored [S, C, K−1], as vLLM does, goes in and is updated as a transposed view."""
    i, parent = inputs(2, 9), forest(9, shapes=("random", "comb"))
    stored = i["conv_state"].transpose(1, 2).contiguous()
    view = stored.transpose(1, 2)
    arguments = {**i, "slots": SLOTS[:2], "parent": parent}
    assert torch.equal(causal_conv_tree(**{**arguments, "conv_state": view}), causal_conv_tree(**arguments))
    path, path_len = pack_paths([[0], [0, 1, 3, 5]], 5)
    conv_commit(view, SLOTS[:2], i["x"], path, path_len)
    conv_commit(i["conv_state"], SLOTS[:2], i["x"], path, path_len)
    assert torch.equal(stored, i["conv_state"].transpose(1, 2))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x", torch.zeros(2, 5)),
        ("conv_state", torch.zeros(11, 2, 5)),
        ("weight", torch.zeros(5, 5)),
        ("weight", torch.zeros(4, 4)),
        ("bias", torch.zeros(4)),
        ("slots", torch.zeros(2)),
        ("parent", torch.zeros(2, 8, dtype=torch.int64)),
        ("has_state", torch.zeros(2, dtype=torch.int64)),
        ("activation", "gelu"),
    ],
)
def test_bad_input_is_named(name, value):
    i = {**inputs(2, 9, dtype=torch.float32), "slots": SLOTS[:2], "parent": forest(9, shapes=("chain", "star"))}
    with pytest.raises(ValueError, match=name):
        causal_conv_tree(**{**i, name: value})
