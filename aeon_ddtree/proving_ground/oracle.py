# SPDX-License-Identifier: Apache-2.0
"""The root truth: the target in `transformers`, in fp64 from end to end, with every layer's committed state.

`transformers` computes norms, the delta rule, softmax and rotary angles in fp32 whatever the model's dtype. Here those
pieces are replaced on the loaded model: norms, recurrence and angles by short fp64 ones below, attention by PyTorch's
own SDPA, which keeps fp64. Everything else (projections, convolution, gating, cache handling) is transformers' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LayerState:
    """State of one layer after n committed tokens, fp64, without a batch dimension.

    Full attention: `key`, `value` [n, kv heads, head dim], the key after its norm and RoPE (as vLLM caches it).
    Gated delta net: `conv` [K, channels], the last K inputs of the convolution, oldest first, zeros before the start
    (vLLM keeps the last K − 1 of them); `state` [value heads, key dim, value dim] (vLLM keeps its transpose).
    """

    kind: str
    key: Tensor | None = None
    value: Tensor | None = None
    conv: Tensor | None = None
    state: Tensor | None = None


@dataclass(frozen=True)
class OracleRun:
    """What the target computes for a token sequence of n tokens.

    `logits` [n, vocabulary]: row i predicts token i + 1. `hidden` [layers + 1, n, hidden]: entry i + 1 is the residual
    stream after layer i (what a drafter's `target_layer_ids` name). `layers`: each layer's state after all n tokens.
    """

    logits: Tensor
    hidden: Tensor
    layers: list[LayerState]


def delta_rule_fp64(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """The delta rule token by token: q, k [B, T, H, Dk], v [B, T, H, Dv], g, beta [B, T, H], state [B, H, Dk, Dv].

    S ← exp(g) S;  S ← S + k (beta (v − k·S));  o = q·S / sqrt(Dk), with q and k of unit norm. All in fp64.
    """
    q, k, v, g, beta = (x.double() for x in (query, key, value, g, beta))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    batch, length, heads, dim = k.shape
    state = torch.zeros(batch, heads, dim, v.shape[-1], dtype=torch.float64) if initial_state is None else initial_state
    state = state.double().clone()
    out = []
    for t in range(length):
        state = state * g[:, t].exp()[..., None, None]
        error = (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * error[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * dim**-0.5)
    return torch.stack(out, 1), state


def _norm(self: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


def _gated_norm(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * x * F.silu(gate)


def _gated_delta_net(self: Any, hidden_states: Tensor, cache_params: Any = None, **_: Any) -> Tensor:
    """The layer with its decay in fp64; transformers rounds it to fp32 on the way."""
    past = cache_params.layers[self.layer_idx] if cache_params.has_previous_state(self.layer_idx) else None
    length, kernel = hidden_states.shape[1], self.conv_kernel_size
    mixed = self.in_proj_qkv(hidden_states).transpose(1, 2)
    before = past.conv_states if past is not None else mixed.new_zeros(*mixed.shape[:2], kernel)
    window = torch.cat([before, mixed], -1)
    # A sum of products: PyTorch's grouped convolution is slow in fp64.
    mixed = F.silu((window.unfold(-1, kernel, 1)[:, :, -length:] * self.conv1d.weight).sum(-1)).transpose(1, 2)
    q, k, v = mixed.split([self.key_dim, self.key_dim, self.value_dim], -1)
    q, k = (x.unflatten(-1, (self.num_k_heads, self.head_k_dim)) for x in (q, k))
    q, k = (x.repeat_interleave(self.num_v_heads // self.num_k_heads, 2) for x in (q, k))
    v = v.unflatten(-1, (self.num_v_heads, self.head_v_dim))
    g = -self.A_log.exp() * F.softplus(self.in_proj_a(hidden_states) + self.dt_bias)
    beta = self.in_proj_b(hidden_states).sigmoid()
    out, state = delta_rule_fp64(q, k, v, g, beta, past.recurrent_states if past is not None else None)
    cache_params.update_conv_state(window[..., -kernel:].contiguous(), self.layer_idx)
    cache_params.update_recurrent_state(state, self.layer_idx)
    z = self.in_proj_z(hidden_states).unflatten(-1, (self.num_v_heads, self.head_v_dim))
    return self.out_proj(self.norm(out, z).flatten(-2))


def _rotary(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    if position_ids.ndim == 2:
        position_ids = position_ids[None].expand(3, -1, -1)
    dim = 2 * self.inv_freq.shape[0]
    theta = self.config.rope_parameters["rope_theta"]
    inverse = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = self.apply_interleaved_mrope(position_ids[..., None].double() * inverse, self.mrope_section)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


class Oracle:
    """fp64 target. `Oracle(folder).run(tokens)`; slow and meant for short sequences (about 1 ms a token and layer)."""

    def __init__(self, folder: Path | str) -> None:
        from transformers import Qwen3_5ForConditionalGeneration
        from transformers.models.qwen3_5 import modeling_qwen3_5 as m

        self.model = Qwen3_5ForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="sdpa"
        ).eval()
        text = self.model.model.language_model
        text.rotary_emb.forward = MethodType(_rotary, text.rotary_emb)
        replaced = (
            (m.Qwen3_5RMSNorm, _norm),
            (m.Qwen3_5RMSNormGated, _gated_norm),
            (m.Qwen3_5GatedDeltaNet, _gated_delta_net),
        )
        for module in text.modules():
            for kind, forward in replaced:
                if isinstance(module, kind):
                    module.forward = MethodType(forward, module)

    @torch.no_grad()
    def run(self, tokens: list[int] | Tensor, past: Any = None, **inputs: Any) -> tuple[OracleRun, Any]:
        """Compute `tokens` ([n] ids), continuing from `past` (the cache of a former call, changed in place).

        `inputs` are passed on to the model (`pixel_values`, `image_grid_thw`, `mm_token_type_ids`, `position_ids`).
        Returns the run (its `layers` hold copies of the state after these tokens) and the cache to continue from.
        """
        ids = torch.as_tensor(tokens, dtype=torch.long).view(1, -1)
        if past is None:
            from transformers import DynamicCache

            past = DynamicCache(config=self.model.config.get_text_config())
        # The model remembers how far the last picture that it saw shifted positions; that belongs to a sequence.
        self.model.model.rope_deltas = getattr(past, "rope_deltas", None)
        out = self.model(input_ids=ids, past_key_values=past, use_cache=True, output_hidden_states=True, **inputs)
        past.rope_deltas = self.model.model.rope_deltas
        # The last entry of hidden_states is after the final norm; a drafter never reads it.
        hidden = torch.stack([h[0] for h in out.hidden_states])
        return OracleRun(out.logits[0], hidden, self._states(past)), past

    def _states(self, past: Any) -> list[LayerState]:
        states = []
        for kind, layer in zip(self.model.config.get_text_config().layer_types, past.layers, strict=True):
            if kind == "full_attention":
                key, value = (t[0].transpose(0, 1).clone() for t in (layer.keys, layer.values))
                states.append(LayerState(kind, key=key, value=value))
            else:
                states.append(
                    LayerState(kind, conv=layer.conv_states[0].T.clone(), state=layer.recurrent_states[0].clone())
                )
        return states

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """`count` greedy tokens after `prompt`, end tokens not obeyed."""
        run, past = self.run(prompt)
        out = [int(run.logits[-1].argmax())]
        while len(out) < count:
            run, past = self.run([out[-1]], past)
            out.append(int(run.logits[-1].argmax()))
        return out
