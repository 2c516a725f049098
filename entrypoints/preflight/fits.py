# SPDX-License-Identifier: Apache-2.0
"""Whether the memory plan and the token budget can work, and which value to change when not."""

import math
from collections.abc import Iterator

from .finding import Finding, Skipped
from .memory import SPACE, Plan, gib, plan
from .situation import DEFAULT, Situation

EXPLICIT = "kv-cache-memory-bytes"


def memory_plan(situation: Situation) -> Iterator[Finding]:
    """Raises Skipped and Refusal as `plan` does."""
    made = plan(situation)
    explicit = situation.flag("kv-cache-memory-bytes")
    if explicit is not None:
        got, cure = f"{explicit.value}, whatever is free", "leave it out: --gpu-memory-utilization decides then"
        yield Finding(explicit.origin, EXPLICIT, got, "not set", cure, "memory.explicit-cache", warning=True)
    if made.utilisation is None or (situation.device == "cpu"):
        yield from _on_cpu(made)
        return
    asked, best = made.utilisation, made.pool.utilisation
    where = "gpu_memory_utilization"
    detail = f"{gib(made.pool.available)} of {gib(made.pool.total)} GiB available by {made.pool.origin}"
    if not 0 < asked.value <= 1:
        yield Finding(asked.origin, where, asked.value, "above 0, at most 1", f"give {best:.2f}", "memory.utilisation")
    elif made.needed > made.pool.largest_share:
        got = f"{made.length.value}, with which the plan needs {gib(made.needed)} GiB"
        expected = f"at most {gib(made.pool.largest_share)} GiB ({detail}, {gib(made.pool.headroom)} kept free)"
        yield Finding(made.length.origin, "max_model_len", got, expected, _smaller(made), "memory.plan")
    elif made.share > made.pool.usable:
        got = f"{asked.value:g}, which asks for {gib(made.share)} GiB"
        expected = f"at most {best:.2f} ({detail}, {gib(made.pool.usable)} GiB can be had)"
        cure = f"give --gpu-memory-utilization {best:.2f} or less, or stop what else uses the memory"
        yield Finding(asked.origin, where, got, expected, cure, "memory.utilisation")
    elif made.needed > made.share:
        least = math.ceil(100 * made.needed / made.pool.total) / 100
        got = f"{asked.value:g}, which gives {gib(made.share)} GiB"
        expected = f"{gib(made.needed)} GiB for weights, buffers and one request of {made.length.value} tokens"
        cure = f"give --gpu-memory-utilization {min(least, best):.2f} to {best:.2f}, or a smaller --max-model-len"
        yield Finding(asked.origin, where, got, expected, cure, "memory.share")
    else:
        if made.pool.unified and made.share > made.pool.cuda_free:
            got = f"{asked.value:g}, which asks for {gib(made.share)} of {gib(made.pool.total)} GiB"
            expected = f"about {gib(made.pool.cuda_free)} GiB, the most that CUDA reports free on unified memory"
            sure = math.floor(100 * made.pool.cuda_free / made.pool.total) / 100
            cure = f"give --gpu-memory-utilization {sure:.2f}, or empty the page cache, if the start lacks memory"
            yield Finding(asked.origin, where, got, expected, cure, "memory.cuda-free", warning=True)
        if made.at_once < made.requests:
            yield _crowded(situation, made)


def _smaller(made: Plan) -> str:
    if made.longest >= 256:
        share = f" (with --gpu-memory-utilization {made.pool.utilisation:.2f})" if made.utilisation else ""
        return f"give --max-model-len {made.longest} or less{share}, or a smaller --max-num-seqs, or free memory"
    return "give a smaller --max-num-seqs or model, or free memory"


def _crowded(situation: Situation, made: Plan) -> Finding:
    seqs = situation.max_num_seqs
    got = f"{seqs.value}, of which {made.at_once} fit at once with {made.length.value} tokens each"
    cure = "expect longer requests to wait, or give a smaller --max-num-seqs or --max-model-len"
    return Finding(seqs.origin, "max_num_seqs", got, "requests that fit", cure, "memory.crowded", warning=True)


