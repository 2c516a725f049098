# SPDX-License-Identifier: Apache-2.0
"""gated_delta_tree in Triton against the fp64 reference, on the GPU or in the interpreter."""

import pytest
import torch
from gated_delta_truth import inputs, replay
from kernel_cases import forest

from aeon_ddtree.kernels.ancestors import ancestor_mask, mask_from_safe, safe_parent
from aeon_ddtree.kernels.checks import enable_checks
from aeon_ddtree.kernels.gated_delta_tree import TreeFactors, fold_state, gated_delta_tree, reference

NAMES = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state")
ROWS = ("q", "k", "v", "a", "b")
SLOTS = torch.tensor([7, 3, 0, 10, 5, 2], dtype=torch.int32)
# Few requests where the interpreter has many blocks to go through.
CASES = {
    1: ("chain", "padded"),
    9: ("random", "chain", "star", "comb", "binary", "padded"),
    17: ("random", "chain", "padded"),
    33: ("comb", "padded"),
    65: ("random", "chain"),
    127: ("chain", "padded"),
}


def run(x, slots, parent, device, **options):
    """Everything moved to the device, results moved back."""
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    out, factors = gated_delta_tree(
        *(x[name].to(device) for name in NAMES), slots.to(device), parent.to(device), **moved
    )
    return out.cpu(), TreeFactors(*(factor.cpu() for factor in factors))


def truth(x, slots, parent, has_state=None):
    wide = [x[name].double() for name in NAMES]
    return reference.tree(*wide, slots, parent, has_state, None, None)


def assert_close(got, want, out=1e-5):
    """Absolute bounds, except for c, a sum of up to 127 terms of any size."""
    assert (got[0].double() - want[0]).abs().max() <= out
    assert (got[1].u.double() - want[1].u).abs().max() <= 1e-5
    assert (got[1].k.double() - want[1].k).abs().max() <= 1e-6
    assert ((got[1].c - want[1].c).abs() <= 1e-6 + 3e-7 * want[1].c.abs()).all()


