# SPDX-License-Identifier: Apache-2.0
"""The DFlash proposer: one forward over [bonus, mask x k] gives k position distributions, whatever the budget."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.spec_decode.dflash import DFlashProposer

from aeon_ddtree.engine.attention import BlockAttentionMetadata, split
from aeon_ddtree.engine.settings import METHODS, horizon_of


class DDTreeProposer(DFlashProposer):
    """vLLM's proposer for loading, weight sharing and KV groups; drafting itself is this class's.

    Differences that matter: the horizon comes from the checkpoint's block size, positions are one-dimensional token
    indices (also after pictures), and the block's own K/V never enter the cache, so no slot beyond the committed
    context is ever written.
    """

    methods = METHODS  # asked for by a vLLM with patches/vllm/0002

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        self.horizon = horizon_of(vllm_config)
        mask = self.draft_model_config.hf_config.dflash_config["mask_token_id"]
        self.parallel_drafting_token_id = mask
        vocabulary = vllm_config.model_config.get_vocab_size()
        if not 0 <= mask < vocabulary:
            raise ValueError(f"drafter config.json: mask_token_id {mask} is outside 0 .. {vocabulary - 1}")

    def aux_layers(self) -> tuple[int, ...]:
        """vLLM collects id v *after layer v - 1*; `target_layer_ids` names layers whose output is wanted: add one.

        Read from the drafter's own configuration, so that it does not matter whether vLLM adds it too
        (patches/vllm/0001). A speculators checkpoint brings ids in vLLM's own count; those are taken as they are.
        """
        config = self.draft_model_config.hf_config
        own = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
        if own:
            return tuple(int(state) for state in own)
        return tuple(int(layer) + 1 for layer in config.dflash_config["target_layer_ids"])

    def context_slots(self, block_table: Tensor, reqs: Tensor, positions: Tensor) -> Tensor:
        """[N] slots in the drafter's cache of token `positions` [N] of batch requests `reqs` [N]; negative stays -1."""
        block = self._a_cache().shape[1]
        column = (positions.clamp(min=0) // block).clamp(max=block_table.shape[1] - 1)
        slot = block_table[reqs, column].to(torch.int64) * block + positions % block
        return torch.where(positions >= 0, slot, -1)

    def store_context(self, hidden: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Project committed tokens into the drafter's K/V cache.

        hidden     [N, layers x hidden]  the target's hidden states after the listed layers, concatenated
        positions  [N] int64             token index of each
        slots      [N] int64             -1 stores nothing
        """
        states = self.model.combine_hidden_states(hidden)
        self.model.precompute_and_store_context_kv(states, positions.clamp(min=0), slots)

    def draft_logits(self, bonus: Tensor, context: Tensor, block_table: Tensor) -> Tensor:
        """[R, k, V] logits of the k positions after `bonus`.

        bonus [R]: the token last emitted, at token index `context` [R] = committed tokens; block_table [R, blocks].
        """
        requests, size = bonus.shape[0], self.horizon + 1
        block = torch.full((requests, size), self.parallel_drafting_token_id, dtype=torch.int32, device=bonus.device)
        block[:, 0] = bonus
        positions = context[:, None] + torch.arange(size, device=bonus.device)
        last = self.max_model_len - 1
        metadata = BlockAttentionMetadata(block_table, context, size)
        with set_forward_context(
            dict.fromkeys(self._draft_attn_layer_names, metadata),
            self.vllm_config,
            num_tokens=requests * size,
            slot_mapping={},
        ):
            hidden = self.model(block.view(-1), positions.clamp(max=last).view(-1), None)
        rows = hidden.unflatten(0, (requests, size))[:, 1:].reshape(requests * self.horizon, -1)
        logits = self.model.compute_logits(rows)
        return logits.unflatten(0, (requests, self.horizon))

    @torch.inference_mode()
    def dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Memory profiling: the largest context write and the largest block batch, without attention."""
        width = len(self.aux_layers()) * self.vllm_config.model_config.get_hidden_size()
        hidden = torch.zeros(num_tokens, width, dtype=self.dtype, device=self.device)
        states = self.model.combine_hidden_states(hidden)
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        self.model.precompute_and_store_context_kv(states, zeros)
        queries = min(self.max_batch_size, num_tokens) * (self.horizon + 1)
        ids = torch.zeros(queries, dtype=torch.int32, device=self.device)
        with set_forward_context(None, self.vllm_config, num_tokens=queries, slot_mapping={}):
            self.model.compute_logits(self.model(ids, ids.to(torch.int64), None))

    def propose(self, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError("the runner drafts through store_context and draft_logits; not propose")

    def _a_cache(self) -> Tensor:
        name = min(self._draft_attn_layer_names)
        layer = self.vllm_config.compilation_config.static_forward_context[name]
        return split(layer.kv_cache)[0]
