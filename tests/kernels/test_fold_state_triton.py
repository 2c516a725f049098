# SPDX-License-Identifier: Apache-2.0
"""fold_state, fold_states and gated_delta_chain in Triton, on the GPU or in the interpreter."""

import random

import pytest
import torch
from gated_delta_truth import inputs, replay
from kernel_cases import forest, num_rows, pack_paths, path_to, poison_int

from aeon_ddtree.kernels.gated_delta_tree import (
    TreeFactors,
    fold_state,
    fold_states,
    gated_delta_chain,
    gated_delta_tree,
    reference,
)

NAMES = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state")
SLOTS = torch.tensor([7, 3, 0, 10, 5, 2])


def moved(tensors, device):
    return [tensor.to(device) for tensor in tensors]


def factors_of(x, slots, parent):
    """From the reference: the fold is judged alone."""
    return reference.tree(*(x[name] for name in NAMES), slots, parent, None, None, None)[1]


def contiguous(factors, device):
    return TreeFactors(*(factor.contiguous().to(device) for factor in factors))


@pytest.mark.parametrize("width", [1, 9, 17, 33, 65, 127])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_fold_equals_decoding_the_path(device, width, state_dtype):
    """Accepted counts from 1 to the deepest, random slots; other slots keep their bytes."""
    parent = forest(width, seed=width)
    x = inputs(6, width, 1, 2, 20, 24, seed=width, dtype=torch.float32)
    x["state"] = x["state"].to(state_dtype)
    paths = [path_to(parent[r], random.Random(r).randrange(num_rows(parent[r]))) for r in range(6)]
    paths[2] = [0]  # all rejected
    paths[1] = path_to(parent[1], num_rows(parent[1]) - 1)  # a chain, all accepted
    state = x["state"].to(device).clone()
    packed = moved(pack_paths(paths, width), device)
    fold_state(state, SLOTS.to(device), contiguous(factors_of(x, SLOTS, parent), device), *packed)
    state = state.cpu()
    for r in range(6):
        _, want = replay(x, r, paths[r], x["state"][SLOTS[r]])
        bound = 1e-5 if state_dtype == torch.float32 else want.abs().max() / 100
        assert (state[SLOTS[r]].double() - want).abs().max() < bound
    others = [s for s in range(11) if s not in SLOTS.tolist()]
    assert torch.equal(state[others], x["state"][others])


@pytest.mark.parametrize("active", [[0, 0, 0], [1, 0, 0], [0, 0, 1], [0, 1, 0]])
def test_only_active_slots_change(device, active):
    """path_len 0 and slot −1 leave every byte, NaN payloads included; factors of unused rows may be NaN."""
    x = inputs(3, 9, 1, 1, 16, 16, dtype=torch.float32)
    parent = forest(9, shapes=("chain", "chain", "star"))
    slots = torch.tensor([3, -1, 0])
    factors = factors_of(x, slots, parent)
    paths = [[0, 1, 2] if active[0] else [], [0] if active[1] else [], [0, 4] if active[2] else []]
    for r, rows in enumerate(paths):
        unused = [row for row in range(9) if row not in rows]
        for factor in factors:
            factor[r, unused] = torch.nan
    pool = x["state"].clone()
    pool[[1, 5]] = torch.nan
    pool[6:] = poison_int(tuple(pool[6:].shape))
    if not active[0]:
        slots[0] = 0  # stale: the other request owns slot 0 now
    state = pool.clone().to(device)
    has_state = torch.tensor(active).bool()
    packed = moved((*pack_paths(paths, 4), has_state), device)
    fold_state(state, slots.to(device), contiguous(factors, device), *packed[:2], has_state=packed[2])
    written = {int(slots[r]) for r in range(3) if active[r] and slots[r] >= 0}
    for slot in range(11):
        same = torch.equal(state[slot].cpu().view(torch.int32), pool[slot].view(torch.int32))
        assert same == (slot not in written)
        assert slot not in written or state[slot].isfinite().all()


def test_first_commit_ignores_what_the_slot_held(device):
    x, parent = inputs(1, 9, 1, 1, 16, 16, dtype=torch.float32), forest(9, shapes=("comb",))
    x["state"][7] = torch.nan
    factors = contiguous(gated_delta_factors(x, device, parent), device)
    state, path = x["state"].to(device).clone(), path_to(parent[0], 8)
    packed = moved(pack_paths([path], 9), device)
    fold_state(state, SLOTS[:1].to(device), factors, *packed, has_state=torch.tensor([False], device=device))
    assert (state[7].cpu() - replay(x, 0, path, torch.zeros(1, 16, 16))[1]).abs().max() < 1e-5


def gated_delta_factors(x, device, parent):
    no_state = torch.tensor([False], device=device)
    arguments = moved([*(x[name] for name in NAMES), SLOTS[:1], parent], device)
    return gated_delta_tree(*arguments, has_state=no_state)[1]


