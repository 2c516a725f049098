# SPDX-License-Identifier: Apache-2.0
"""From vLLM's arguments and configuration to DDTree's own: what is accepted, what is refused and how to cure it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from aeon_ddtree.engine.options import KEY, DDTreeOptions, OptionsError
from aeon_ddtree.engine.windows import check_windows

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

METHOD = "dflash_ddtree"
METHODS = ("dflash", METHOD)


def prepare(args: EngineArgs) -> None:
    """Before vLLM validates `args`: accept `dflash_ddtree`, which is `dflash` to a vLLM without patches/vllm/0002, and
    turn prefix caching off where it is unset.

    Raises OptionsError where the arguments contradict each other.
    """
    speculative = args.speculative_config
    if speculative is not None:
        if speculative.get("method") not in METHODS:
            raise OptionsError(
                f"--speculative-config method={speculative.get('method')!r}: expected one of {', '.join(METHODS)}"
            )
        if not knows_method():
            args.speculative_config = dict(speculative) | {"method": "dflash"}
    if args.enable_prefix_caching:
        raise OptionsError(
            "--enable-prefix-caching: the state at a cached prefix is not proven for this engine yet; "
            "start with --no-enable-prefix-caching"
        )
    args.enable_prefix_caching = False
    if str(args.worker_cls).endswith("GPUWorker"):
        backend = args.attention_backend
        if backend is not None and getattr(backend, "name", str(backend)).upper() != "FLASH_ATTN":
            raise OptionsError(
                f"--attention-backend {getattr(backend, 'name', backend)}: DDTree's attention takes the place of "
                "FLASH_ATTN; use --attention-backend FLASH_ATTN, or leave it out"
            )
        args.attention_backend = "FLASH_ATTN"
        if str(args.dtype) in ("float32", "float", "torch.float32") and args.mm_encoder_attn_backend is None:
            # The vision tower would take FLASH_ATTN too, whose real kernels know no fp32.
            args.mm_encoder_attn_backend = "TORCH_SDPA"


def knows_method() -> bool:
    """Whether `dflash_ddtree` is one of this vLLM's own speculative methods."""
    from vllm.config.speculative import SpeculativeMethod

    return METHOD in get_args(SpeculativeMethod)


def options_of(config: VllmConfig) -> DDTreeOptions:
    """DDTree's options of an engine: `--additional-config`'s object, or plain decoding where there is no drafter."""
    extra: Any = config.additional_config
    values = extra.get(KEY) if isinstance(extra, dict) else None
    if values is None:
        if config.speculative_config is None:
            return DDTreeOptions(mode="plain")
        raise OptionsError('--additional-config: {"ddtree": {"mode": "chain" or "tree", ...}} is missing')
    return DDTreeOptions.from_mapping(values)


def horizon_of(config: VllmConfig) -> int:
    """k = the drafter's block size - 1; 0 without a drafter. Never taken from num_speculative_tokens."""
    speculative = config.speculative_config
    if speculative is None:
        return 0
    drafter = speculative.draft_model_config.hf_config
    size = getattr(drafter, "block_size", None)
    if not isinstance(size, int) or size < 2:
        raise OptionsError(f"{speculative.model}/config.json: block_size is {size!r}, expected a whole number >= 2")
    return size - 1


def check(config: VllmConfig) -> None:
    """Refuse, before any model loads, what this engine cannot do right."""
    options = options_of(config)
    horizon = horizon_of(config)
    speculative = config.speculative_config
    if (options.mode == "plain") != (speculative is None):
        raise OptionsError(
            f"mode={options.mode} {'needs no' if options.mode == 'plain' else 'needs a'} --speculative-config"
        )
    if speculative is not None:
        check_windows(speculative.draft_model_config.hf_config, config.model_config.max_model_len)
        options.policy(horizon)
        expected = options.num_speculative_tokens(horizon)
        if speculative.num_speculative_tokens != expected:
            raise OptionsError(
                f"--speculative-config num_speculative_tokens={speculative.num_speculative_tokens}: "
                f"mode={options.mode} verifies {expected} drafted rows; set it to {expected}"
            )
        # vLLM's word for drafters that put their block into the runner's token buffers; it then reserves (B - 1) rows
        # per request, in every process. Ours has buffers of its own.
        speculative.parallel_drafting = False
    if config.cache_config.mamba_cache_mode not in ("none", None):
        raise OptionsError(
            f"--mamba-cache-mode {config.cache_config.mamba_cache_mode}: one state slot per request has no snapshots; "
            "use --mamba-cache-mode none"
        )
    refused = {
        "--enable-prompt-embeds": config.model_config.enable_prompt_embeds,
        "--enable-dbo": config.parallel_config.enable_dbo,
        "--kv-transfer-config": config.kv_transfer_config is not None,
        "--speculative-config disable_padded_drafter_batch": (
            speculative is not None and speculative.disable_padded_drafter_batch
        ),
    }
    for flag, given in refused.items():
        if given:
            raise OptionsError(f"{flag}: not supported by DDTree's runner; start without it")
    if config.lora_config is not None:
        raise OptionsError("--enable-lora: not supported together with DDTree's layers; start without it")
    if config.parallel_config.pipeline_parallel_size > 1:
        raise OptionsError("--pipeline-parallel-size: accepted paths do not cross stages; use tensor parallelism")
    if config.model_config.logits_processors:
        raise OptionsError("--logits-processors: DDTree's sampler does not run them; start without any")
    if config.model_config.logprobs_mode not in ("raw_logprobs", "raw_logits"):
        raise OptionsError(f"--logprobs-mode {config.model_config.logprobs_mode}: use raw_logprobs or raw_logits")
