# SPDX-License-Identifier: Apache-2.0
"""Sliding windows of a drafter's layers: what its configuration asks for, and whether this vLLM gives it.

vLLM itself builds every DFlash layer as full attention; patches/vllm/0001 makes it take the window of each layer.
"""

from __future__ import annotations

from typing import Any

from aeon_ddtree.engine.options import OptionsError

CURE = "apply patches/vllm/0001-dflash-sliding-window.patch (scripts/apply_patches), or set --max-model-len to {window}"


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Per layer of the drafter the window W in tokens, or None: a query sees keys with position > its own - W.

    config: the drafter's Hugging Face configuration (num_hidden_layers, layer_types, sliding_window,
    use_sliding_window). OptionsError where it contradicts itself.
    """
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * count
    window = getattr(config, "sliding_window", None)
    if len(kinds) != count or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise OptionsError(
            f"drafter config.json: layer_types is {kinds}, expected full_attention or sliding_attention for each of "
            f"{count} layers; use a DFlash drafter"
        )
    if "sliding_attention" not in kinds:
        return (None,) * count
    allowed = getattr(config, "use_sliding_window", True) is not False
    if not allowed or not isinstance(window, int) or window < 1:
        raise OptionsError(
            f"drafter config.json: sliding_window is {window!r} (use_sliding_window {str(allowed).lower()}), expected "
            "a whole number >= 1, since layer_types has sliding_attention; correct the drafter's configuration"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def check_windows(config: Any, max_model_len: int) -> None:
    """Refuse a drafter whose windows this vLLM would ignore, and a context that reaches beyond them.

    Up to a context of one window, full attention is the same thing.
    """
    shortest = min((window for window in layer_windows(config) if window is not None), default=None)
    if shortest is None or max_model_len <= shortest or knows_windows():
        return
    raise OptionsError(
        f"drafter config.json: layers with a sliding window of {shortest}, which this vLLM runs as full attention; "
        f"the context is {max_model_len}: {CURE.format(window=shortest)}"
    )


def knows_windows() -> bool:
    """Whether this vLLM gives each DFlash layer a window of its own, by what it offers and not by its version."""
    from vllm.model_executor.models import qwen3_dflash

    return callable(getattr(qwen3_dflash, "dflash_sliding_windows", None))


def check_layers(windows: tuple[int | None, ...], found: tuple[int | None, ...], max_model_len: int) -> None:
    """The layers that vLLM built have the windows `windows`; RuntimeError otherwise (post-condition of the patch)."""
    for layer, (wanted, got) in enumerate(zip(windows, found, strict=True)):
        if got != wanted and not (got is None and wanted is not None and max_model_len <= wanted):
            raise RuntimeError(
                f"drafter layer {layer} was built with window {got}, its configuration says {wanted}: "
                f"{CURE.format(window=wanted)}"
            )
