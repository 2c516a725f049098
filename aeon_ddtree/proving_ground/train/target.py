# SPDX-License-Identifier: Apache-2.0
"""The target's text model for training and fast decoding; parameter names are those of the checkpoint.

`state_dict()` keys are the checkpoint's, less the prefix `model.language_model.`. Equality with transformers is tested.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aeon_ddtree.proving_ground.train import architecture as arch
from aeon_ddtree.proving_ground.train import gated_delta

CONFIG = arch.text_config()
HEADS, KV_HEADS, HEAD_DIM = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], CONFIG["head_dim"]
K_HEADS, V_HEADS, LINEAR_DIM = (
    CONFIG["linear_num_key_heads"],
    CONFIG["linear_num_value_heads"],
    CONFIG["linear_key_head_dim"],
)
ROTARY = int(HEAD_DIM * CONFIG["partial_rotary_factor"])
CONV = CONFIG["linear_conv_kernel_dim"]
EPS = CONFIG["rms_norm_eps"]


def rope_table(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [..., dim] (halves repeated) at integer `positions` [...], fp32."""
    inverse = theta ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angle = positions[..., None].float() * inverse
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `cos.shape[-1]` dimensions of x (half-split convention), in fp32, back to x's dtype."""
    dim = cos.shape[-1]
    part, rest = x[..., :dim].float(), x[..., dim:]
    half = torch.cat([-part[..., dim // 2 :], part[..., : dim // 2]], -1)
    return torch.cat([(part * cos + half * sin).to(x.dtype), rest], -1)


class ZeroCentredNorm(nn.Module):
    """RMSNorm with scale 1 + weight, in fp32, result in the input's dtype."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)
        return (y * (1.0 + self.weight)).to(x.dtype)


class GatedNorm(nn.Module):
    """RMSNorm (scale weight) followed by the SiLU gate."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * self.weight
        return (y * F.silu(gate.float())).to(x.dtype)


@dataclass
class LayerCache:
    """Decoding state of one layer: k, v [B, L, H, D] (full attention), or conv [B, K, C] and state [B, H, D, D]."""

    k: Tensor | None = None
    v: Tensor | None = None
    conv: Tensor | None = None
    state: Tensor | None = None


class GatedDeltaNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        key, value = K_HEADS * LINEAR_DIM, V_HEADS * LINEAR_DIM
        self.split = [key, key, value]
        self.in_proj_qkv = nn.Linear(arch.HIDDEN, 2 * key + value, bias=False)
        self.in_proj_z = nn.Linear(arch.HIDDEN, value, bias=False)
        self.in_proj_b = nn.Linear(arch.HIDDEN, V_HEADS, bias=False)
        self.in_proj_a = nn.Linear(arch.HIDDEN, V_HEADS, bias=False)
        self.conv1d = nn.Conv1d(2 * key + value, 2 * key + value, CONV, groups=2 * key + value, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(V_HEADS))
        self.A_log = nn.Parameter(torch.empty(V_HEADS).uniform_(1, 16).log())
        self.norm = GatedNorm(LINEAR_DIM)
        self.out_proj = nn.Linear(value, arch.HIDDEN, bias=False)

    def _heads(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, ...]:
        q, k, v = mixed.split(self.split, -1)
        q, k = (t.unflatten(-1, (K_HEADS, LINEAR_DIM)).repeat_interleave(V_HEADS // K_HEADS, -2) for t in (q, k))
        beta = self.in_proj_b(x).float().sigmoid()
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        q, k = gated_delta.unit_norm(q) * LINEAR_DIM**-0.5, gated_delta.unit_norm(k)
        return q, k, v.unflatten(-1, (V_HEADS, LINEAR_DIM)), g, beta

    def _finish(self, x: Tensor, out: Tensor) -> Tensor:
        z = self.in_proj_z(x).unflatten(-1, (V_HEADS, LINEAR_DIM))
        return self.out_proj(self.norm(out.to(x.dtype), z).flatten(-2))

    def forward(self, x: Tensor, compute: torch.dtype) -> Tensor:
        mixed = self.in_proj_qkv(x)
        padded = F.pad(mixed, (0, 0, CONV - 1, 0))
        weight = self.conv1d.weight[:, 0]
        length = x.shape[1]
        # Shifted sums fuse with their neighbours; depthwise conv1d is slow in bf16.
        total = padded[:, :length].float() * weight[:, 0]
        for i in range(1, CONV):
            total = total + padded[:, i : i + length].float() * weight[:, i]
        mixed = F.silu(total).to(x.dtype)
        out = gated_delta.chunked(*self._heads(x, mixed), compute)
        return self._finish(x, out)

    def decode(self, x: Tensor, cache: LayerCache) -> Tensor:
        """x [B, hidden], one token; updates conv window and state in place."""
        assert cache.conv is not None and cache.state is not None
        cache.conv.copy_(torch.cat([cache.conv[:, 1:], self.in_proj_qkv(x)[:, None].to(cache.conv.dtype)], 1))
        mixed = F.silu((cache.conv.float() * self.conv1d.weight[:, 0].T).sum(1)).to(x.dtype)
        q, k, v, g, beta = self._heads(x, mixed)
        return self._finish(x, gated_delta.step(cache.state, q, k, v, g, beta))


class GatedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(arch.HIDDEN, HEADS * HEAD_DIM * 2, bias=False)
        self.k_proj = nn.Linear(arch.HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(arch.HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, arch.HIDDEN, bias=False)
        self.q_norm = ZeroCentredNorm(HEAD_DIM)
        self.k_norm = ZeroCentredNorm(HEAD_DIM)

    def _qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, gate = self.q_proj(x).unflatten(-1, (HEADS, 2 * HEAD_DIM)).chunk(2, -1)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (KV_HEADS, HEAD_DIM)))
        v = self.v_proj(x).unflatten(-1, (KV_HEADS, HEAD_DIM))
        return rotate(self.q_norm(q), cos, sin), rotate(k, cos, sin), v, gate

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v, gate = self._qkv(x, cos[:, None], sin[:, None])
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.o_proj((out * gate.sigmoid()).flatten(-2))

    def decode(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, at: Tensor) -> Tensor:
        """x [B, hidden] at position `at` (scalar tensor, the same for all rows); writes K and V in place."""
        assert cache.k is not None and cache.v is not None
        q, k, v, gate = self._qkv(x, cos, sin)
        cache.k.index_copy_(1, at, k[:, None].to(cache.k.dtype))
        cache.v.index_copy_(1, at, v[:, None].to(cache.v.dtype))
        seen = (torch.arange(cache.k.shape[1], device=x.device) <= at)[None, None, None]
        keys, values = (t.transpose(1, 2).to(q.dtype) for t in (cache.k, cache.v))
        grouped = q.unflatten(1, (KV_HEADS, HEADS // KV_HEADS))
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen).flatten(1, 2)
        return self.o_proj((out * gate.sigmoid()).flatten(-2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(arch.HIDDEN, CONFIG["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(arch.HIDDEN, CONFIG["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(CONFIG["intermediate_size"], arch.HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear_attn = GatedDeltaNet() if kind == "linear_attention" else None
        self.self_attn = GatedAttention() if kind == "full_attention" else None
        self.mlp = Mlp()
        self.input_layernorm = ZeroCentredNorm(arch.HIDDEN)
        self.post_attention_layernorm = ZeroCentredNorm(arch.HIDDEN)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, compute: torch.dtype) -> Tensor:
        y = self.input_layernorm(x).to(compute)
        mixer = self.linear_attn
        x = x + (mixer(y, compute) if mixer is not None else self.self_attn(y, cos, sin))  # type: ignore[misc]
        return x + self.mlp(self.post_attention_layernorm(x).to(compute))

    def decode(
        self, x: Tensor, cos: Tensor, sin: Tensor, compute: torch.dtype, cache: LayerCache, at: Tensor
    ) -> Tensor:
        y = self.input_layernorm(x).to(compute)
        mixer = self.linear_attn
        x = x + (mixer.decode(y, cache) if mixer is not None else self.self_attn.decode(y, cos, sin, cache, at))
        return x + self.mlp(self.post_attention_layernorm(x).to(compute))


class Target(nn.Module):
    """Text model of the target. `compute` is the dtype of the products; the residual stream is fp32."""

    def __init__(self, compute: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.compute = compute
        self.embed_tokens = nn.Embedding(arch.VOCAB_SIZE, arch.HIDDEN)
        self.layers = nn.ModuleList(Layer(kind) for kind in arch.LAYER_TYPES)
        self.norm = ZeroCentredNorm(arch.HIDDEN)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, features: bool = False) -> tuple[Tensor, Tensor | None]:
        """tokens [B, T] -> final normed hidden [B, T, hidden] and, on request, drafter features [B, T, F · hidden]."""
        with torch.autocast(tokens.device.type, self.compute, enabled=self.compute != torch.float32):
            x = self.embed_tokens(tokens).float()
            cos, sin = rope_table(torch.arange(tokens.shape[1], device=tokens.device), ROTARY, 10000.0)
            kept = []
            for index, layer in enumerate(self.layers):
                x = layer(x, cos, sin, self.compute)
                if features and index in arch.TARGET_LAYER_IDS:
                    kept.append(x)
            return self.norm(x), torch.cat(kept, -1) if features else None

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocabulary], through the tied embedding, fp32 result."""
        with torch.autocast(hidden.device.type, self.compute, enabled=self.compute != torch.float32):
            return F.linear(hidden.to(self.compute), self.embed_tokens.weight.to(self.compute)).float()

    def new_cache(self, batch: int, length: int) -> list[LayerCache]:
        """Zeroed decoding state for `batch` rows of at most `length` tokens."""
        device, caches = self.embed_tokens.weight.device, []
        for layer in self.layers:
            if layer.linear_attn is not None:
                width = (2 * K_HEADS + V_HEADS) * LINEAR_DIM
                caches.append(
                    LayerCache(
                        conv=torch.zeros(batch, CONV, width, device=device, dtype=self.compute),
                        state=torch.zeros(batch, V_HEADS, LINEAR_DIM, LINEAR_DIM, device=device),
                    )
                )
            else:
                shape = (batch, length, KV_HEADS, HEAD_DIM)
                caches.append(LayerCache(*(torch.zeros(shape, device=device, dtype=self.compute) for _ in "kv")))
        return caches

    def decode(self, tokens: Tensor, caches: list[LayerCache], at: Tensor) -> Tensor:
        """One token a row, tokens [B], all at position `at` ([1] int64) -> logits [B, vocabulary]; caches in place."""
        with torch.autocast(tokens.device.type, self.compute, enabled=self.compute != torch.float32):
            x = self.embed_tokens(tokens).float()
            cos, sin = rope_table(at, ROTARY, 10000.0)
            for layer, cache in zip(self.layers, caches, strict=True):
                x = layer.decode(x, cos, sin, self.compute, cache, at)
            return self.logits(self.norm(x))
