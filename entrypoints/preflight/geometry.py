# SPDX-License-Identifier: Apache-2.0
"""`Geometry`: what a model costs per token, per request and per row, from its configuration. Bytes everywhere."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..failure import Failure, Refusal
from .finding import Skipped
from .headers import Tensor
from .models import WEIGHTS, tensors

DTYPES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
FLOATS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
FP32 = 4


@dataclass(frozen=True)
class Geometry:
    """One model, on one device of `tensor_parallel`.

    full, recurrent: layers of attention and of Gated DeltaNet; kv_token: bytes of K and V of one token in one layer;
    state: recurrent state and convolution window of one request in one layer; factors: u, k, c and the convolution's
    input of one row in one layer; hidden, mlp, vocabulary, channels: widths.
    """

    full: int
    recurrent: int
    kv_token: int
    state: int
    factors: int
    hidden: int
    mlp: int
    vocabulary: int
    channels: int


def item_size(config: Mapping[str, Any], dtype: str) -> int:
    """Bytes of an activation: of `dtype`, or with "auto" of the model's own (fp32 is stored, bf16 is what runs)."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16") if dtype == "auto" else dtype
    return 2 if dtype == "auto" and name == "float32" else DTYPES.get(name.removeprefix("torch."), 2)


def geometry(config: Mapping[str, Any], size: int, kv_size: int, shards: int, file: str) -> Geometry:
    """config: the language part; size, kv_size: bytes of an activation, of a cached value. Raises Skipped, Refusal."""

    def number(name: str, otherwise: int | None = None) -> int:
        value = config.get(name)
        value = otherwise if value is None else value
        if value is None:
            raise Skipped(f"{file} does not say {name}, which the plan needs")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise Refusal(str(Failure(file, name, repr(value), "a whole number, at least 1", "copy the model again")))
        return value

    layers, heads, hidden = number("num_hidden_layers"), number("num_attention_heads"), number("hidden_size")
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        recurrent = sum(kind == "linear_attention" for kind in kinds)
    else:
        interval = config.get("full_attention_interval")
        recurrent = layers - layers // interval if isinstance(interval, int) and interval > 0 else 0
    head_dim = number("head_dim", hidden // max(1, heads))
    kv_heads = max(1, number("num_key_value_heads", heads) // shards)
    state = factors = channels = 0
    if recurrent:
        key_heads, value_heads = number("linear_num_key_heads") // shards, number("linear_num_value_heads") // shards
        key, value = number("linear_key_head_dim"), number("linear_value_head_dim")
        channels = 2 * key_heads * key + value_heads * value
        state = value_heads * key * value * FP32 + (number("linear_conv_kernel_dim", 4) - 1) * channels * size
        factors = (value_heads * value + key_heads * key + value_heads) * FP32 + channels * size
    return Geometry(
        full=layers - recurrent,
        recurrent=recurrent,
        kv_token=2 * kv_heads * head_dim * kv_size,
        state=state,
        factors=factors,
        hidden=hidden,
        mlp=number("intermediate_size", 4 * hidden) // shards,
        vocabulary=number("vocab_size"),
        channels=channels,
    )


def weight_bytes(folder: Path, size: int, quantised: bool) -> int:
    """Bytes of the weights once loaded: as stored when quantised, else every float in an activation's dtype."""
    found = tensors(folder)
    if found:
        return sum(tensor.nbytes if quantised else _loaded(tensor, size) for tensor in found.values())
    return sum(file.stat().st_size for pattern in WEIGHTS for file in folder.glob(pattern))


def _loaded(tensor: Tensor, size: int) -> int:
    return tensor.nbytes // FLOATS[tensor.dtype] * size if tensor.dtype in FLOATS else tensor.nbytes
