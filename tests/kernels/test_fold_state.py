# SPDX-License-Identifier: Apache-2.0
"""fold_state and gated_delta_chain against the recurrence run token by token, over many steps."""

import random

import pytest
import torch
from gated_delta_truth import inputs, replay
from kernel_cases import WIDTHS, forest, num_rows, pack_paths, path_to, poison_int

from aeon_ddtree.kernels.checks import enable_checks
from aeon_ddtree.kernels.gated_delta_tree import TreeFactors, fold_state, gated_delta_chain, gated_delta_tree

NAMES = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state")
SLOTS = torch.tensor([7, 3, 0, 10, 5, 2])


def factors_of(x, slots, parent, **options):
    return gated_delta_tree(*(x[name] for name in NAMES), slots, parent, **options)[1]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_fold_equals_decoding_the_path(width, dtype):
    """Pitfall, recurrence: accepted counts from 1 to the deepest, arbitrary slots; other slots keep their bytes."""
    x, parent = inputs(6, width, seed=width, dtype=dtype), forest(width, seed=width)
    ends = [random.Random(r).randrange(num_rows(parent[r])) for r in range(6)]
    paths = [path_to(parent[r], ends[r]) for r in range(6)]
    state = x["state"].clone()
    fold_state(state, SLOTS, factors_of(x, SLOTS, parent), *pack_paths(paths, width))
    for r in range(6):
        _, truth = replay(x, r, paths[r], x["state"][SLOTS[r]])
        assert (state[SLOTS[r]] - truth).abs().max() < (1e-11 if dtype == torch.float64 else 1e-5)
    others = [s for s in range(11) if s not in SLOTS.tolist()]
    assert torch.equal(state[others], x["state"][others])


def test_all_rejected_folds_the_root_alone():
    """Pitfall, recurrence: with nothing accepted the root's own update is still folded; no index −1 anywhere."""
    x, parent = inputs(3, 9), forest(9, shapes=("star", "chain", "padded"))
    slots = torch.tensor([10, 0, 9])
    state = x["state"].clone()
    fold_state(state, slots, factors_of(x, slots, parent), *pack_paths([[0], [0], [0]], 5))
    for r in range(3):
        _, truth = replay(x, r, [0], x["state"][slots[r]])
        assert (state[slots[r]] - truth).abs().max() < 1e-12
    assert torch.equal(state[1:9], x["state"][1:9])


@pytest.mark.parametrize("active", [[0, 0, 0], [1, 0, 0], [0, 0, 1], [0, 1, 0]])
def test_only_active_slots_change(active):
    """path_len 0 and slot −1 leave every byte, NaN payloads included; inactive requests may share an active slot."""
    x, parent = inputs(3, 9, dtype=torch.float32), forest(9, shapes=("chain", "chain", "star"))
    slots = torch.tensor([3, -1, 0])
    factors = factors_of(x, slots, parent)
    pool = x["state"].clone()
    pool[[1, 5]] = torch.nan
    pool[6:] = poison_int(tuple(pool[6:].shape))
    if not active[0]:
        slots[0] = 0  # stale: the other request owns slot 0 now
    if not active[2]:
        pool[0] = torch.nan
    state = pool.clone()
    path, path_len = pack_paths(
        [[0, 1, 2] if active[0] else [], [0] if active[1] else [], [0, 4] if active[2] else []], 4
    )
    # Inactive requests have no state yet: zeros must not be written for them either.
    fold_state(state, slots, factors, path, path_len, has_state=torch.tensor(active).bool())
    written = {int(slots[r]) for r in range(3) if active[r] and slots[r] >= 0}
    for slot in range(11):
        same = torch.equal(state[slot].view(torch.int32), pool[slot].view(torch.int32))
        assert same == (slot not in written)
        assert slot not in written or state[slot].isfinite().all()


def test_first_commit_ignores_what_the_slot_held():
    x, parent = inputs(2, 9), forest(9, shapes=("comb", "random"))
    slots, has_state = torch.tensor([8, 1]), torch.tensor([False, True])
    x["state"][8] = torch.nan
    state = x["state"].clone()
    factors = factors_of(x, slots, parent, has_state=has_state)
    paths = [path_to(parent[r], 8) for r in range(2)]
    fold_state(state, slots, factors, *pack_paths(paths, 9), has_state=has_state)
    for r in range(2):
        start = torch.zeros_like(state[0]) if r == 0 else x["state"][1]
        assert (state[slots[r]] - replay(x, r, paths[r], start)[1]).abs().max() < 1e-12


