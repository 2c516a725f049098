# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch gated delta rule over a tree, in the WY form.

    c_i  = sum of g over i and its ancestors
    A_ij = beta_i exp(c_i − c_j) (k_i · k_j)                            j a strict ancestor of i, else 0
    U    = (I + A)^-1 diag(beta) (V − diag(exp c) K S0^T)
    o_i  = scale (exp(c_i) q_i S0^T + sum_j exp(c_i − c_j) (q_i · k_j) u_j)      j an ancestor of i or i
    S_n  = exp(c_n) S0 + sum_j exp(c_n − c_j) u_j k_j^T                          j on the path to n

Everything in fp32 (fp64 when an input is fp64), except c: differences of long sums cancel, so c is always fp64 and only
the differences are rounded. Layout inside: key head first, then G = Hv // Hk value heads that share it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from aeon_ddtree.kernels.ancestors import mask_from_safe, real_rows, safe_parent
from aeon_ddtree.kernels.scatter import clear, gather_slots, write_active

L2_EPS = 1e-6


class TreeFactors(NamedTuple):
    """What a step keeps of each row, enough to commit any path: about 1/64 of a state per row.

    u [R, W, Hv, Dv] and k [R, W, Hk, Dk] (unit norm) in fp32, or fp64 for fp64 inputs; c [R, W, Hv] cumulative log
    decay from the committed state, always fp64. Zero in padding rows.
    """

    u: Tensor
    k: Tensor
    c: Tensor


