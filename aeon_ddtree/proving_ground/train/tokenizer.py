# SPDX-License-Identifier: Apache-2.0
"""The byte-level BPE of the pair, and the tokenizer and processor files beside the weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from aeon_ddtree.proving_ground.train import architecture as arch

# Words with their leading space, single digits (arithmetic stays readable), punctuation runs, line ends, indentation.
SPLIT = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """{%- macro render(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' or 'video' in part -%}<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ render(message.content) }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


def train_bpe(texts: Iterable[str]) -> Tokenizer:
    """Train the BPE on `texts`; ids 0 … 3055 are bytes and merges, the special tokens follow up to 3071."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=arch.FIRST_SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != arch.FIRST_SPECIAL:
        raise ValueError(
            f"the BPE has {tokenizer.get_vocab_size()} entries, expected {arch.FIRST_SPECIAL}: give it more text"
        )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in arch.SPECIAL_TOKENS])
    for token, index in arch.TOKEN_ID.items():
        if tokenizer.token_to_id(token) != index:
            raise ValueError(f"{token} got id {tokenizer.token_to_id(token)}, expected {index}")
    return tokenizer


def save_tokenizer_files(tokenizer: Tokenizer, folder: Path, *, with_processor: bool) -> None:
    """Write tokenizer.json, tokenizer_config.json, the chat template and (for the target) the processor files."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": arch.MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "add_bos_token": False,
    }
    if with_processor:
        config["processor_class"] = "Qwen3VLProcessor"
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        write_json(folder / "preprocessor_config.json", arch.image_processor_config())
        write_json(folder / "video_preprocessor_config.json", arch.video_processor_config())
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n")
