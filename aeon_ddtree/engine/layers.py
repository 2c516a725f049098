# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's layers are ours in a DDTree worker, through vLLM's own registries."""

from __future__ import annotations

from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.models import ModelRegistry
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from aeon_ddtree.engine.gdn import TreeGatedDeltaNet

_ATTENTION = "aeon_ddtree.engine.attention"
_GDN = "GatedDeltaNetAttention"


def install() -> None:
    """Register attention, the Gated-DeltaNet layer and the drafter model; idempotent."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{_ATTENTION}.CPUTreeAttentionBackend")
    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{_ATTENTION}.CUDATreeAttentionBackend")
    if op_registry_oot.get(_GDN) is not TreeGatedDeltaNet:
        PluggableLayer.register_oot(TreeGatedDeltaNet, name=_GDN)
    ModelRegistry.register_model("DFlashDraftModel", "aeon_ddtree.engine.drafter:DFlashDrafter")
