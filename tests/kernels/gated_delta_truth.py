# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule token by token in fp64, written from the recurrence: the truth of the kernel tests."""

from __future__ import annotations

import torch
from torch import Tensor


def unit(x: Tensor) -> Tensor:
    return x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()


def replay(x: dict[str, Tensor], r: int, rows: list[int], state: Tensor, scale: float | None = None):
    """Outputs [len(rows), Hv, Dv] and final state [Hv, Dv, Dk] of request r decoding `rows` one after the other."""
    q, k, v, a, b = (x[name][r].double() for name in ("q", "k", "v", "a", "b"))
    decay_rate, dt_bias = x["A_log"].double().exp(), x["dt_bias"].double()
    share = v.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    state = state.double().clone()
    out = []
    for row in rows:
        gate = torch.exp(-decay_rate * torch.log1p(torch.exp(a[row] + dt_bias)))
        beta = 1 / (1 + torch.exp(-b[row]))
        heads = []
        for h in range(v.shape[1]):
            key, query = unit(k[row, h // share]), unit(q[row, h // share])
            decayed = gate[h] * state[h]
            delta = beta[h] * (v[row, h] - decayed @ key)
            state[h] = decayed + torch.outer(delta, key)
            heads.append(scale * (state[h] @ query))
        out.append(torch.stack(heads))
    return torch.stack(out), state


def replay_tree(x: dict[str, Tensor], r: int, parent: list[int], state: Tensor, scale: float | None = None):
    """Each row's output and state from its parent's state, all states kept: [rows, Hv, Dv], list of states."""
    states: list[Tensor] = []
    outs = []
    for row in range(len(parent)):
        before = state if row == 0 else states[parent[row]]
        out, after = replay(x, r, [row], before, scale)
        outs.append(out[0])
        states.append(after)
    return torch.stack(outs), states


def inputs(
    requests: int, width: int, key_heads: int = 1, heads: int = 2, dim: int = 8, value_dim: int = 6, *, seed: int = 0,
    dtype: torch.dtype = torch.float64, slots: int = 11,
) -> dict[str, Tensor]:  # fmt: skip
    """Random inputs and a pool of states; values chosen so that decays range from nearly 1 to nearly 0."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)

    return {
        "q": normal(requests, width, key_heads, dim),
        "k": normal(requests, width, key_heads, dim),
        "v": normal(requests, width, heads, value_dim),
        "a": normal(requests, width, heads) * 2,
        "b": normal(requests, width, heads),
        "A_log": normal(heads),
        "dt_bias": normal(heads),
        "state": normal(slots, heads, value_dim, dim).to(torch.promote_types(dtype, torch.float32)),
    }
