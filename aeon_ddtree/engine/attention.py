# SPDX-License-Identifier: Apache-2.0
"""Attention over paged KV for every layer of this engine: tree windows, prompt chunks, plain decoding, drafter blocks.

On the CPU it replaces vLLM's own backend entirely: that one's K layout depends on the instruction set, and its
non-causal windows attend beyond the sequence. The cache here is [blocks, 2, block, kv heads, head size] everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from aeon_ddtree.engine.step import Step
from aeon_ddtree.kernels.tree_attention import tree_attention, write_kv


@dataclass
class TreeAttentionMetadata:
    """For one KV group of the target.

    block_table   [R, blocks] int32  batch request -> physical blocks of this group
    slot_mapping  [T] int64          packed row -> slot in this group's cache; -1 writes nothing
    step                             set by the runner once all groups are built
    """

    block_table: Tensor
    slot_mapping: Tensor
    causal: bool = True
    step: Step | None = None


@dataclass
class BlockAttentionMetadata:
    """For the drafter: R blocks of Q rows that see their committed context and, in both directions, each other.

    block_table  [R, blocks] int32
    context      [R] int64  committed tokens whose K/V lie in the cache; the block's own K/V are never cached
    """

    block_table: Tensor
    context: Tensor
    num_queries: int
    causal: bool = False


class TreeAttentionBuilder(AttentionMetadataBuilder[TreeAttentionMetadata]):
    """Rows are written by slot and grouped by the runner's `Step`, so there is nothing to precompute here."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TreeAttentionMetadata:
        return TreeAttentionMetadata(common_attn_metadata.block_table_tensor, common_attn_metadata.slot_mapping)


class TreeAttentionImpl(AttentionImpl):
    """Writes the rows' K/V, then attends group by group."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **extra: Any,
    ) -> None:
        unsupported = {
            "alibi_slopes": alibi_slopes,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
        } | extra
        asked = [name for name, value in unsupported.items() if value]
        if attn_type != AttentionType.DECODER:
            asked.append(f"attn_type={attn_type}")
        if kv_cache_dtype not in ("auto", "float16", "bfloat16"):
            asked.append(f"kv_cache_dtype={kv_cache_dtype} (use --kv-cache-dtype auto)")
        if asked:
            raise ValueError(f"DDTree's attention does not support {', '.join(asked)}: serve this model without DDTree")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write K/V [T, kv heads, head size] into their slots; the drafter calls this for its context."""
        k_cache, v_cache = split(kv_cache)
        write_kv(key, value, k_cache, v_cache, slot_mapping[: key.shape[0]])

    def forward(  # type: ignore[override]
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TreeAttentionMetadata | BlockAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [T, heads, head size], key/value [T, kv heads, head size], in `output` [T, heads, head size]."""
        if attn_metadata is None or getattr(attn_metadata, "step", attn_metadata) is None:  # profiling
            return output.zero_()
        k_cache, v_cache = split(kv_cache)
        if isinstance(attn_metadata, BlockAttentionMetadata):
            return self._block(query, key, value, k_cache, v_cache, attn_metadata, output)
        step = attn_metadata.step
        assert step is not None
        rows = attn_metadata.slot_mapping.shape[0]
        write_kv(key[:rows], value[:rows], k_cache, v_cache, attn_metadata.slot_mapping)
        for group in step.groups:
            q, block_table = group.take(query), attn_metadata.block_table[group.reqs]
            out = tree_attention(
                q,
                k_cache,
                v_cache,
                block_table,
                group.context,
                group.visible,
                group.length,
                scale=self.scale,
                window=self.sliding_window,
                depth=group.depth,
            )
            group.put(output, out)
            if group.is_tree and step.recording is not None:
                step.recording.attention(
                    layer.layer_name, group, k_cache, v_cache, block_table, q=q, scale=self.scale,
                    window=self.sliding_window, out=out,
                )  # fmt: skip
        return output

    def _block(
        self, query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor,
        metadata: BlockAttentionMetadata, output: Tensor,
    ) -> Tensor:  # fmt: skip
        size = metadata.num_queries
        count = metadata.context.shape[0]
        used = count * size
        rows = torch.full((count,), size, dtype=torch.int64, device=query.device)
        out = tree_attention(
            query[:used].unflatten(0, (count, size)),
            k_cache,
            v_cache,
            metadata.block_table,
            metadata.context,
            torch.ones(count, size, size, dtype=torch.bool, device=query.device),
            rows,
            scale=self.scale,
            window=self.sliding_window,
            depth=torch.arange(size, device=query.device).expand(count, size),
            own_kv=(key[:used].unflatten(0, (count, size)), value[:used].unflatten(0, (count, size))),
        )
        output[:used] = out.flatten(0, 1)
        return output


def split(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """[blocks, 2, block, kv heads, head size] -> K and V, each [blocks, block, kv heads, head size]."""
    return kv_cache[:, 0], kv_cache[:, 1]


class _TreeAttentionBackend(AttentionBackend):
    accept_output_buffer: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @staticmethod
    def get_impl_cls() -> type[TreeAttentionImpl]:
        return TreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeAttentionBuilder]:
        return TreeAttentionBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True


class CPUTreeAttentionBackend(_TreeAttentionBackend):
    """Takes the place of CPU_ATTN, the only backend vLLM's CPU platform asks for."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"


class CUDATreeAttentionBackend(_TreeAttentionBackend):
    """Takes the place of FLASH_ATTN."""

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"
