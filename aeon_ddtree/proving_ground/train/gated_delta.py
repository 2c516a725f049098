# SPDX-License-Identifier: Apache-2.0
"""Gated delta rule for training (chunks) and for decoding (one token), in plain PyTorch.

Formulas: the WY form of the delta rule. Within a chunk, with c the running sum of the log decay g,
    A_ij = beta_i exp(c_i - c_j) k_i·k_j (j < i),   [U0 | W] = (I + A)^-1 [beta V | beta exp(c) K],   U = U0 - W S.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
_BLOCK = 16


def unit_norm(x: Tensor) -> Tensor:
    """x / sqrt(sum x² + 1e-6) over the last dimension, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _inverse(a: Tensor) -> Tensor:
    """(I + a)^-1 for strictly lower triangular `a` [..., n, n]; n a power of two times 16; fp32 throughout.

    Doubling inside 16 x 16 blocks, then block merges: doubling over the whole chunk squares large powers of `a` and
    loses the small result (it ended in NaN at 64 x 64).
    """
    n = a.shape[-1]
    eye = torch.eye(_BLOCK, dtype=a.dtype, device=a.device)
    blocks = torch.stack([a[..., i : i + _BLOCK, i : i + _BLOCK] for i in range(0, n, _BLOCK)], dim=-3)
    power, inverse = blocks, eye - blocks
    for _ in range(3):
        power = power @ power
        inverse = inverse @ (eye + power)
    size, parts = _BLOCK, list(inverse.unbind(-3))
    while len(parts) > 1:
        merged = []
        for i in range(0, len(parts), 2):
            top, bottom, at = parts[i], parts[i + 1], i * size
            corner = -bottom @ (a[..., at + size : at + 2 * size, at : at + size] @ top)
            zero = torch.zeros_like(corner)
            merged.append(torch.cat([torch.cat([top, zero], -1), torch.cat([corner, bottom], -1)], -2))
        parts, size = merged, size * 2
    return parts[0]


@torch.compiler.disable
def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, compute: torch.dtype) -> Tensor:
    """Outputs [B, T, H, D] for q, k (unit norm, q scaled), v [B, T, H, D], g, beta [B, T, H]; the state starts at zero.

    `compute` is the dtype of the large products; the triangular inverse and the state stay in fp32. T is padded to
    whole chunks inside. Left out of compiled regions: it is a long chain of products, slow to compile, little to fuse.
    """
    length = q.shape[1]
    pad = -length % CHUNK
    if pad:
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v))
        g, beta = (F.pad(x, (0, 0, 0, pad)) for x in (g, beta))
    batch, total, heads, dim = q.shape
    n = total // CHUNK
    q, k, v = (x.float().reshape(batch, n, CHUNK, heads, dim).permute(0, 3, 1, 2, 4) for x in (q, k, v))
    g, beta = (x.float().reshape(batch, n, CHUNK, heads).permute(0, 3, 1, 2) for x in (g, beta))
    c = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = torch.where(lower, (c[..., :, None] - c[..., None, :]).clamp(max=0).exp(), 0.0)
    a = (k @ k.transpose(-1, -2)) * decay * beta[..., None] * ~torch.eye(CHUNK, dtype=torch.bool, device=q.device)
    inverse = _inverse(a).to(compute)
    u0 = inverse @ (v * beta[..., None]).to(compute)
    w = inverse @ (k * (beta * c.exp())[..., None]).to(compute)
    scores = ((q.to(compute) @ k.to(compute).transpose(-1, -2)) * decay).to(compute)
    q_in = (q * c.exp()[..., None]).to(compute)
    k_out = (k * (c[..., -1:] - c).exp()[..., None]).to(compute).transpose(-1, -2)
    last = c[..., -1].exp()[..., None, None]
    state = torch.zeros(batch, heads, dim, dim, device=q.device)
    outputs = []
    for i in range(n):
        s = state.to(compute)
        u = u0[:, :, i] - w[:, :, i] @ s
        outputs.append(q_in[:, :, i] @ s + scores[:, :, i] @ u)
        state = state * last[:, :, i] + (k_out[:, :, i] @ u).float()
    out = torch.stack(outputs, 2).permute(0, 2, 3, 1, 4).reshape(batch, total, heads, dim)
    return out[:, :length]


def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One token: updates `state` [B, H, Dk, Dv] (fp32) in place, returns the output [B, H, Dv]."""
    state.mul_(g.float().exp()[..., None, None])
    memory = torch.einsum("bhkv,bhk->bhv", state, k)
    update = (v.float() - memory) * beta.float()[..., None]
    state.add_(k[..., None] * update[..., None, :])
    return torch.einsum("bhkv,bhk->bhv", state, q)
