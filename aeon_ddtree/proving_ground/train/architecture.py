# SPDX-License-Identifier: Apache-2.0
"""The two configurations, as plain dictionaries in the checkpoint formats that transformers and vLLM read.

Every number of the proving pair's shape stands here and nowhere else.
"""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 3072
MAX_POSITIONS = 8192
BLOCK_SIZE = 16

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|mask|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|reserved_0|>",
    "<|reserved_1|>",
    "<|reserved_2|>",
    "<|reserved_3|>",
]
FIRST_SPECIAL = VOCAB_SIZE - len(SPECIAL_TOKENS)
TOKEN_ID = {token: FIRST_SPECIAL + i for i, token in enumerate(SPECIAL_TOKENS)}
END_OF_TEXT = TOKEN_ID["<|endoftext|>"]
IM_END = TOKEN_ID["<|im_end|>"]
MASK_TOKEN = TOKEN_ID["<|mask|>"]

HIDDEN = 256
LAYER_TYPES = ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 3 + ["full_attention"]
TARGET_LAYER_IDS = [1, 3, 5, 6]
"""Drafter feature i is the target's hidden state AFTER layer TARGET_LAYER_IDS[i] (`hidden_states[id + 1]`)."""


def text_config() -> dict[str, Any]:
    """Text part of the target, `qwen3_5_text`."""
    return {
        "model_type": "qwen3_5_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 640,
        "num_hidden_layers": len(LAYER_TYPES),
        "layer_types": LAYER_TYPES,
        "full_attention_interval": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attn_output_gate": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "mamba_ssm_dtype": "float32",
        "partial_rotary_factor": 0.5,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_interleaved": True,
            "mrope_section": [6, 5, 5],
        },
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": END_OF_TEXT,
        "pad_token_id": END_OF_TEXT,
        "use_cache": True,
        "dtype": "bfloat16",
    }


def vision_config() -> dict[str, Any]:
    """A vision tower just large enough that picture positions, merging and embedding injection are exercised."""
    return {
        "model_type": "qwen3_5",
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "deepstack_visual_indexes": [],
    }


def target_config() -> dict[str, Any]:
    """`config.json` of the target."""
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text_config(),
        "vision_config": vision_config(),
        "image_token_id": TOKEN_ID["<|image_pad|>"],
        "video_token_id": TOKEN_ID["<|video_pad|>"],
        "vision_start_token_id": TOKEN_ID["<|vision_start|>"],
        "vision_end_token_id": TOKEN_ID["<|vision_end|>"],
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def drafter_config(num_layers: int = 3) -> dict[str, Any]:
    """`config.json` of the DFlash drafter: Qwen3-style layers, all full attention, block of 16."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 640,
        "num_hidden_layers": num_layers,
        "layer_types": ["full_attention"] * num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "max_position_embeddings": MAX_POSITIONS,
        "max_window_layers": num_layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_theta": 10000.0,
        "num_target_layers": len(LAYER_TYPES),
        "block_size": BLOCK_SIZE,
        "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": TARGET_LAYER_IDS},
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": END_OF_TEXT,
        "pad_token_id": END_OF_TEXT,
        "use_cache": True,
        "dtype": "bfloat16",
    }


def generation_config() -> dict[str, Any]:
    """`generation_config.json`: both end tokens stop a request."""
    return {
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": [END_OF_TEXT, IM_END],
        "pad_token_id": END_OF_TEXT,
        "do_sample": False,
    }


def image_processor_config() -> dict[str, Any]:
    """`preprocessor_config.json`: patches of 16, merged 2 x 2, at most 64 merged tokens a picture."""
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": 1024, "longest_edge": 65536},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def video_processor_config() -> dict[str, Any]:
    """`video_preprocessor_config.json`, same patches as for pictures."""
    return {**image_processor_config(), "video_processor_type": "Qwen3VLVideoProcessor"} | {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "fps": 2,
        "min_frames": 2,
        "max_frames": 8,
    }
