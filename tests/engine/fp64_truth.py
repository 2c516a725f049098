# SPDX-License-Identifier: Apache-2.0
"""fp64 truth: `transformers`' Qwen3.5 in double, and a DFlash drafter in plain PyTorch, written from its description."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode


class KeepDouble(TorchFunctionMode):
    """Inside, whoever asks for fp32 gets fp64: the model code casts to fp32 wherever half precision would hurt."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


@dataclass(frozen=True)
class State:
    """Committed state after `length` tokens; target layer index -> tensors.

    key, value  [length, kv heads, head size]; conv [K - 1, C] oldest first; recurrent [Hv, Dv, Dk]
    hidden      [new, layers + 1, hidden]: states of the tokens since the state before; [:, i + 1] is after layer i
    """

    length: int
    key: dict[int, Tensor]
    value: dict[int, Tensor]
    conv: dict[int, Tensor]
    recurrent: dict[int, Tensor]
    hidden: Tensor


class Target:
    """The target's language model in fp64."""

    def __init__(self, folder: Path) -> None:
        from transformers import Qwen3_5ForConditionalGeneration

        model = Qwen3_5ForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        self._model = model.model.language_model
        self._head = model.lm_head
        self.config = self._model.config
        rotary = self._model.rotary_emb
        size = 2 * rotary.inv_freq.shape[0]
        theta = self.config.rope_parameters["rope_theta"]
        rotary.inv_freq = theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)

    @torch.inference_mode()
    def logits(self, tokens: Tensor, last: int | None = None) -> Tensor:
        """tokens [N, L] -> logits [N, last or L, V] fp64; rows may be padded at the end, everything is causal."""
        with KeepDouble():
            out = self._model(input_ids=tokens, use_cache=False)
            return self._head(out.last_hidden_state[:, -(last or tokens.shape[1]) :])

    @torch.inference_mode()
    def states(self, tokens: Sequence[int], lengths: Sequence[int]) -> Iterator[State]:
        """The state after each of `lengths` (ascending) tokens, one forward each, continued from the cache."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.config)
        ids = torch.tensor([list(tokens)])
        done = 0
        for length in lengths:
            with KeepDouble():
                out = self._model(
                    input_ids=ids[:, done:length], past_key_values=cache, use_cache=True, output_hidden_states=True
                )
            done = length
            yield self._read(cache, length, out.hidden_states)

    def _read(self, cache: Any, length: int, hidden: Sequence[Tensor]) -> State:
        state = State(length, {}, {}, {}, {}, torch.stack([h[0] for h in hidden], dim=1))
        for index, kind in enumerate(self.config.layer_types):
            layer = cache.layers[index]
            if kind == "full_attention":
                state.key[index] = layer.keys[0].transpose(0, 1)
                state.value[index] = layer.values[0].transpose(0, 1)
            else:
                past = self.config.linear_conv_kernel_dim - 1
                state.conv[index] = layer.conv_states[0, :, -past:].T.clone()
                state.recurrent[index] = layer.recurrent_states[0].transpose(-1, -2).clone()
        return state


class Drafter:
    """DFlash in fp64: Qwen3 layers over [bonus, mask x k]; every layer also sees K/V made of the target's features."""

    def __init__(self, folder: Path, target_folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self._weights = {name: w.double() for name, w in load_file(folder / "model.safetensors").items()}
        shared = load_file(target_folder / "model.safetensors")
        (name,) = [n for n in shared if n.endswith("language_model.embed_tokens.weight")]
        self._embedding = self._weights.get("embed_tokens.weight", shared[name].double())
        self._head = self._weights.get("lm_head.weight", self._embedding)
        self.horizon = self.config["block_size"] - 1
        self.layer_ids = self.config["dflash_config"]["target_layer_ids"]
        self._eps = self.config["rms_norm_eps"]
        self._kv_heads, self._size = self.config["num_key_value_heads"], self.config["head_dim"]

    def context(self, hidden: Tensor, start: int = 0) -> list[tuple[Tensor, Tensor]]:
        """hidden [N, layers + 1, hidden] of tokens start … -> per layer (K, V), each [N, kv heads, head size]."""
        features = torch.cat([hidden[:, layer + 1] for layer in self.layer_ids], dim=-1)
        states = self._norm(features @ self._weights["fc.weight"].T, "hidden_norm")
        positions = torch.arange(start, start + len(hidden))
        return [self._keys_values(layer, states, positions) for layer in range(self.config["num_hidden_layers"])]

    def logits(self, context: Sequence[tuple[Tensor, Tensor]], bonus: int) -> Tensor:
        """[k, V]: the k positions after `bonus`, which stands right behind the context."""
        length = len(context[0][0])
        positions = torch.arange(length, length + self.horizon + 1)
        ids = torch.full((self.horizon + 1,), self.config["dflash_config"]["mask_token_id"])
        ids[0] = bonus
        x = self._embedding[ids]
        for layer, (k_context, v_context) in enumerate(context):
            name = f"layers.{layer}"
            y = self._norm(x, f"{name}.input_layernorm")
            q = self._heads(y, f"{name}.self_attn.q_proj")
            q = self._rotate(self._norm(q, f"{name}.self_attn.q_norm"), positions)
            k, v = self._keys_values(layer, y, positions)
            k, v = torch.cat([k_context, k]), torch.cat([v_context, v])
            k, v = (t.repeat_interleave(q.shape[1] // self._kv_heads, dim=1) for t in (k, v))
            weight = torch.einsum("qhd,khd->hqk", q, k).mul(self._size**-0.5).softmax(-1)
            out = torch.einsum("hqk,khd->qhd", weight, v).flatten(1)
            x = x + out @ self._weights[f"{name}.self_attn.o_proj.weight"].T
            y = self._norm(x, f"{name}.post_attention_layernorm")
            gate, up = (y @ self._weights[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ self._weights[f"{name}.mlp.down_proj.weight"].T
        return self._norm(x[1:], "norm") @ self._head.T

    def _keys_values(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        name = f"layers.{layer}.self_attn"
        k = self._norm(self._heads(x, f"{name}.k_proj"), f"{name}.k_norm")
        return self._rotate(k, positions), self._heads(x, f"{name}.v_proj")

    def _heads(self, x: Tensor, name: str) -> Tensor:
        return (x @ self._weights[f"{name}.weight"].T).unflatten(-1, (-1, self._size))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._weights[f"{name}.weight"], self._eps)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [N, heads, size]: the half-split rotation over the whole head."""
        half = self._size // 2
        theta = self.config["rope_parameters"]["rope_theta"]
        angle = positions[:, None, None] * theta ** -(torch.arange(half, dtype=torch.float64) / half)
        a, b = x.split(half, dim=-1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)
