# SPDX-License-Identifier: Apache-2.0
"""Cases of the recurrent layers: gated_delta_tree, fold_state, causal_conv_tree, conv_commit."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from aeon_ddtree.kernels.ancestors import ancestor_mask, depth_of
from aeon_ddtree.kernels.bench import stock
from aeon_ddtree.kernels.bench.case import ACCEPTED, Case, Ready, Source, first, off
from aeon_ddtree.kernels.bench.shapes import BATCHES, MODELS, QWEN_27B, WIDTHS, Model
from aeon_ddtree.kernels.causal_conv_tree import causal_conv_tree, conv_commits
from aeon_ddtree.kernels.causal_conv_tree import reference as conv_reference
from aeon_ddtree.kernels.gated_delta_tree import TreeFactors, fold_states, gated_delta_tree
from aeon_ddtree.kernels.gated_delta_tree import reference as delta_reference

_STOCK_STATES = 6 << 30
"""Bytes of the stock update's states, of which it wants one per row."""


def heads_of(model: Model, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[..., channels] -> q and k [..., Hk, Dk], v [..., Hv, Dv], as views."""
    keys = model.gdn_keys * model.gdn_key_size
    q, k, v = y.split([keys, keys, model.gdn_values * model.gdn_value_size], -1)
    return (
        q.unflatten(-1, (model.gdn_keys, model.gdn_key_size)),
        k.unflatten(-1, (model.gdn_keys, model.gdn_key_size)),
        v.unflatten(-1, (model.gdn_values, model.gdn_value_size)),
    )


def states(source: Source, case: Case, count: int) -> Tensor:
    """[sets, R + 1, Hv, Dv, Dk] fp32."""
    m = case.model
    size = (m.gdn_values, m.gdn_value_size, m.gdn_key_size)
    return source.normal(count, case.batch + 1, *size, dtype=torch.float32, scale=0.1)


def decays(source: Source, model: Model) -> tuple[Tensor, Tensor]:
    """A_log and dt_bias [Hv] fp32 as checkpoints have them: rates up to 16."""
    a_log = torch.linspace(0.001, 16, model.gdn_values).log().to(source.device)
    return a_log, source.normal(model.gdn_values, dtype=torch.float32)


def _tree(source: Source, case: Case) -> Ready:
    m, rows = case.model, case.batch * case.width
    count = source.sets(case.batch * m.state_bytes, 8, 512)
    state = states(source, case, count)
    few = min(count, 8)
    y = source.normal(few, case.batch, case.width, m.channels)
    a, b = source.normal(2, few, case.batch, case.width, m.gdn_values)
    a_log, dt_bias = decays(source, m)
    slots, parent = source.permutation(case.batch + 1, case.batch), source.trees(case.batch, case.width)
    seen, has = ancestor_mask(parent), source.full(case.batch, True, torch.bool)

    def run(i: int, cast: torch.dtype | None = None) -> tuple[Tensor, TreeFactors]:
        given = (*heads_of(m, y[i % few]), a[i % few], b[i % few], a_log, dt_bias, state[i])
        q, k, v, a_i, b_i, rate, bias, s = given if cast is None else (x.to(cast) for x in given)
        return gated_delta_tree(q, k, v, a_i, b_i, rate, bias, s, slots, parent, has_state=has, ancestors=seen)

    def check() -> str | None:
        before = state[0].clone()
        (out, kept), (truth, factors) = run(0), run(0, torch.float64)
        return first(
            off("out", out, truth), off("u", kept.u, factors.u), off("k", kept.k, factors.k),
            off("c", kept.c.float(), factors.c), off("state", state[0], before, exact=True),
        )  # fmt: skip

    inputs = 2 * (m.channels + 2 * m.gdn_values)
    outputs = 2 * m.gdn_values * m.gdn_value_size
    factors = 4 * (m.gdn_values * m.gdn_value_size + m.gdn_keys * m.gdn_key_size + 2 * m.gdn_values)
    moved = case.batch * m.state_bytes + rows * (inputs + outputs + factors)

    def stock_calls() -> stock.Calls:
        sets = max(2, min(16, _STOCK_STATES // (rows * m.state_bytes)))
        many = source.normal(sets * rows + 1, *state.shape[2:], dtype=torch.float32, scale=0.1)
        places = (1 + source.permutation(sets * rows, sets, case.batch, case.width)).int()
        return stock.gated_delta(
            [(heads_of(m, y[i % few]), a[i % few], b[i % few]) for i in range(sets)], a_log, dt_bias, many, places,
            ACCEPTED,
        )  # fmt: skip

    return Ready([partial(run, i) for i in range(count)], moved, check, stock=stock_calls)


def paths(source: Source, case: Case) -> tuple[Tensor, Tensor]:
    """Every request accepts ACCEPTED rows, every other row of the window as far as it is long enough."""
    step = 2 if case.width >= 2 * ACCEPTED else 1
    rows = [i * step for i in range(ACCEPTED)] + [-1] * (16 - ACCEPTED)
    return source.values([rows] * case.batch), source.full(case.batch, ACCEPTED)


def _fold(source: Source, case: Case) -> Ready:
    m = case.model
    count = source.sets(case.batch * m.state_bytes * m.gdn_layers, 1, 256)
    size = (m.gdn_values, m.gdn_value_size, m.gdn_key_size)
    # Every set is other slots of the same layers.
    layers = list(source.normal(m.gdn_layers, count * case.batch + 1, *size, dtype=torch.float32, scale=0.1))
    slots = source.permutation(count * case.batch + 1, count, case.batch)
    path, length = paths(source, case)
    has, parent = source.full(case.batch, True, torch.bool), source.trees(case.batch, case.width)
    # Decay along the path keeps a state that is folded again and again bounded.
    c = -0.1 * (1 + depth_of(parent))[:, :, None].expand(-1, -1, m.gdn_values).double().contiguous()
    k_size, u_size = (m.gdn_keys, m.gdn_key_size), (m.gdn_values, m.gdn_value_size)
    window = (case.batch, case.width)
    factors = [
        TreeFactors(
            source.normal(*window, *u_size, dtype=torch.float32, scale=0.1),
            torch.nn.functional.normalize(source.normal(*window, *k_size, dtype=torch.float32), dim=-1),
            c.clone(),
        )
        for _ in range(m.gdn_layers)
    ]

    def run(i: int) -> None:
        fold_states(layers, slots[i], factors, path, length, has_state=has)

    def check() -> str | None:
        some = (0, m.gdn_layers - 1)
        truths = [layers[layer].double() for layer in some]
        run(0)
        for layer, truth in zip(some, truths):
            exact = TreeFactors(*(x.double() for x in factors[layer]))
            delta_reference.fold(truth, slots[0], exact, path, length, has)
        return first(*(off(f"state of layer {n}", layers[n], truth) for n, truth in zip(some, truths)))

    per_row = 4 * (m.gdn_values * m.gdn_value_size + m.gdn_keys * m.gdn_key_size + 2 * m.gdn_values)
    moved = case.batch * (2 * m.state_bytes + ACCEPTED * per_row)
    return Ready([partial(run, i) for i in range(count)], moved, check, units=m.gdn_layers)


def _conv(source: Source, case: Case) -> Ready:
    m, rows = case.model, case.batch * case.width
    count = source.sets(2 * 2 * rows * m.channels, 8, 256)
    x = source.normal(count, case.batch, case.width, m.channels)
    windows = source.normal(count, case.batch + 1, m.taps - 1, m.channels)
    weight = source.normal(m.channels, m.taps)
    slots, parent = source.permutation(case.batch + 1, case.batch), source.trees(case.batch, case.width)
    has = source.full(case.batch, True, torch.bool)

    def run(i: int) -> Tensor:
        return causal_conv_tree(x[i], windows[i], weight, None, slots, parent, has_state=has)

    def check() -> str | None:
        exact = (x[0].double(), windows[0].double(), weight.double())
        return off("y", run(0), causal_conv_tree(*exact, None, slots, parent, has_state=has))

    def stock_calls() -> stock.Calls:
        own = source.normal(count, case.batch + 1, m.taps - 2 + case.width, m.channels).transpose(2, 3)
        return stock.convolution(list(x), list(own), weight, ACCEPTED)

    moved = 2 * (2 * rows * m.channels + case.batch * (m.taps - 1) * m.channels + m.channels * m.taps)
    return Ready([partial(run, i) for i in range(count)], moved, check, stock=stock_calls)


def _conv_commit(source: Source, case: Case) -> Ready:
    m = case.model
    xs = list(source.normal(m.gdn_layers, case.batch, case.width, m.channels))
    count = source.sets(2 * 2 * case.batch * m.channels * (m.taps - 1) * m.gdn_layers, 1, 256)
    windows = source.normal(m.gdn_layers, count * case.batch + 1, m.taps - 1, m.channels)
    slots = source.permutation(count * case.batch + 1, count, case.batch)
    has = source.full(case.batch, True, torch.bool)
    path, length = paths(source, case)

    def run(i: int) -> None:
        conv_commits(list(windows), slots[i], xs, path, length, has_state=has)

    def check() -> str | None:
        truth = windows.clone()
        run(0)
        for layer in range(m.gdn_layers):
            conv_reference.commit(truth[layer], slots[0], xs[layer], path, length, has)
        return off("windows", windows, truth, exact=True)

    moved = 2 * 2 * case.batch * (m.taps - 1) * m.channels
    return Ready([partial(run, i) for i in range(count)], moved, check, units=m.gdn_layers)


def cases() -> list[Case]:
    found = []
    for kernel, prepare in (
        ("gated_delta_tree", _tree), ("fold_state", _fold), ("causal_conv_tree", _conv), ("conv_commit", _conv_commit)
    ):  # fmt: skip
        for model in MODELS.values():
            for width in WIDTHS:
                # The goals name batch 8 too.
                extra = (8,) if model is QWEN_27B and width == 16 else ()
                found += [Case(kernel, model, width, batch, prepare) for batch in sorted((*BATCHES, *extra))]
    return found
