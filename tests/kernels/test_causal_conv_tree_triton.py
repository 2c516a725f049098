# SPDX-License-Identifier: Apache-2.0
"""The tree convolution and its commits in Triton against the fp64 reference, on the GPU or in the interpreter."""

import random

import pytest
import torch
from kernel_cases import WIDTHS, forest, num_rows, pack_paths, path_to, poison_int

from aeon_ddtree.kernels.ancestors import real_rows, safe_parent
from aeon_ddtree.kernels.causal_conv_tree import (
    causal_conv_chain,
    causal_conv_tree,
    conv_commit,
    conv_commits,
    reference,
)

SLOTS = torch.tensor([7, 3, 0, 10, 5, 2])


def tensors(width, taps, channels=20, requests=6, seed=0, dtype=torch.float32):
    gen = torch.Generator().manual_seed(seed)
    sizes = {
        "x": (requests, width, channels), "conv_state": (11, taps - 1, channels), "weight": (channels, taps),
        "bias": (channels,),
    }  # fmt: skip
    return {name: torch.randn(size, generator=gen).to(dtype) for name, size in sizes.items()}


def run(t, slots, parent, device, activation="silu", has_state=None):
    arguments = [None if value is None else value.to(device) for value in (*t.values(), slots, parent)]
    flags = None if has_state is None else has_state.to(device)
    return causal_conv_tree(*arguments, has_state=flags, activation=activation).cpu()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("taps", "dtype"), [(2, torch.float32), (3, torch.float32), (4, torch.bfloat16)])
def test_every_row_equals_the_fp64_reference(device, width, taps, dtype):
    """Random slots, one request without a window (its slot is NaN), one padding request, NaN in padding rows."""
    t, parent, slots = tensors(width, taps, seed=width, dtype=dtype), forest(width, seed=width), SLOTS.clone()
    slots[2] = -1
    has_state = torch.tensor([True, False, True, True, True, True])
    want = reference.tree(
        *(value.double() for value in t.values()), slots, parent, has_state, "silu" if taps > 2 else None
    )  # fmt: skip
    real = real_rows(safe_parent(parent)) & (slots >= 0)[:, None]
    t["x"][~real] = torch.nan
    t["conv_state"][3] = torch.nan
    got = run(t, slots, parent, device, "silu" if taps > 2 else None, has_state)
    assert (got.double() - want).abs().max() < (1e-5 if dtype == torch.float32 else 0.07)
    assert (got[~real] == 0).all()


def test_layout_bias_and_bad_pointers(device):
    """Windows stored channel first, rows inside a wider tensor, no bias; a bad pointer is padding."""
    t, parent = tensors(9, 4), forest(9)
    plain = run({**t, "bias": None}, SLOTS, parent, device)
    wide = torch.full((6, 9, 50), torch.nan)
    wide[..., 10:30] = t["x"]
    turned = t["conv_state"].transpose(1, 2).contiguous().transpose(1, 2)
    strided = {**t, "x": wide[..., 10:30], "conv_state": turned, "bias": None}
    moved = [None if v is None else v.to(device) for v in strided.values()]
    if device == "cpu":  # moving to a device packs tensors
        moved[0] = wide[..., 10:30]
    assert torch.equal(causal_conv_tree(*moved, SLOTS.to(device), parent.to(device)).cpu(), plain)
    bad = parent.clone().int()
    bad[:, 8] = 2**30
    fixed = parent.clone()
    fixed[:, 8] = -1
    assert torch.equal(run(t, SLOTS, bad, device), run(t, SLOTS, fixed, device))


@pytest.mark.parametrize("taps", [2, 3, 4])
def test_commit_equals_the_reference_and_nothing_else_changes(device, taps):
    """Paths from empty to the deepest, stale and padding slots, poisoned other slots: bit for bit."""
    t, parent = tensors(17, taps), forest(17)
    slots = SLOTS.clone()
    slots[4] = -1
    paths = [path_to(parent[r], random.Random(r).randrange(num_rows(parent[r]))) for r in range(6)]
    paths[0], paths[1], paths[5] = [], [0], path_to(parent[5], 0)
    has_state = torch.tensor([True, True, True, False, True, True])
    pool = t["conv_state"]
    pool[1] = poison_int(tuple(pool[1].shape))
    pool[10] = torch.nan
    want, state = pool.clone(), pool.clone().to(device)
    packed = pack_paths(paths, 17)
    reference.commit(want, slots, t["x"], *packed, has_state)
    on_device = [value.to(device) for value in (slots, t["x"], *packed)]
    conv_commit(state, *on_device, has_state=has_state.to(device))
    assert torch.equal(state.cpu().view(torch.int32), want.view(torch.int32))


