# SPDX-License-Identifier: Apache-2.0
"""What has to be replaced in vLLM 0.20.2rc1 … 0.21.0 because there is no extension point. Each shim says what goes
wrong without it and when it can go. `install()` is called only in processes that serve DDTree, and is idempotent."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


class SeamError(RuntimeError):
    """vLLM no longer looks as this plugin expects; the message names the place."""


def install() -> None:
    _sampling_parameters_that_our_sampler_knows()
    _no_slots_for_the_drafter()
    _one_state_slot_per_request()
    _nothing_after_a_stop_string()
    _no_compiler_on_the_cpu()


def _replace(owner: Any, name: str, parameters: tuple[str, ...], make: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by make(original), once, after checking that the original still has these parameters."""
    current = inspect.getattr_static(owner, name, None)
    if current is None:
        raise SeamError(f"{owner.__name__}.{name} is gone: this plugin knows vLLM 0.20.2rc1.dev166 and 0.21.0")
    original: Any = current.__func__ if isinstance(current, (classmethod, staticmethod)) else current
    original = original.fget if isinstance(original, property) else original
    if getattr(original, "_ddtree", False):
        return
    found = tuple(inspect.signature(original).parameters)
    if found != parameters:
        raise SeamError(f"{owner.__name__}.{name} takes {found}, expected {parameters}: vLLM changed under the plugin")
    replacement = functools.wraps(original)(make(original))
    replacement._ddtree = True
    if isinstance(current, property):
        setattr(owner, name, property(replacement))
    elif isinstance(current, (classmethod, staticmethod)):
        setattr(owner, name, type(current)(replacement))
    else:
        setattr(owner, name, replacement)


UNSUPPORTED_PARAMETERS = ("logprob_token_ids", "thinking_token_budget")
"""Sampling parameters that our sampler does not know: refused, because it would ignore them."""


def _sampling_parameters_that_our_sampler_knows() -> None:
    """Symptom: min_p and logit_bias are answered with an error as soon as a drafter is configured, and what our sampler
    does not know is ignored.
    Cause: vLLM checks for its own samplers. Ours applies all the others to every row.
    Remove when: vLLM asks the worker which parameters its sampler supports."""
    from vllm.sampling_params import SamplingParams

    def validate(self: SamplingParams, speculative_config: Any) -> None:
        for name in UNSUPPORTED_PARAMETERS:
            if getattr(self, name, None) is not None:
                raise ValueError(f"{name} is not supported by DDTree's sampler in any mode: leave it out")

    _replace(SamplingParams, "_validate_spec_decode", ("self", "speculative_config"), lambda original: validate)


def _no_slots_for_the_drafter() -> None:
    """Symptom: max_num_scheduled_tokens shrinks by (B - 1) x max_num_seqs, below zero at the default max_num_seqs.
    Cause: the stock drafter writes its block into the runner's token buffers; ours has buffers of its own. The engine
    core checks again without this shim, so `settings.check` also says so in the configuration.
    Remove when: the drafter reports the slots it needs. A vLLM with patches/vllm/0002 reserves none for
    `dflash_ddtree`; the shim then changes nothing."""
    from vllm.config import SpeculativeConfig

    _replace(
        SpeculativeConfig,
        "max_num_new_slots_for_drafting",
        ("self",),
        lambda original: lambda self: 0 if self.use_dflash() else original(self),
    )


def _one_state_slot_per_request() -> None:
    """Symptom: the convolution state grows by num_speculative_tokens columns, page sizes and layer shapes with it.
    Cause: the stock layer keeps one state per drafted token; ours keeps the committed one only (docs/architecture.md).
    Remove when: the calculator takes the shape from the layer class."""
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    parameters = (
        "cls", "tp_world_size", "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size",
        "num_spec",
    )  # fmt: skip

    def make(original: Any) -> Any:
        def shape(cls: Any, *args: Any, num_spec: int = 0, **kwargs: Any) -> Any:
            return original(cls, *args[:6], **kwargs)

        return shape

    _replace(MambaStateShapeCalculator, "gated_delta_net_state_shape", parameters, make)


def _nothing_after_a_stop_string() -> None:
    """Symptom: the text ends at a stop string, but token ids and log-probabilities go on to the end of that step.
    Cause: the front end looks for stop strings once per step, however many tokens it brought.
    Remove when: the front end cuts a step's tokens where its text ends."""
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
    from vllm.v1.engine.logprobs import LogprobsProcessor

    def one_by_one(original: Any) -> Any:
        def update(self: Any, new_token_ids: list[int], stop_terminated: bool) -> str | None:
            last = len(new_token_ids)
            if last < 2 or not self.stop:
                return original(self, new_token_ids, stop_terminated)
            for count in range(1, last + 1):
                found = original(self, new_token_ids[count - 1 : count], stop_terminated and count == last)
                if found is not None:
                    del new_token_ids[count:]  # the caller's own list: it becomes the output
                    return found
            return None

        return update

    def as_many_as_tokens(original: Any) -> Any:
        def update_from_output(self: Any, output: Any) -> None:
            logprobs = output.new_logprobs
            if logprobs is not None and len(logprobs.logprobs) > len(output.new_token_ids):
                output.new_logprobs = logprobs.slice_request(0, len(output.new_token_ids))
            original(self, output)

        return update_from_output

    _replace(BaseIncrementalDetokenizer, "update", ("self", "new_token_ids", "stop_terminated"), one_by_one)
    _replace(LogprobsProcessor, "update_from_output", ("self", "output"), as_many_as_tokens)


def _no_compiler_on_the_cpu() -> None:
    """Symptom: the first request for log-probabilities stalls for long, or fails where there is no C++
    compiler.
    Cause: ranks are counted by a torch.compile'd function, which on the CPU means generating and building C++.
    Remove when: upstream compiles it on accelerators only."""
    import vllm.v1.sample.sampler as sampler
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    def count_at_least(x: Any, values: Any) -> Any:
        return (x >= values).sum(-1)

    if not callable(getattr(sampler, "batched_count_greater_than", None)):
        raise SeamError("vllm.v1.sample.sampler.batched_count_greater_than is gone: vLLM changed under the plugin")
    sampler.batched_count_greater_than = count_at_least