def test_sixty_steps_of_verify_and_fold_equal_sequential_decoding():
    """Carry-over in fp32: each step verifies a new tree and folds a random path; the truth decodes in fp64."""
    rng = random.Random(1)
    slots = torch.tensor([10, 0, 4])
    first = inputs(3, 17, dim=4, dtype=torch.float32)
    state, truth = first["state"], first["state"].double()
    untouched = state.clone()
    for step in range(60):
        x = {**inputs(3, 17, dim=4, seed=step, dtype=torch.float32), "state": state}
        x["A_log"], x["dt_bias"] = first["A_log"], first["dt_bias"]
        parent = forest(17, seed=step, shapes=("random", "padded", "comb"))
        out, factors = gated_delta_tree(*(x[name] for name in NAMES), slots, parent)
        paths = [path_to(parent[r], rng.randrange(num_rows(parent[r]))) for r in range(3)]
        if step % 7 == 3:
            paths[rng.randrange(3)] = []  # this request sits the step out
        fold_state(state, slots, factors, *pack_paths(paths, 17))
        for r, rows in enumerate(paths):
            if rows:
                outs, truth[slots[r]] = replay(x, r, rows, truth[slots[r]])
                assert (out[r, rows] - outs).abs().max() < 2e-5
        assert (state[slots] - truth[slots]).abs().max() < 2e-5
    rest = [s for s in range(11) if s not in slots.tolist()]
    assert torch.equal(state[rest], untouched[rest])


def chain_of(x, slots, length, **options):
    return gated_delta_chain(*(x[name] for name in NAMES), slots, length, **options)


@pytest.mark.parametrize("chunk", [1, 7, 64, 128])
def test_chain_with_mixed_lengths(chunk):
    """Prefill beside decoding: every length from none to all, NaN beyond it, one without a state, one padding."""
    x = inputs(6, 130, 2, 4, dim=4, value_dim=3)
    slots, length = torch.tensor([7, 3, 0, 10, -1, 2]), torch.tensor([130, 1, 64, 65, 9, 0])
    has_state = torch.tensor([True, False, True, True, True, True])
    x["state"][3] = torch.nan
    for r in range(6):
        for name in ("q", "k", "v", "a", "b"):
            x[name][r, int(length[r]) :] = torch.nan
    before = x["state"].clone()
    out = chain_of(x, slots, length, has_state=has_state, chunk=chunk)
    for r in (0, 1, 2, 3):
        n = int(length[r])
        start = torch.zeros_like(before[0]) if r == 1 else before[slots[r]]
        outs, state = replay(x, r, list(range(n)), start)
        assert (out[r, :n] - outs).abs().max() < 1e-11
        assert (x["state"][slots[r]] - state).abs().max() < 1e-11
        assert (out[r, n:] == 0).all()
    assert (out[4:] == 0).all()
    rest = [1, 2, 4, 5, 6, 8, 9]
    assert torch.equal(x["state"][rest], before[rest])


def test_chain_in_pieces_equals_chain_at_once():
    """Chunked prefill, then one token at a time, in fp32: same state and outputs as one call."""
    x = inputs(2, 100, dtype=torch.float32)
    slots = torch.tensor([6, 2])
    pieces = x["state"].clone()
    whole = chain_of(x, slots, torch.tensor([100, 100]))
    outs = []
    for start, stop in ((0, 37), (37, 90), *((t, t + 1) for t in range(90, 100))):
        part = {name: x[name][:, start:stop] if name in ("q", "k", "v", "a", "b") else x[name] for name in NAMES}
        outs.append(chain_of({**part, "state": pieces}, slots, torch.full((2,), stop - start)))
    assert (torch.cat(outs, 1) - whole).abs().max() < 1e-5
    assert (pieces - x["state"]).abs().max() < 1e-5


def test_long_prefill_stays_accurate():
    x = inputs(1, 600, dim=4, value_dim=4, dtype=torch.float32)
    truth_out, truth_state = replay(x, 0, list(range(600)), x["state"][3])
    out = chain_of(x, torch.tensor([3]), torch.tensor([600]))
    assert (out[0] - truth_out).abs().max() < 1e-5
    assert (x["state"][3] - truth_state).abs().max() < 1e-5


def test_bad_input_is_named():
    x, parent = inputs(2, 5), forest(5, shapes=("chain", "star"))
    slots = torch.tensor([3, 1])
    factors = factors_of(x, slots, parent)
    path, path_len = pack_paths([[0, 1], [0, 3]], 4)
    cases = [
        ("state", (x["state"].half(), slots, factors, path, path_len)),
        ("slots", (x["state"], slots.float(), factors, path, path_len)),
        ("factors.u", (x["state"], slots, TreeFactors(factors.u[..., :-1], factors.k, factors.c), path, path_len)),
        ("factors.c", (x["state"], slots, TreeFactors(factors.u, factors.k, factors.c[:1]), path, path_len)),
        ("path", (x["state"], slots, factors, path[:1], path_len)),
        ("path_len", (x["state"], slots, factors, path, path_len[:1])),
    ]
    for name, arguments in cases:
        with pytest.raises(ValueError, match=name):
            fold_state(*arguments)
    with pytest.raises(ValueError, match="chunk"):
        chain_of(x, slots, torch.tensor([1, 2]), chunk=0)
    with pytest.raises(ValueError, match="length"):
        chain_of(x, slots, torch.tensor([1, 2, 3]))
    enable_checks(True)
    try:
        for rows in ([1, 2], [0, 2, 1], [0, 5]):
            with pytest.raises(ValueError, match=r"path\[1\]"):
                fold_state(x["state"], slots, factors, *pack_paths([[0], rows], 4))
    finally:
        enable_checks(None)
