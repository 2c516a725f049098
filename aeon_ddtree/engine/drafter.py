# SPDX-License-Identifier: Apache-2.0
"""vLLM's DFlash drafter, mended where its attention reads a projection's raw weight."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Attention, DFlashQwen3ForCausalLM

from aeon_ddtree.engine.windows import check_layers, layer_windows


class BlockAttention(DFlashQwen3Attention):
    """Symptom: on the CPU the stock layer fails at the first draft. Cause: it multiplies by `qkv_proj.weight` directly,
    which is empty once the CPU backend has packed it. Remove when: upstream calls the projection itself."""

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """positions [N] int64, hidden_states [N, hidden] -> [N, hidden]; the context's K/V are in the cache already."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q = self.q_norm(q.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        k = self.k_norm(k.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v))[0]


class DFlashDrafter(DFlashQwen3ForCausalLM):
    """Registered as `DFlashDraftModel`; the same weights and names as vLLM's."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:  # vLLM recognises a model by these names
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer in self.model.layers:
            layer.self_attn.__class__ = BlockAttention
        check_layers(
            layer_windows(self.config),
            tuple(layer.self_attn.attn.impl.sliding_window for layer in self.model.layers),
            vllm_config.model_config.max_model_len,
        )