def test_one_launch_folds_every_layer(device, monkeypatch):
    """Three layers, each a part of one page per slot as in a KV cache: the same bits as layer by layer."""
    from aeon_ddtree.kernels.gated_delta_tree import triton

    parent = forest(9, shapes=("random", "comb"))
    layers = [inputs(2, 9, 1, 1, 16, 16, seed=seed, dtype=torch.float32) for seed in range(3)]
    pages = torch.stack([x["state"] for x in layers], 1).to(device)
    alone = pages.clone()
    factors = [contiguous(factors_of(x, SLOTS[:2], parent), device) for x in layers]
    packed = moved(pack_paths([path_to(parent[0], 8), [0]], 9), device)
    launched = []
    fold = triton.fold
    monkeypatch.setattr(triton, "fold", lambda *rest: (launched.append(len(rest[0])), fold(*rest)))
    fold_states([pages[:, n] for n in range(3)], SLOTS[:2].to(device), factors, *packed)
    assert launched == [3]
    for n in range(3):
        fold_state(alone[:, n], SLOTS[:2].to(device), factors[n], *packed)
    assert torch.equal(pages, alone)


def test_fifty_steps_of_verify_and_fold_equal_sequential_decoding(device):
    rng = random.Random(1)
    slots = torch.tensor([10, 4])
    first = inputs(2, 6, 1, 1, 16, 16, dtype=torch.float32)
    state, truth, untouched = first["state"].to(device).clone(), first["state"].double(), first["state"].clone()
    for step in range(50):
        x = {**inputs(2, 6, 1, 1, 16, 16, seed=step, dtype=torch.float32), "state": state}
        x["A_log"], x["dt_bias"] = first["A_log"], first["dt_bias"]
        parent = forest(6, seed=step, shapes=("random", "padded"))
        out, factors = gated_delta_tree(*moved([*(x[name] for name in NAMES), slots, parent], device))
        paths = [path_to(parent[r], rng.randrange(num_rows(parent[r]))) for r in range(2)]
        if step % 7 == 3:
            paths[rng.randrange(2)] = []  # this request sits the step out
        fold_state(state, slots.to(device), factors, *moved(pack_paths(paths, 6), device))
        for r, rows in enumerate(paths):
            if rows:
                outs, truth[slots[r]] = replay(x, r, rows, truth[slots[r]])
                assert (out[r, rows].cpu() - outs).abs().max() < 2e-5
    assert (state[slots].cpu() - truth[slots]).abs().max() < 2e-5
    rest = [s for s in range(11) if s not in slots.tolist()]
    assert torch.equal(state[rest].cpu(), untouched[rest])


@pytest.mark.parametrize("chunk", [7, 20])
def test_chain_with_mixed_lengths(device, chunk):
    """Prefill beside decoding and an idle request, NaN beyond each length, one without a state, one padding."""
    x = inputs(5, 20, 1, 1, 16, 16, dtype=torch.float32)
    slots, length = torch.tensor([7, 3, 0, -1, 2]), torch.tensor([20, 1, 8, 9, 0])
    has_state = torch.tensor([True, False, True, True, True])
    x["state"][3] = torch.nan
    for r in range(5):
        for name in ("q", "k", "v", "a", "b"):
            x[name][r, int(length[r]) :] = torch.nan
    state = x["state"].to(device).clone()
    arguments = moved([x[name] for name in NAMES[:-1]], device)
    out = gated_delta_chain(
        *arguments, state, *moved((slots, length), device), has_state=has_state.to(device), chunk=chunk
    )
    for r in (0, 1, 2):
        n = int(length[r])
        start = torch.zeros_like(x["state"][0]) if r == 1 else x["state"][slots[r]]
        outs, after = replay(x, r, list(range(n)), start)
        assert (out[r, :n].cpu() - outs).abs().max() < 1e-5
        assert (state[slots[r]].cpu() - after).abs().max() < 1e-5
        assert (out[r, n:] == 0).all()
    assert (out[3:] == 0).all()
    rest = [1, 2, 4, 5, 6, 8, 9, 10]
    assert torch.equal(state[rest].cpu(), x["state"][rest])


def test_bad_input_is_named(device):
    x, parent = inputs(2, 5, 1, 1, 16, 16, dtype=torch.float32), forest(5, shapes=("chain", "star"))
    factors = contiguous(factors_of(x, SLOTS[:2], parent), device)
    state, slots = x["state"].to(device), SLOTS[:2].to(device)
    path, path_len = moved(pack_paths([[0, 1], [0, 3]], 4), device)
    strided = factors.u.transpose(1, 3).contiguous().transpose(1, 3)
    odd = torch.zeros(state.numel() + 1, device=device)[1:].view(state.shape)
    cases = [
        ("state", (state.half(), slots, factors, path, path_len)),
        ("state", (state.transpose(-1, -2), slots, factors, path, path_len)),
        ("state.*divisible by 16", (odd, slots, factors, path, path_len)),
        ("slots", (state, slots.float(), factors, path, path_len)),
        ("factors.*u", (state, slots, factors._replace(u=strided), path, path_len)),
        ("factors.*c", (state, slots, factors._replace(c=factors.c.float()), path, path_len)),
        ("path", (state, slots, factors, path.t().contiguous().t(), path_len)),
        ("path_len", (state, slots, factors, path, path_len[:1])),
    ]
    before = state.clone()
    for name, arguments in cases:
        with pytest.raises(ValueError, match=name):
            fold_state(*arguments)
    with pytest.raises(ValueError, match="factors holds 1"):
        fold_states([state, state], slots, [factors], path, path_len)
    with pytest.raises(ValueError, match=r"state\[1\]"):
        fold_states([state, state.bfloat16()], slots, [factors, factors], path, path_len)
    assert torch.equal(state, before)
