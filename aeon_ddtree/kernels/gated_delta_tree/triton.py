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
from aeon_ddtree.kernels.dispatch import device_traits
from aeon_ddtree.kernels.gated_delta_tree.fold_kernel import fold_kernel
from aeon_ddtree.kernels.gated_delta_tree.reference import TreeFactors
from aeon_ddtree.kernels.gated_delta_tree.verify_kernels import apply_kernel, prepare_kernel, small_kernel
from aeon_ddtree.kernels.gated_delta_tree.window import INTERPRETED

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


class SmallConfig(NamedTuple):
    """How windows of up to 16 rows are cut.

    span: columns of Dv per program; columns: those of a tile of the state; warps; registers per thread (None: as the
    compiler likes); window: precision of the products with u, as `tl.dot` names them.
    """

    span: int = 128
    columns: int = 32
    warps: int = 4
    registers: int | None = 168
    window: str = "ieee"


class WideConfig(NamedTuple):
    """How wider windows are cut.

    columns of Dv per program; piece of Dk per turn; warps; pipeline stages; precision of the products with u; warps of
    the kernel that prepares a block.
    """

    columns: int = 64
    step: int = 32
    warps: int = 4
    stages: int = 3
    window: str = "bf16x6"
    solvers: int = 2


class FoldConfig(NamedTuple):
    """How the fold kernel is cut: rows of the state per program, warps."""

    rows: int = 64
    warps: int = 8


def small_config(heads: int, processors: int) -> SmallConfig:
    """The cut for R · Hv heads on so many multiprocessors: the solve is repeated only where it fills idle ones."""
    if heads <= processors:  # two programs on each at most: registers are not scarce
        return SmallConfig(span=64, columns=64, registers=None)
    return SmallConfig(span=128 if heads >= 2 * processors else 64)


def wide_config(width: int, k_dim: int, heads: int, processors: int) -> WideConfig:
    """The cut for windows of this width, more than 16, and R · Hv heads on so many multiprocessors."""
    if k_dim <= 64:  # here the cuts below would spill
        return WideConfig(warps=4 if width <= 64 else 8, solvers=4)
    narrow = 32 < width <= 64 and heads < 2 * processors
    return WideConfig(columns=32 if narrow else 64, warps=4 if width <= 64 else 8)


def _precision(name: str) -> str:
    """Triton's interpreter computes in fp32 and refuses the names of split products that it does not know."""
    return "ieee" if INTERPRETED and name == "bf16x6" else name


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
    factors: TreeFactors | None = None, config: SmallConfig | WideConfig | None = None,
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
    scale = k_dim**-0.5 if scale is None else scale
    exact = q.dtype != torch.bfloat16
    parts = 0 if exact else 1 if state.dtype == torch.bfloat16 else 3
    padded = max(16, triton.next_power_of_2(k_dim))
    most = max(16, triton.next_power_of_2(v_dim))
    shape = {"GROUP": heads // key_heads, "DK": k_dim, "DV": v_dim, "PARTS": parts, "FLAGS": has_state is not None}
    qs, ks, vs, a_s, bs, ss = q.stride()[:3], k.stride()[:3], v.stride()[:3], a.stride(), b.stride(), state.stride()[:2]
    processors = device_traits(q)[0]
    if width <= 16:
        small = config if isinstance(config, SmallConfig) else small_config(requests * heads, processors)
        # A tile of wider rows has fewer of them.
        columns = min(small.columns if padded <= 128 else 16, most)
        span = min(max(small.span, columns), most)
        small_kernel[(triton.cdiv(v_dim, span), heads, requests)](
            q, k, v, a, b, a_log, dt_bias, state, slots, has_state, parent, seen, out, *factors, scale, width, heads,
            *qs, *ks, *vs, *a_s, *bs, *ss, parent.stride(0), seen.stride(0),
            **shape, BK=padded, SPAN=span, COLS=columns, WINDOW=_precision(small.window),
            num_warps=small.warps, num_stages=1, maxnreg=small.registers,
        )  # fmt: skip
        return out, factors
    wide = config if isinstance(config, WideConfig) else wide_config(width, k_dim, requests * heads, processors)
    columns, step = min(wide.columns, most), min(wide.step, padded)
    blocks = triton.next_power_of_2(triton.cdiv(width, 16))
    scratch = torch.empty(requests, heads, width, 32 * blocks + 32, dtype=torch.float32, device=v.device)
    prepare_kernel[(triton.cdiv(width, 16), heads, requests)](
        q, k, a, b, a_log, dt_bias, slots, parent, seen, factors.k, factors.c, scratch, scale, width, heads,
        *qs, *ks, *a_s, *bs, parent.stride(0), seen.stride(0),
        GROUP=heads // key_heads, DK=k_dim, BK=padded, STEP=step, BLOCKS=blocks, EXACT=exact,
        num_warps=wide.solvers,
    )  # fmt: skip
    apply_kernel[(triton.cdiv(v_dim, columns), heads, requests)](
        q, k, v, state, slots, has_state, parent, out, factors.u, scratch, width, heads,
        *qs, *ks, *vs, *ss, parent.stride(0),
        **shape, STEP=step, COLS=columns, BLOCKS=blocks, WINDOW=_precision(wide.window),
        num_warps=wide.warps, num_stages=wide.stages,
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
    config = config or FoldConfig()
    rows = min(config.rows, max(16, triton.next_power_of_2(v_dim)))
    fold_kernel[(triton.cdiv(v_dim, rows) * heads, requests, len(states))](
        table, slots, has_state, path, path_len, path.shape[1], width, heads, *state.stride()[:2], path.stride(0),
        GROUP=heads // key_heads, DK=k_dim, DV=v_dim, BK=max(16, triton.next_power_of_2(k_dim)), ROWS=rows,
        FLAGS=has_state is not None, DTYPE=_DTYPES[state.dtype], num_warps=config.warps,
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