def _on_cpu(made: Plan) -> Iterator[Finding]:
    detail = f"{gib(made.pool.available)} of {gib(made.pool.total)} GiB available by {made.pool.origin}"
    fixed = sum(made.fixed.values())
    least = math.ceil(made.request / (1 << 30))
    if fixed + made.request > made.pool.usable:
        got = f"{made.length.value}, with which the plan needs {gib(made.needed)} GiB"
        yield Finding(made.length.origin, "max_model_len", got, detail, _smaller(made), "memory.plan")
    elif made.utilisation is not None and made.share > made.pool.available:
        got = f"not set, so that vLLM asks for {made.utilisation.value:g} of all memory ({gib(made.share)} GiB)"
        cure = f"set {SPACE}={least} (GiB) or more"
        yield Finding("environment", SPACE, got, detail, cure, "memory.kv-space")
    elif made.utilisation is None and made.share > made.pool.usable:
        got = f"{gib(made.share - fixed)} GiB beside {gib(fixed)} for the model"
        yield Finding("environment", SPACE, got, detail, f"set {SPACE}={least} (GiB)", "memory.kv-space")
    elif made.needed > made.share:
        got = f"{gib(made.share - fixed)} GiB"
        expected = f"{gib(made.request)} GiB for one request of {made.length.value} tokens"
        cure = f"set {SPACE}={least} or give a smaller --max-model-len"
        yield Finding("environment", SPACE, got, expected, cure, "memory.kv-space")


def token_budget(situation: Situation) -> Iterator[Finding]:
    """max_num_seqs × W rows must fit a step: otherwise trees starve, or vLLM's own arithmetic turns negative."""
    seqs, tokens, width = situation.max_num_seqs, situation.max_num_batched_tokens, situation.width
    if width is None:
        raise Skipped("the drafter's block size is not known yet")
    if seqs.value < 1 or tokens.value < 1:
        name, bad = ("max_num_seqs", seqs) if seqs.value < 1 else ("max_num_batched_tokens", tokens)
        yield Finding(bad.origin, name, bad.value, "at least 1", f"correct --{name.replace('_', '-')}", "tokens.range")
    elif seqs.value * width > tokens.value:
        got = f"{seqs.value} × {width} rows of each request = {seqs.value * width} tokens in a step"
        expected = f"at most max_num_batched_tokens = {tokens.value} ({tokens.origin})"
        cures = [f"--max-num-batched-tokens {seqs.value * width}"]
        if tokens.value >= width:
            cures.insert(0, f"--max-num-seqs {tokens.value // width}")
        code = "tokens.default" if DEFAULT in (seqs.origin, tokens.origin) else "tokens.budget"
        yield Finding(seqs.origin, "max_num_seqs", got, expected, f"give {' or '.join(cures)}", code)


def context_length(situation: Situation) -> Iterator[Finding]:
    """A context beyond what the model was trained for is refused by vLLM; the drafter's own is a warning."""
    if situation.setting("max_model_len") is None:
        return
    asked = situation.max_model_len
    if asked.value < 1:
        yield Finding(
            asked.origin, "max_model_len", asked.value, "at least 1", "correct --max-model-len", "context.range"
        )
        return
    config = situation.text_config()
    longest = config.get("max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    scaled = isinstance(rope, dict) and rope.get("rope_type", "default") != "default"
    if isinstance(longest, int) and asked.value > longest and not scaled:
        expected = f"at most {longest} (max_position_embeddings of {situation.folder('model')})"
        cure = f"give --max-model-len {longest} or less"
        yield Finding(asked.origin, "max_model_len", asked.value, expected, cure, "context.model")
    elif isinstance(situation.drafter, type(situation.folder("model"))):
        from .models import read_json

        known = read_json(situation.folder("drafter") / "config.json").get("max_position_embeddings")
        if isinstance(known, int) and asked.value > known:
            expected = f"at most {known} (max_position_embeddings of the drafter)"
            cure = "expect few accepted drafts beyond that"
            yield Finding(asked.origin, "max_model_len", asked.value, expected, cure, "context.drafter", warning=True)