@pytest.mark.parametrize("width", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_equals_the_fp64_reference(device, width, dtype):
    """Random slots, one request without a state (its slot is NaN), one padding request; the pool is not written."""
    parent = forest(width, seed=width, shapes=CASES[width])
    requests = len(parent)
    heads = 2 if width < 33 else 1
    x = inputs(requests, width, 1, heads, 20, 24, seed=width, dtype=dtype)
    slots = SLOTS[:requests].clone()
    has_state = torch.ones(requests, dtype=torch.bool)
    has_state[1] = False
    x["state"][slots[1]] = torch.nan
    if requests > 2:
        slots[2] = -1
    before = x["state"].clone()
    got = run(x, slots, parent, device, has_state=has_state)
    # The interpreter cuts where a GPU rounds to bf16.
    assert_close(got, truth(x, slots, parent, has_state), out=1e-5 if dtype == torch.float32 else 0.04)
    assert torch.equal(x["state"].view(torch.int32), before.view(torch.int32))
    real = reference.real_rows(safe_parent(parent)) & (slots >= 0)[:, None]
    for blank in (got[0][~real], got[1].u[~real], got[1].k[~real], got[1].c[~real]):
        assert (blank == 0).all()


def test_heads_wider_than_a_program_and_no_power_of_two(device):
    parent = forest(9, shapes=("random",))
    x = inputs(1, 9, 2, 4, 40, 72, dtype=torch.bfloat16)
    assert_close(run(x, SLOTS[:1], parent, device), truth(x, SLOTS[:1], parent), out=0.04)


@pytest.mark.parametrize(("width", "heads"), [(9, 13), (9, 24), (33, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_cut_of_a_full_device_gives_the_same(device, monkeypatch, width, heads, dtype):
    """Cuts go by how many heads fill the device: those of many heads, on two. Dv takes several tiles and a rest."""
    from aeon_ddtree.kernels.gated_delta_tree import triton

    cut = triton.small_config if width <= 16 else triton.wide_config
    name, asked = cut.__name__, []

    def crowded(*what):
        *shape, _, _ = what
        asked.append(cut(*shape, heads, 12))
        return asked[-1]

    monkeypatch.setattr(triton, name, crowded)
    parent = forest(width, shapes=("comb",))
    x = inputs(1, width, 1, 2, 72, 104, dtype=dtype)
    got = run(x, SLOTS[:1], parent, device)
    assert len(asked) == 1
    if width <= 16:
        assert asked[0].span > asked[0].columns
    assert_close(got, truth(x, SLOTS[:1], parent), out=1e-5 if dtype == torch.float32 else 0.04)


def test_gates_and_decays_are_right_to_the_last_places(device):
    """One row: u = beta v and c = g alone, so nothing hides an estimated exp or quotient."""
    x = inputs(1, 1, 1, 12, 16, 16, seed=5, dtype=torch.float32)
    x["state"].zero_()
    _, factors = run(x, SLOTS[:1], torch.full((1, 1), -1), device)
    beta = x["b"].double().sigmoid()
    want = beta[..., None] * x["v"].double()
    assert ((factors.u.double() - want).abs() <= 2.5 * 2.0**-24 * want.abs()).all()
    g = -x["A_log"].double().exp() * torch.nn.functional.softplus((x["a"] + x["dt_bias"]).double())
    assert ((factors.c - g).abs() <= 6 * 2.0**-24 * g.abs()).all()


def test_bf16_state_and_int64_slots(device):
    parent = forest(17, shapes=("comb",))
    x = inputs(1, 17, 1, 2, 16, 16, dtype=torch.bfloat16)
    x["state"] = x["state"].bfloat16()
    assert_close(run(x, SLOTS[:1].long(), parent, device), truth(x, SLOTS[:1], parent), out=0.04)


@pytest.mark.parametrize("width", [9, 20])
def test_what_padding_holds_reaches_nobody(device, width):
    """NaN in padding rows and in a padding request; pointers that are no earlier row make padding."""
    parent = forest(width, shapes=("padded", "chain"))
    parent[0, width - 2 :] = -1
    x = inputs(2, width, 1, 1, 16, 16, dtype=torch.float32)
    slots = torch.tensor([4, -1])
    clean = run(x, slots, parent, device)
    for name in ROWS:
        x[name] = x[name].clone()
        x[name][0][~reference.real_rows(safe_parent(parent))[0]] = torch.nan
        x[name][1] = torch.nan
    spoilt = parent.clone()
    spoilt[0, -1], spoilt[0, -2] = width + 1000, -(2**31)
    dirty = run(x, slots, spoilt.int(), device)
    for left, right in zip((clean[0], *clean[1]), (dirty[0], *dirty[1])):
        assert torch.equal(left, right)


def test_views_masks_and_buffers_of_the_caller(device):
    """q, k, v as parts of one tensor, a state inside a larger page, ancestors and factors given: the same bits."""
    parent = forest(9, shapes=("random", "comb"))
    x = inputs(2, 9, 1, 2, 16, 16, dtype=torch.float32)
    plain = run(x, SLOTS[:2], parent, device)
    qkv = torch.cat([x[name].flatten(2) for name in ("q", "k", "v")], -1).to(device)
    page = torch.full((11, 3, 2, 16, 16), torch.nan)
    page[:, 1] = x["state"]
    moved = {name: value.to(device) for name, value in x.items()}
    moved["q"], moved["k"] = (qkv[..., at : at + 16].unflatten(-1, (1, 16)) for at in (0, 16))
    moved["v"], moved["state"] = qkv[..., 32:].unflatten(-1, (2, 16)), page.to(device)[:, 1]
    kept = TreeFactors(*(torch.full_like(factor, torch.nan).to(device) for factor in plain[1]))
    out, factors = gated_delta_tree(
        *(moved[name] for name in NAMES), SLOTS[:2].to(device), parent.to(device),
        ancestors=mask_from_safe(safe_parent(parent)).to(device), factors=kept,
    )  # fmt: skip
    assert factors is kept
    for left, right in zip((out, *factors), (plain[0], *plain[1])):
        assert torch.equal(left.cpu(), right)


@pytest.mark.parametrize("width", [1, 9, 40, 127])
def test_ancestor_mask(device, width):
    parent = forest(width, seed=3)
    parent[0, width // 2] = width if width > 1 else -1
    assert torch.equal(ancestor_mask(parent.int().to(device)).cpu(), mask_from_safe(safe_parent(parent)))


def serial(x, rows, state):
    """The rows one after the other in fp32, as a step-by-step kernel would: outputs and the state."""
    rate, outs = x["A_log"].exp(), []
    unit = {n: x[n][0].float() * torch.rsqrt(x[n][0].float().square().sum(-1, keepdim=True) + 1e-6) for n in ("q", "k")}
    g = -rate * torch.nn.functional.softplus(x["a"][0].float() + x["dt_bias"])
    for row in rows:
        state = state * g[row].exp()[:, None, None]
        delta = x["v"][0, row].float() - (state * unit["k"][row, :, None]).sum(-1)
        delta = delta * x["b"][0, row].float().sigmoid()[:, None]
        state = state + delta[..., None] * unit["k"][row, :, None]
        outs.append((state * (unit["q"][row, :, None] * x["q"].shape[-1] ** -0.5)).sum(-1))
    return torch.stack(outs), state


@pytest.mark.parametrize("decay", [-9.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_near_parallel_keys_lose_nothing_against_serial_decoding(device, decay, dtype):
    """Where doubling in TF32 breaks: keys nearly equal, beta near 1, decay nearly none or extreme."""
    width = 20
    error = {"ours": 0.0, "serial": 0.0}
    for seed in range(2):
        x = inputs(1, width, 1, 1, 32, 32, seed=seed, dtype=torch.float64)
        x["k"] = x["k"][:, :1] + 0.05 * x["k"]
        x["b"] = x["b"] + 3
        x["A_log"] = torch.full((1,), decay, dtype=torch.float64)
        x = {name: value.to(dtype if name in ROWS else torch.float32) for name, value in x.items()}
        parent = forest(width, shapes=("chain",))
        _, want = replay(x, 0, list(range(width)), x["state"][7])
        _, factors = run(x, SLOTS[:1], parent, device)
        state = x["state"].to(device)
        fold_state(
            state, SLOTS[:1].to(device), TreeFactors(*(factor.to(device) for factor in factors)),
            torch.arange(width, device=device)[None], torch.tensor([width], device=device),
        )  # fmt: skip
        error["ours"] += float((state[7].cpu().double() - want).square().sum())
        error["serial"] += float((serial(x, range(width), x["state"][7])[1].double() - want).square().sum())
    assert error["ours"] ** 0.5 <= 1.05 * error["serial"] ** 0.5


def test_fp64_is_the_reference(device):
    parent = forest(9, shapes=("random", "star"))
    x = inputs(2, 9)
    out, factors = run(x, SLOTS[:2], parent, device)
    want, kept = truth(x, SLOTS[:2], parent)
    for left, right in zip((out, *factors), (want, *kept)):
        assert (left - right).abs().max() < 1e-13


def change(name, how):
    return lambda x, options: (x if name in x else options).__setitem__(name, how({**x, **options}[name]))


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("q", change("q", lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2))),
        ("k", change("k", lambda t: t.bfloat16())),
        ("v", change("v", lambda t: t.repeat_interleave(2, -1)[..., ::2])),
        ("state", change("state", lambda t: t.transpose(-1, -2))),
        ("A_log", change("A_log", lambda t: t.repeat_interleave(2)[::2])),
        ("slots", change("slots", lambda t: t.repeat_interleave(2)[::2])),
        ("slots", change("slots", lambda t: t.to("meta"))),
        ("parent", change("parent", lambda t: t[:, :-1])),
        ("parent", change("parent", lambda t: t.t().contiguous().t())),
        ("ancestors", change("ancestors", lambda t: t.transpose(1, 2))),
        ("ancestors", change("ancestors", lambda t: t.int())),
        ("factors.u", change("factors", lambda f: f._replace(u=f.u.transpose(1, 2).contiguous().transpose(1, 2)))),
        ("factors.c", change("factors", lambda f: f._replace(c=f.c.float()))),
    ],
)  # fmt: skip
def test_bad_input_is_named_and_nothing_is_written(device, name, spoil):
    parent = forest(5, shapes=("chain", "star"))
    x = {n: t.to(device) for n, t in inputs(2, 5, 2, 4, 16, 16, dtype=torch.float32).items()}
    shape = {"u": (2, 5, 4, 16), "k": (2, 5, 2, 16), "c": (2, 5, 4)}
    factors = TreeFactors(*(torch.full(size, 7.0, device=device) for size in shape.values()))
    options = {
        "slots": SLOTS[:2].to(device), "parent": parent.to(device), "ancestors": ancestor_mask(parent.to(device)),
        "factors": factors._replace(c=factors.c.double()),
    }  # fmt: skip
    spoil(x, options)
    with pytest.raises(ValueError, match=name):
        gated_delta_tree(*(x[n] for n in NAMES), **options)
    assert all((factor == 7.0).all() for factor in options["factors"])


def test_width_and_parent_values(device):
    x = {n: t.to(device) for n, t in inputs(1, 129, 1, 1, 16, 16, dtype=torch.float32).items()}
    slots = SLOTS[:1].to(device)
    with pytest.raises(ValueError, match="q has 129 rows"):
        gated_delta_tree(*(x[n] for n in NAMES), slots, torch.zeros(1, 129, dtype=torch.int32, device=device) - 1)
    few = {n: t[:, :3] if n in ROWS else t for n, t in x.items()}
    enable_checks(True)
    try:
        with pytest.raises(ValueError, match=r"parent\[0, 1\] is 1"):
            gated_delta_tree(*(few[n] for n in NAMES), slots, torch.tensor([[-1, 1, 0]], device=device))
    finally:
        enable_checks(None)
