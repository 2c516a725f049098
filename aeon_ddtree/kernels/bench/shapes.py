# SPDX-License-Identifier: Apache-2.0
"""The models that are measured, as the sizes that kernels see."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """heads of queries, heads of keys and values, their size; block: positions per cache block; layers."""

    queries: int
    keys: int
    size: int
    block: int
    layers: int

    @property
    def bytes_per_position(self) -> int:
        """K and V of one position in one layer, bf16."""
        return 2 * self.keys * self.size * 2


@dataclass(frozen=True)
class Model:
    """One target and its drafter. GDN: key and value heads, their sizes, layers; taps of the convolution."""

    name: str
    gdn_keys: int
    gdn_values: int
    gdn_key_size: int
    gdn_value_size: int
    gdn_layers: int
    taps: int
    attention: Heads
    drafter: Heads
    drafter_window: int | None
    block: int
    vocabulary: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.gdn_keys * self.gdn_key_size + self.gdn_values * self.gdn_value_size

    @property
    def state_bytes(self) -> int:
        """One request's recurrent state in one layer, fp32."""
        return self.gdn_values * self.gdn_value_size * self.gdn_key_size * 4

    @property
    def horizon(self) -> int:
        """k: tokens that the drafter proposes."""
        return self.block - 1


# Blocks of 864 positions are what vLLM gives this hybrid, so that one block of KV is as large as one recurrent state.
QWEN_27B = Model(
    "27b", gdn_keys=16, gdn_values=48, gdn_key_size=128, gdn_value_size=128, gdn_layers=48, taps=4,
    attention=Heads(24, 4, 256, block=864, layers=16), drafter=Heads(32, 8, 128, block=864, layers=5),
    drafter_window=2048, block=16, vocabulary=248320,
)  # fmt: skip
PROVING_PAIR = Model(
    "pair", gdn_keys=4, gdn_values=8, gdn_key_size=64, gdn_value_size=64, gdn_layers=6, taps=4,
    attention=Heads(4, 2, 64, block=144, layers=2), drafter=Heads(4, 2, 64, block=144, layers=3),
    drafter_window=None, block=16, vocabulary=3072,
)  # fmt: skip
MODELS = {model.name: model for model in (QWEN_27B, PROVING_PAIR)}

WIDTHS = (8, 16, 32, 64)
BATCHES = (1, 4, 16)
CONTEXTS = (512, 2048, 8192, 32768, 131072)