def test_one_launch_commits_every_layer(device):
    layers = [tensors(9, 4, seed=seed) for seed in range(3)]
    parent = forest(9)
    packed = pack_paths([path_to(parent[r], num_rows(parent[r]) - 1) for r in range(6)], 9)
    states = [t["conv_state"].to(device).clone() for t in layers]
    moved = [value.to(device) for value in packed]
    conv_commits(states, SLOTS.to(device), [t["x"].to(device) for t in layers], *moved)
    for t, state in zip(layers, states):
        reference.commit(t["conv_state"], SLOTS, t["x"], *packed, None)
        assert torch.equal(state.cpu(), t["conv_state"])


def test_fifty_steps_equal_one_chain(device):
    """Carry-over: trees verified and committed step by step give what one long chain gives."""
    rng = random.Random(3)
    t = tensors(6, 4, requests=2)
    slots, start = torch.tensor([10, 4]), t["conv_state"].clone()
    state = t["conv_state"].to(device).clone()
    taken, seen = [[], []], [[], []]
    for step in range(50):
        x = tensors(6, 4, requests=2, seed=step + 1)["x"]
        parent = forest(6, seed=step, shapes=("random", "padded"))
        y = run({**t, "x": x, "conv_state": state}, slots, parent, device)
        paths = [path_to(parent[r], rng.randrange(num_rows(parent[r]))) for r in range(2)]
        moved = [value.to(device) for value in (slots, x, *pack_paths(paths, 6))]
        conv_commit(state, *moved)
        for r in range(2):
            taken[r].append(x[r, paths[r]])
            seen[r].append(y[r, paths[r]])
    for r in range(2):
        line = torch.cat(taken[r])[None]
        window = start.clone()
        want = reference.chain(
            line, window, t["weight"], t["bias"], slots[r : r + 1], torch.tensor([line.shape[1]]), None, "silu"
        )  # fmt: skip
        assert (torch.cat(seen[r]) - want[0]).abs().max() < 1e-5
        assert torch.equal(state[slots[r]].cpu(), window[slots[r]])


def test_chain_with_mixed_lengths(device):
    t = tensors(140, 4, requests=4)
    slots, length = torch.tensor([7, 3, -1, 0]), torch.tensor([140, 1, 5, 0])
    want_state, state = t["conv_state"].clone(), t["conv_state"].to(device).clone()
    want = reference.chain(t["x"], want_state, t["weight"], t["bias"], slots, length, None, "silu")
    moved = [value.to(device) for value in (t["weight"], t["bias"], slots, length)]
    got = causal_conv_chain(t["x"].to(device), state, *moved).cpu()
    assert (got - want).abs().max() < 1e-5
    assert torch.equal(state.cpu(), want_state)
    tree = run({name: value[:1, :127] if name == "x" else value for name, value in t.items()}, slots[:1],
               forest(127, shapes=("chain",)), device)  # fmt: skip
    assert torch.equal(tree, got[:1, :127])


def test_bad_input_is_named(device):
    t = {name: value.to(device) for name, value in tensors(5, 4).items()}
    slots, parent = SLOTS.to(device), forest(5).to(device)
    path, path_len = (value.to(device) for value in pack_paths([[0]] * 6, 4))

    def tree(**changed):
        return causal_conv_tree(**{**t, "slots": slots, "parent": parent, **changed})

    for name, value in {
        "x": t["x"].transpose(1, 2).contiguous().transpose(1, 2),
        "weight": t["weight"][:, :1],
        "conv_state": t["conv_state"][:, :2],
        "bias": t["bias"][:-1],
        "slots": slots.float(),
        "parent": parent.t().contiguous().t(),
        "activation": "relu",
    }.items():
        with pytest.raises(ValueError, match=name):
            tree(**{name: value})
    before = t["conv_state"].clone()
    with pytest.raises(ValueError, match="path has strides"):
        conv_commit(t["conv_state"], slots, t["x"], path.t().contiguous().t(), path_len)
    with pytest.raises(ValueError, match=r"conv_state\[1\]"):
        conv_commits([before, before.bfloat16()], slots, [t["x"], t["x"]], path, path_len)
    assert torch.equal(t["conv_state"], before)
