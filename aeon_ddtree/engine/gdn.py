# SPDX-License-Identifier: Apache-2.0
"""The Gated-DeltaNet layer: projections are vLLM's, convolution and recurrence are tree kernels over one state slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn_linear_attn import GatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator, is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

from aeon_ddtree.engine.step import Group, Step
from aeon_ddtree.kernels.causal_conv_tree import causal_conv_chain, causal_conv_tree
from aeon_ddtree.kernels.gated_delta_tree import TreeFactors, gated_delta_chain, gated_delta_tree


@dataclass
class TreeGDNMetadata:
    """slots [R] int64: batch request -> state slot, the request's one block in this group."""

    slots: Tensor
    step: Step | None = None


class TreeGDNBuilder(GDNAttentionMetadataBuilder):
    """vLLM hands extra arguments to subclasses of its own GDN builder; one slot per request needs none of them."""

    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device
        self.reorder_batch_threshold = None  # type: ignore[assignment]

    def build(  # type: ignore[override]
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: Tensor | None = None,
        num_decode_draft_tokens_cpu: Tensor | None = None,
        fast_build: bool = False,
    ) -> TreeGDNMetadata:
        return TreeGDNMetadata(common_attn_metadata.block_table_tensor[:, 0].to(torch.int64))


class TreeGDNBackend(GDNAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[TreeGDNBuilder]:
        return TreeGDNBuilder


@dataclass(frozen=True)
class Verified:
    """What a layer keeps of a verified window until the walk has decided.

    slots    [G] int64           state slots of the tree group
    factors                      u, k, c per row
    inputs   [G, W, channels]    the convolution's inputs
    """

    slots: Tensor
    factors: TreeFactors
    inputs: Tensor


class TreeGatedDeltaNet(GatedDeltaNetAttention):
    """Replaces vLLM's layer wherever one is constructed (see `layers.install`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_spec = 0
        if current_platform.is_cpu():
            # The stock CPU forward is bound to a native operator with its own state layout.
            self._forward_method = self.forward_cuda

    def get_kv_cache_spec(self, vllm_config: Any) -> MambaSpec:
        """One block per request, whatever is drafted: verification never stores a node's state."""
        cache = vllm_config.cache_config
        if self.get_state_dtype()[1] != torch.float32:
            raise ValueError(
                f"--mamba-ssm-cache-dtype: the recurrent state would be {self.get_state_dtype()[1]}, which drifts from "
                "plain decoding; use --mamba-ssm-cache-dtype float32"
            )
        return MambaSpec(
            shapes=tuple(self.get_state_shape()),
            dtypes=self.get_state_dtype(),
            block_size=cache.mamba_block_size,
            page_size_padded=cache.mamba_page_size_padded,
            mamba_type=self.mamba_type,
            mamba_cache_mode=cache.mamba_cache_mode,
            num_speculative_blocks=0,
        )

    def get_state_shape(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return MambaStateShapeCalculator.gated_delta_net_state_shape(
            self.tp_size, self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim, self.conv_kernel_size
        )

    def get_attn_backend(self) -> type[TreeGDNBackend]:
        return TreeGDNBackend

    def states(self) -> tuple[Tensor, Tensor]:
        """(conv windows [S, K - 1, C] oldest first, recurrent states [S, Hv, Dv, Dk]): views of the cache."""
        conv, recurrent = self.kv_cache
        return (conv.transpose(1, 2) if is_conv_state_dim_first() else conv), recurrent

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:  # type: ignore[override]
        """mixed_qkv [T, C], a and b [T, Hv] -> core_attn_out [T, Hv, Dv], in place. Called through vLLM's custom op."""
        metadata = get_forward_context().attn_metadata
        mine: TreeGDNMetadata | None = metadata[self.prefix] if isinstance(metadata, dict) else None
        if mine is None or mine.step is None:  # profiling
            return
        for group in mine.step.groups:
            out = self._group(group, mine, group.take(mixed_qkv), group.take(b), group.take(a))
            group.put(core_attn_out, out)

    def _group(self, group: Group, metadata: TreeGDNMetadata, x: Tensor, b: Tensor, a: Tensor) -> Tensor:
        """[G, L, …] inputs of one group -> [G, L, Hv, Dv]."""
        conv_state, state = self.states()
        slots = metadata.slots[group.reqs]
        weight = self.conv1d.weight.view(self.conv1d.weight.size(0), self.conv1d.weight.size(2))
        if not group.is_tree:
            y = causal_conv_chain(
                x, conv_state, weight, self.conv1d.bias, slots, group.length,
                has_state=group.has_state, activation=self.activation,
            )  # fmt: skip
            return gated_delta_chain(
                *self._heads(y), a, b, self.A_log, self.dt_bias, state, slots, group.length, has_state=group.has_state
            )
        y = causal_conv_tree(
            x, conv_state, weight, self.conv1d.bias, slots, group.parent,
            has_state=group.has_state, activation=self.activation,
        )  # fmt: skip
        q, k, v = self._heads(y)
        out, factors = gated_delta_tree(
            q, k, v, a, b, self.A_log, self.dt_bias, state, slots, group.parent,
            has_state=group.has_state, ancestors=group.visible,
        )  # fmt: skip
        assert metadata.step is not None
        metadata.step.records[self.prefix] = Verified(slots, factors, x)
        if metadata.step.recording is not None:
            metadata.step.recording.gdn(
                self.prefix, group, slots, conv_state, state, factors, x=x, weight=weight, bias=self.conv1d.bias,
                activation=self.activation, y=y, q=q, k=k, v=v, a=a, b=b, A_log=self.A_log, dt_bias=self.dt_bias,
                out=out,
            )  # fmt: skip
        return out

    def _heads(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[G, L, C] -> q and k [G, L, Hk, Dk], v [G, L, Hv, Dv] of this rank."""
        keys, values = self.key_dim // self.tp_size, self.value_dim // self.tp_size
        q, k, v = y.split([keys, keys, values], dim=-1)
        return (
            q.unflatten(-1, (-1, self.head_k_dim)),
            k.unflatten(-1, (-1, self.head_k_dim)),
            v.unflatten(-1, (-1, self.head_v_dim)),
        )
