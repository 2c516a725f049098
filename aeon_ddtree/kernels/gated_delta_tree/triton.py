# SPDX-License-Identifier: Apache-2.0
"""Launchers of the gated delta rule on CUDA: verify in one launch (two above 16 rows), fold every layer in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aeon_ddtree.kernels.addresses import address_table
from aeon_ddtree.kernels.ancestors_triton import ancestors as ancestors_of
from aeon_ddtree.kernels.gated_delta_tree.fold_kernel import fold_kernel
from aeon_ddtree.kernels.gated_delta_tree.reference import TreeFactors
from aeon_ddtree.kernels.gated_delta_tree.verify_kernels import apply_kernel, prepare_kernel, small_kernel

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


class TreeConfig(NamedTuple):
    """How the verify kernels are cut.

    columns of Dv per program; piece of Dk per turn; warps; pipeline stages; precision of the fp32 products with u and
    of the block inverses, as `tl.dot` names them.
    """

    columns: int = 32
    step: int = 32
    warps: int = 4
    stages: int = 3
    window: str = "tf32x3"
    inverse: str = "ieee"


class FoldConfig(NamedTuple):
    """How the fold kernel is cut: rows of the state per program, warps, precision of the path's product."""

    rows: int = 16
    warps: int = 4
    precision: str = "ieee"


def tree_config(width: int, heads: int) -> TreeConfig:
    """The cut for windows of this width with R · Hv heads in all."""
    return TreeConfig()


def fold_config(heads: int) -> FoldConfig:
    """The cut for L · R · Hv heads in all."""
    return FoldConfig()


def new_factors(requests: int, width: int, heads: int, key_heads: int, v_dim: int, k_dim: int, device) -> TreeFactors:
    """Uninitialised factors; `tree` fills every cell."""
    return TreeFactors(
        torch.empty(requests, width, heads, v_dim, dtype=torch.float32, device=device),
        torch.empty(requests, width, key_heads, k_dim, dtype=torch.float32, device=device),
        torch.empty(requests, width, heads, dtype=torch.float64, device=device),
    )


def tree(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor,
    slots: Tensor, parent: Tensor, has_state: Tensor | None, scale: float | None, ancestors: Tensor | None,
    factors: TreeFactors | None = None, config: TreeConfig | None = None,
) -> tuple[Tensor, TreeFactors]:  # fmt: skip
    """See `gated_delta_tree`, which has checked dtypes and strides."""
    requests, width, key_heads, k_dim = q.shape
    heads, v_dim = v.shape[2:]
    out = torch.empty(requests, width, heads, v_dim, dtype=v.dtype, device=v.device)
    if factors is None:
        factors = new_factors(requests, width, heads, key_heads, v_dim, k_dim, v.device)
    if not requests:
        return out, factors
    seen = (ancestors_of(parent) if ancestors is None else ancestors).view(torch.int8)
    config = config or tree_config(width, requests * heads)
    scale = k_dim**-0.5 if scale is None else scale
    columns = min(config.columns, max(16, triton.next_power_of_2(v_dim)))
    exact = q.dtype != torch.bfloat16
    parts = 0 if exact else 1 if state.dtype == torch.bfloat16 else 3
    padded = max(16, triton.next_power_of_2(k_dim))
    step = min(config.step, padded)
    shape = {"GROUP": heads // key_heads, "DK": k_dim, "STEP": step}
    tile = {"DV": v_dim, "COLS": columns, "PARTS": parts, "FLAGS": has_state is not None, "WINDOW": config.window}
    launch = {"num_warps": config.warps, "num_stages": config.stages}
    qs, ks, vs, a_s, bs, ss = q.stride()[:3], k.stride()[:3], v.stride()[:3], a.stride(), b.stride(), state.stride()[:2]
    cells = (triton.cdiv(v_dim, columns), heads, requests)
    if width <= 16:
        small_kernel[cells](
            q, k, v, a, b, a_log, dt_bias, state, slots, has_state, parent, seen, out, *factors, scale, width, heads,
            *qs, *ks, *vs, *a_s, *bs, *ss, parent.stride(0), seen.stride(0),
            **shape, **tile, BK=padded, INVERSE=config.inverse, **launch,
        )  # fmt: skip
        return out, factors
    blocks = triton.next_power_of_2(triton.cdiv(width, 16))
    scratch = torch.empty(requests, heads, width, 32 * blocks + 32, dtype=torch.float32, device=v.device)
    prepare_kernel[(triton.cdiv(width, 16), heads, requests)](
        q, k, a, b, a_log, dt_bias, slots, parent, seen, factors.k, factors.c, scratch, scale, width, heads,
        *qs, *ks, *a_s, *bs, parent.stride(0), seen.stride(0),
        **shape, BK=padded, BLOCKS=blocks, EXACT=exact, INVERSE=config.inverse, num_warps=4,
    )  # fmt: skip
    apply_kernel[cells](
        q, k, v, state, slots, has_state, parent, out, factors.u, scratch, width, heads,
        *qs, *ks, *vs, *ss, parent.stride(0), **shape, **tile, BLOCKS=blocks, **launch,
    )  # fmt: skip
    return out, factors


def fold(
    states: Sequence[Tensor], slots: Tensor, factors: Sequence[TreeFactors], path: Tensor, path_len: Tensor,
    has_state: Tensor | None, config: FoldConfig | None = None,
) -> None:  # fmt: skip
    """See `fold_states`, which has checked dtypes and strides: all layers share them."""
    state, first = states[0], factors[0]
    requests, width, heads, v_dim = first.u.shape
    key_heads, k_dim = first.k.shape[2:]
    if not requests or not path.shape[1]:
        return
    table = address_table([(s, *f) for s, f in zip(states, factors, strict=True)])
    config = config or fold_config(len(states) * requests * heads)
    rows = min(config.rows, max(16, triton.next_power_of_2(v_dim)))
    fold_kernel[(triton.cdiv(v_dim, rows) * heads, requests, len(states))](
        table, slots, has_state, path, path_len, path.shape[1], width, heads, *state.stride()[:2], path.stride(0),
        GROUP=heads // key_heads, DK=k_dim, DV=v_dim, BK=max(16, triton.next_power_of_2(k_dim)), ROWS=rows,
        PRECISION=config.precision, FLAGS=has_state is not None, DTYPE=_DTYPES[state.dtype], num_warps=config.warps,
    )  # fmt: skip


def chain(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor,
    slots: Tensor, length: Tensor, has_state: Tensor | None, chunk: int, scale: float | None,
) -> Tensor:  # fmt: skip
    """See `gated_delta_chain`: each chunk is a chain-shaped tree of which every row is folded."""
    requests, total = q.shape[:2]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    for start in range(0, total, chunk):
        part = slice(start, min(start + chunk, total))
        row = torch.arange(part.stop - start, device=q.device)
        left = (length.long() - start).clamp(0, row.shape[0])
        parent = torch.where(row < left[:, None], row - 1, -1)
        seen = (row <= row[:, None]).expand(requests, -1, -1)
        mine = torch.where(left > 0, slots.long(), -1)
        known = has_state if start == 0 else None
        out[:, part], factors = tree(
            q[:, part], k[:, part], v[:, part], a[:, part], b[:, part], a_log, dt_bias, state, mine, parent, known,
            scale, seen,
        )  # fmt: skip
        fold([state], mine, [factors], row.expand(requests, -1), left, known)
    return out
