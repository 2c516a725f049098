# SPDX-License-Identifier: Apache-2.0
"""The DFlash drafter in its batched training form; parameter names are those of the checkpoint.

A block is [bonus, mask × 15]. Every layer sees the keys and values of the context's features (made once from
`hidden_norm(fc(features))`) for positions strictly before the bonus, and the whole block, in both directions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aeon_ddtree.proving_ground.train import architecture as arch
from aeon_ddtree.proving_ground.train.target import Mlp, rope_table, rotate

CONFIG = arch.drafter_config()
HEADS, KV_HEADS, HEAD_DIM = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], CONFIG["head_dim"]
BLOCK = arch.BLOCK_SIZE
THETA = CONFIG["rope_parameters"]["rope_theta"]
POSITION_DECAY = 7.0


class Norm(nn.Module):
    """RMSNorm with scale `weight`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * self.weight).to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(arch.HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(arch.HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(arch.HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, arch.HIDDEN, bias=False)
        self.q_norm = Norm(HEAD_DIM)
        self.k_norm = Norm(HEAD_DIM)

    def keys_values(self, x: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        k = self.k_norm(self.k_proj(x).unflatten(-1, (KV_HEADS, HEAD_DIM)))
        return rotate(k, table[0].unsqueeze(-2), table[1].unsqueeze(-2)), self.v_proj(x).unflatten(
            -1, (KV_HEADS, HEAD_DIM)
        )

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor], k_ctx: Tensor, v_ctx: Tensor, mask: Tensor) -> Tensor:
        q = rotate(
            self.q_norm(self.q_proj(x).unflatten(-1, (HEADS, HEAD_DIM))), table[0].unsqueeze(-2), table[1].unsqueeze(-2)
        )
        k, v = self.keys_values(x, table)
        k, v = torch.cat([k_ctx, k], 1), torch.cat([v_ctx, v], 1)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 2) for t in (k, v))
        q, k, v = (t.transpose(1, 2).to(q.dtype) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = Mlp()
        self.input_layernorm = Norm(arch.HIDDEN)
        self.post_attention_layernorm = Norm(arch.HIDDEN)


class Drafter(nn.Module):
    """Batched drafter; `compute` is the dtype of the products."""

    def __init__(self, compute: torch.dtype = torch.float32, num_layers: int = CONFIG["num_hidden_layers"]) -> None:
        super().__init__()
        self.compute = compute
        self.fc = nn.Linear(arch.HIDDEN * len(arch.TARGET_LAYER_IDS), arch.HIDDEN, bias=False)
        self.hidden_norm = Norm(arch.HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.norm = Norm(arch.HIDDEN)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, features: Tensor, anchors: Tensor, embedding: Tensor) -> Tensor:
        """tokens [S, L], features [S, L, F · hidden], anchors [S, A] (bonus positions) -> hidden [S, A, 15, hidden]."""
        rows, length = tokens.shape
        count, device = anchors.shape[1], tokens.device
        with torch.autocast(device.type, self.compute, enabled=self.compute != torch.float32):
            context = self.hidden_norm(self.fc(features.to(self.compute)))
            at = torch.arange(length, device=device)
            table = rope_table(at, HEAD_DIM, THETA)
            positions = (anchors[..., None] + torch.arange(BLOCK, device=device)).flatten(1)
            block_table = rope_table(positions, HEAD_DIM, THETA)
            ids = torch.full((rows, count, BLOCK), arch.MASK_TOKEN, device=device, dtype=torch.long)
            ids[..., 0] = tokens.gather(1, anchors)
            x = F.embedding(ids.flatten(1), embedding).float()
            owner = torch.arange(count, device=device).repeat_interleave(BLOCK)
            before = at[None, None] < anchors.repeat_interleave(BLOCK, 1)[..., None]
            inside = (owner[:, None] == owner[None]).expand(rows, -1, -1)
            mask = torch.cat([before, inside], -1)[:, None]
            for layer in self.layers:
                k_ctx, v_ctx = layer.self_attn.keys_values(context, table)
                y = layer.input_layernorm(x).to(self.compute)
                x = x + layer.self_attn(y, block_table, k_ctx, v_ctx, mask)
                x = x + layer.mlp(layer.post_attention_layernorm(x).to(self.compute))
            return self.norm(x).unflatten(1, (count, BLOCK))[:, :, 1:]


def drafter_loss(drafter: Drafter, tokens: Tensor, features: Tensor, anchors: Tensor, embedding: Tensor) -> Tensor:
    """Cross entropy of the 15 positions after each anchor, weighted exp(-(k - 1) / 7); past the end counts 0."""
    hidden = drafter(tokens, features, anchors, embedding)
    ahead = torch.arange(1, BLOCK, device=tokens.device)
    index = anchors[..., None] + ahead
    valid = index < tokens.shape[1]
    labels = tokens.gather(1, index.clamp(max=tokens.shape[1] - 1).flatten(1)).view(index.shape)
    weight = torch.exp(-(ahead - 1).float() / POSITION_DECAY) * valid
    logits = F.linear(hidden.to(drafter.compute), embedding.to(drafter.compute))
    loss = F.cross_entropy(logits.flatten(0, 2).float(), labels.flatten(), reduction="none").view(index.shape)
    return (loss * weight).sum() / weight.sum()
