# SPDX-License-Identifier: Apache-2.0
"""A DFlash drafter in plain PyTorch, written from the reference description and from no engine's code.

1. Context features of a token: the target's hidden states after the listed layers, concatenated.
2. `c = RMSNorm(W_fc · features)`, once; every layer projects its context keys and values from this same c.
3. The block is [bonus, mask × (block − 1)], embedded with the target's embedding.
4. A layer is a Qwen3 layer whose queries are the block and whose keys and values are those of the context (positions
   strictly before the bonus) followed by the block's own; no causal mask. Keys are normed per head and rotated at
   their token's position. A layer with a sliding window W sees the keys at positions greater than its query's - W.
5. Final norm; logits through the target's output head; row j ≥ 1 predicts the token at the bonus' position + j.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


class ReferenceDrafter:
    """One request at a time, any float dtype; `weights` by checkpoint name, `embedding` [vocabulary, hidden].

    windows: per layer its sliding window in tokens, or None for full attention; by default what the configuration says
    (`layer_types`, `sliding_window`, `use_sliding_window`).
    """

    def __init__(
        self,
        config: dict,
        weights: dict[str, Tensor],
        embedding: Tensor,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        self.config, self.embedding, self.dtype = config, embedding, embedding.dtype
        self.weights = {k: v.to(embedding.dtype) for k, v in weights.items()}
        self.block = config["block_size"]
        self.mask_token = config["dflash_config"]["mask_token_id"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.windows = _windows(config) if windows is None else tuple(windows)
        if len(self.windows) != config["num_hidden_layers"]:
            layers = config["num_hidden_layers"]
            raise ValueError(f"windows: {len(self.windows)} given, expected one for each of {layers} layers")
        wanted = config["hidden_size"]
        if embedding.shape != (config["vocab_size"], wanted):
            raise ValueError(
                f"target embedding is {tuple(embedding.shape)}, the drafter expects {(config['vocab_size'], wanted)}: "
                "use the target this drafter was trained for"
            )

    @classmethod
    def from_pretrained(
        cls, folder: Path | str, target_embedding: Tensor, windows: Sequence[int | None] | None = None
    ) -> ReferenceDrafter:
        """Load config.json and the safetensors of `folder`; arithmetic runs in `target_embedding`'s dtype."""
        folder = Path(folder)
        config = json.loads((folder / "config.json").read_text())
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"no *.safetensors in {folder}; expected a DFlash drafter")
        return cls(config, {k: v for f in files for k, v in load_file(str(f)).items()}, target_embedding, windows)

    def context(self, features: Tensor) -> Tensor:
        """features [N, F · hidden] -> normed context [N, hidden]."""
        return self._norm(features.to(self.dtype) @ self.weights["fc.weight"].T, "hidden_norm")

    def logits(
        self, context_features: Tensor, context_positions: Tensor, bonus_token: int, bonus_position: int | None = None
    ) -> Tensor:
        """Logits [block − 1, vocabulary] of the tokens after the bonus.

        context_features [N, F · hidden] and context_positions [N] belong to the committed tokens before the bonus;
        bonus_position defaults to the last context position + 1 (0 without context).
        """
        if bonus_position is None:
            bonus_position = int(context_positions[-1]) + 1 if len(context_positions) else 0
        context = self.context(context_features)
        ids = torch.full((self.block,), self.mask_token)
        ids[0] = bonus_token
        positions = bonus_position + torch.arange(self.block)
        x = self.embedding[ids]
        for layer in range(self.config["num_hidden_layers"]):
            x = self._layer(layer, x, positions, context, context_positions)
        return self._norm(x[1:], "norm") @ self.embedding.T

    def keys_values(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Per layer (K after its norm and rotation, V), each [N, kv heads, head dim], of context tokens (point 4)."""
        context, pairs = self.context(features), []
        for layer in range(self.config["num_hidden_layers"]):
            p = f"layers.{layer}.self_attn."
            key = self._rotate(self._heads(context, p + "k_proj", self.kv_heads, p + "k_norm"), positions)
            pairs.append((key, self._heads(context, p + "v_proj", self.kv_heads, None)))
        return pairs

    def _layer(self, layer: int, x: Tensor, positions: Tensor, context: Tensor, context_positions: Tensor) -> Tensor:
        p, window = f"layers.{layer}.", self.windows[layer]
        y = self._norm(x, p + "input_layernorm")
        q = self._rotate(self._heads(y, p + "self_attn.q_proj", self.heads, p + "self_attn.q_norm"), positions)
        source, where = torch.cat([context, y]), torch.cat([context_positions, positions])
        k = self._rotate(self._heads(source, p + "self_attn.k_proj", self.kv_heads, p + "self_attn.k_norm"), where)
        v = self._heads(source, p + "self_attn.v_proj", self.kv_heads, None)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.head_dim**-0.5
        if window is not None:
            scores = scores.masked_fill(positions[:, None] - where[None] >= window, -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + mixed @ self.weights[p + "self_attn.o_proj.weight"].T
        y = self._norm(x, p + "post_attention_layernorm")
        gate, up = (y @ self.weights[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        return x + (F.silu(gate) * up) @ self.weights[p + "mlp.down_proj.weight"].T

    def _heads(self, x: Tensor, projection: str, heads: int, norm: str | None) -> Tensor:
        y = (x @ self.weights[projection + ".weight"].T).view(len(x), heads, self.head_dim)
        return y if norm is None else self._norm(y, norm)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return wide.to(x.dtype) * self.weights[name + ".weight"]

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.head_dim // 2
        theta = self.config["rope_parameters"]["rope_theta"]
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        angle = positions[:, None].to(wide) * theta ** (-torch.arange(half, dtype=wide) / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        first, second = x[..., :half].to(wide), x[..., half:].to(wide)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _windows(config: dict) -> tuple[int | None, ...]:
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if "sliding_attention" in kinds and not window:
        raise ValueError("config.json: layer_types has sliding_attention, but there is no sliding_window in use")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