class _Gates(NamedTuple):
    """Inputs in working precision, padding zeroed: q, k [R, Hk, W, Dk], v [R, Hk, G, W, Dv], g, beta [R, Hk, G, W]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _gates(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, real: Tensor,
    dtype: torch.dtype,
) -> _Gates:  # fmt: skip
    """Projections -> gates. Rows outside `real` [R, W] are cleared first, so that a NaN there stays there."""
    requests, width, key_heads, _ = q.shape
    group = v.shape[2] // key_heads
    blank = ~real
    q, k, v, b = (clear(x.to(dtype), blank) for x in (q, k, v, b))
    g = clear(-a_log.to(dtype).exp() * F.softplus(a.to(dtype) + dt_bias.to(dtype)), blank)
    beta = b.sigmoid()

    def grouped(x: Tensor) -> Tensor:
        return x.reshape(requests, width, key_heads, group).permute(0, 2, 3, 1)

    return _Gates(
        _unit(q).transpose(1, 2),
        _unit(k).transpose(1, 2),
        v.reshape(requests, width, key_heads, group, -1).permute(0, 2, 3, 1, 4),
        grouped(g),
        grouped(beta),
    )


def _window(x: _Gates, s0: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """One window of W rows from s0 [R, Hk, G, Dv, Dk], seen = ancestors-or-self bool [R, W, W].

    Returns o, u [R, Hk, G, W, Dv] and c [R, Hk, G, W] (fp64).
    """
    requests, key_heads, width, dim = x.q.shape
    group, value_dim = s0.shape[2], s0.shape[3]
    dtype = x.q.dtype
    c = torch.einsum("rij,rhgj->rhgi", seen.double(), x.g.double()) if width > 1 else x.g.double()
    from_root = c.to(dtype).exp()[..., None]

    # All value heads of a key head share q and k, so their states are stacked along the output dimension.
    rows = torch.cat([x.k, x.q], dim=2)
    from_state = rows @ s0.reshape(requests, key_heads, group * value_dim, dim).transpose(-1, -2)
    from_state = from_state.reshape(requests, key_heads, 2, width, group, value_dim).permute(2, 0, 1, 4, 3, 5)
    u = x.beta[..., None] * (x.v - from_root * from_state[0])
    o = from_root * from_state[1]
    if width == 1:
        return scale * (o + (x.q * x.k).sum(-1, keepdim=True)[:, :, None] * u), u, c

    products = rows @ x.k.transpose(-1, -2)
    # Masked before exp: c_i − c_j is positive, and may overflow, where j is not above i.
    hidden = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)
    decay = (c[..., :, None] - c[..., None, :]).to(dtype).add_(hidden[:, None, None]).exp_()
    # The solver takes the diagonal as 1 and never reads it or what is above.
    coupling = products[:, :, None, :width] * decay * x.beta[..., None]
    u = torch.linalg.solve_triangular(coupling, u, upper=False, unitriangular=True)
    o = o + (products[:, :, None, width:] * decay) @ u
    return scale * o, u, c


def _advance(s0: Tensor, u: Tensor, k: Tensor, c: Tensor, real: Tensor, last: Tensor) -> Tensor:
    """State after a path: u [R, Hk, G, P, Dv], k [R, Hk, P, Dk], c [R, Hk, G, P], real bool [R, P], last int [R].

    The rows of a path are all above its end, so weight j is exp(c_last − c_j) <= 1. Overwrites s0.
    """
    requests, key_heads, group, steps, value_dim = u.shape
    dtype = u.dtype
    end = c.gather(-1, last[:, None, None, None].expand(-1, key_heads, group, 1))
    weight = (end - c).to(dtype).masked_fill_(~real[:, None, None], -torch.inf).exp_()
    added = (u * weight[..., None]).transpose(-1, -2).reshape(requests, key_heads, group * value_dim, steps) @ k
    return s0.mul_(end.to(dtype).exp_()[..., None]).add_(added.view(s0.shape))


def _working_dtype(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _rows_first(x: Tensor) -> Tensor:
    """[R, Hk, G, W, ...] -> [R, W, Hv, ...]."""
    x = x.movedim(3, 1)
    return x.reshape(x.shape[0], x.shape[1], x.shape[2] * x.shape[3], *x.shape[4:])


def _grouped_state(state: Tensor, key_heads: int, dtype: torch.dtype) -> Tensor:
    """[R, Hv, Dv, Dk] -> [R, Hk, G, Dv, Dk] in working precision."""
    requests, heads, value_dim, dim = state.shape
    return state.to(dtype).reshape(requests, key_heads, heads // key_heads, value_dim, dim)


def tree(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor,
    slots: Tensor, parent: Tensor, has_state: Tensor | None, scale: float | None, ancestors: Tensor | None,
) -> tuple[Tensor, TreeFactors]:  # fmt: skip
    """See `gated_delta_tree`."""
    dtype = _working_dtype(q, k, v, state)
    slots, parent = slots.long(), safe_parent(parent)
    real = real_rows(parent) & (slots >= 0)[:, None]
    seen = mask_from_safe(parent) if ancestors is None else ancestors
    x = _gates(q, k, v, a, b, a_log, dt_bias, real, dtype)
    s0 = _grouped_state(gather_slots(state, slots, has_state), q.shape[2], dtype)
    o, u, c = _window(x, s0, seen, q.shape[-1] ** -0.5 if scale is None else scale)
    # A padding row still reads the state; its output is cleared here, its u and k are zero by construction or here.
    out = clear(_rows_first(o), ~real).to(v.dtype)
    factors = TreeFactors(clear(_rows_first(u), ~real), x.k.transpose(1, 2).contiguous(), _rows_first(c).contiguous())
    return out, factors


def fold(
    state: Tensor, slots: Tensor, factors: TreeFactors, path: Tensor, path_len: Tensor, has_state: Tensor | None
) -> None:
    """See `fold_state`."""
    slots, path, path_len = slots.long(), path.long(), path_len.long()
    requests, steps = path.shape
    width, key_heads = factors.k.shape[1:3]
    heads = factors.u.shape[2]
    group = heads // key_heads
    on_path = (torch.arange(steps, device=path.device) < path_len[:, None]) & (path >= 0) & (path < width)
    flat = torch.where(on_path, path, 0) + torch.arange(requests, device=path.device)[:, None] * width

    def along(x: Tensor) -> Tensor:
        """[R, W, ...] -> [R, P, ...]."""
        picked = x.flatten(0, 1).index_select(0, flat.flatten())
        return clear(picked.unflatten(0, (requests, steps)), ~on_path)

    u = along(factors.u).reshape(requests, steps, key_heads, group, -1).permute(0, 2, 3, 1, 4)
    c = along(factors.c).reshape(requests, steps, key_heads, group).permute(0, 2, 3, 1)
    k = along(factors.k).transpose(1, 2)
    s0 = _grouped_state(gather_slots(state, slots, has_state), key_heads, u.dtype)
    last = (path_len - 1).clamp(0, steps - 1)
    new = _advance(s0, u, k, c, on_path, last)
    write_active(state, slots, (path_len > 0) & (slots >= 0), new.reshape(requests, *state.shape[1:]))


def chain(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor,
    slots: Tensor, length: Tensor, has_state: Tensor | None, chunk: int, scale: float | None,
) -> Tensor:  # fmt: skip
    """See `gated_delta_chain`."""
    dtype = _working_dtype(q, k, v, state)
    slots = slots.long()
    requests, total, key_heads, dim = q.shape
    length = torch.where(slots >= 0, length.long(), 0).clamp(0, total)
    scale = dim**-0.5 if scale is None else scale
    out = torch.zeros_like(v)
    s = _grouped_state(gather_slots(state, slots, has_state), key_heads, dtype)
    for start in range(0, total, chunk):
        part = slice(start, min(start + chunk, total))
        width = part.stop - start
        left = (length - start).clamp(0, width)
        real = torch.arange(width, device=q.device) < left[:, None]
        x = _gates(q[:, part], k[:, part], v[:, part], a[:, part], b[:, part], a_log, dt_bias, real, dtype)
        seen = torch.ones(width, width, dtype=torch.bool, device=q.device).tril_().expand(requests, width, width)
        o, u, c = _window(x, s, seen, scale)
        out[:, part] = clear(_rows_first(o), ~real)
        # A finished request has g = 0 and k = 0 from here on: its state passes through unchanged.
        s = _advance(s, u, x.k, c, real, (left - 1).clamp(min=0))
    write_active(state, slots, length > 0, s.reshape(requests, *state.shape[1:]))
    return out
