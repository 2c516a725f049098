# SPDX-License-Identifier: Apache-2.0
"""`Plan`: what a start needs of the memory that can be had, and the largest --gpu-memory-utilization that works.

vLLM takes its whole share of the memory at start (utilisation × total) and refuses to start when that much is not
free; what weights, buffers and graphs leave of the share is the KV cache, which must hold one request of full length.
"""

import math
from dataclasses import dataclass
from typing import Any

from ..values import Value
from .finding import Skipped
from .geometry import Geometry, geometry, item_size, weight_bytes
from .machine import Machine
from .models import read_json, text_config
from .quantisation import Quantisation, of_model
from .situation import GIB, Situation

USUAL_UTILISATION = 0.92
# On unified memory CUDA reports no more than this free, whatever is available: 102 of the 121.7 GiB of a GB10. What the
# pinned vLLM goes by is MemAvailable, as the page cache gives way.
CUDA_SHARE = 102 / 121.7
LEAST_HEADROOM, HEADROOM = 4 * GIB, 0.05  # left to the operating system, of the total
CONTEXT = GIB  # CUDA context and libraries
PROCESSES = 3 * GIB // 2  # API server and engine on the CPU
GRAPH = 16 << 20  # per layer, all captured sizes together: an estimate
SPACE = "VLLM_CPU_KVCACHE_SPACE"
KV_SIZES = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "float32": 4}


@dataclass(frozen=True)
class Pool:
    """Memory to start in: total and available bytes, what must be left over, and where that is known from."""

    total: int
    available: int
    headroom: int
    origin: str
    unified: bool

    @property
    def usable(self) -> int:
        return max(0, self.available - self.headroom)

    @property
    def largest_share(self) -> int:
        """Bytes of that share."""
        return int(self.utilisation * self.total)

    @property
    def cuda_free(self) -> int:
        """What CUDA reports as free at most."""
        return min(self.usable, int(self.total * CUDA_SHARE)) if self.unified else self.usable

    @property
    def utilisation(self) -> float:
        """The largest share that may be asked for, rounded down to hundredths."""
        return math.floor(100 * self.usable / self.total) / 100


@dataclass(frozen=True)
class Plan:
    """Bytes per device.

    fixed: what is there before the first request, by name; request: one request of full length; requests: how many
    there may be; length: tokens of each; share: what vLLM asks for; pool: what can be had; utilisation: the share asked
    for and its origin, None on the CPU with its own space for the cache.
    """

    fixed: dict[str, int]
    request: int
    per_token: int
    requests: int
    length: Value
    share: int
    pool: Pool
    utilisation: Value | None

    @property
    def needed(self) -> int:
        """Everything, with one request of full length."""
        return sum(self.fixed.values()) + self.request

    @property
    def at_once(self) -> int:
        """Requests of full length that fit at once."""
        return max(0, self.share - sum(self.fixed.values())) // max(1, self.request)

    @property
    def longest(self) -> int:
        """Tokens of the longest single request that fits the largest share."""
        state = self.request - self.per_token * self.length.value
        return max(0, (self.pool.largest_share - sum(self.fixed.values()) - state) // max(1, self.per_token))

    def __str__(self) -> str:
        parts = " + ".join(f"{name} {gib(size)}" for name, size in self.fixed.items() if size >= GIB // 200)
        asked = f"share {gib(self.share)}" + (f" (utilisation {self.utilisation.value:g})" if self.utilisation else "")
        best = f"; largest utilisation {self.pool.utilisation:.2f}" if self.utilisation else ""
        fits = f"{min(self.at_once, self.requests)} of {self.requests} requests of {self.length.value} tokens at once"
        return (
            f"{parts} + one request {gib(self.request)} = {gib(self.needed)} GiB; {asked} of {gib(self.pool.total)}, "
            f"{gib(self.pool.available)} available less {gib(self.pool.headroom)} headroom{best}; {fits}"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "fixed_bytes": self.fixed,
            "request_bytes": self.request,
            "needed_bytes": self.needed,
            "share_bytes": self.share,
            "total_bytes": self.pool.total,
            "available_bytes": self.pool.available,
            "headroom_bytes": self.pool.headroom,
            "unified": self.pool.unified,
            "utilisation": None if self.utilisation is None else self.utilisation.value,
            "largest_utilisation": self.pool.utilisation,
            "requests": self.requests,
            "requests_at_once": self.at_once,
            "tokens": self.length.value,
        }


def gib(size: float) -> str:
    """GiB with as many digits as the smaller parts of a plan need."""
    return f"{size / GIB:.1f}" if size >= 10 * GIB else f"{size / GIB:.2f}"


def pool_of(device: str, machine: Machine) -> Pool:
    """Raises Skipped when nothing says how much memory there is."""
    host = machine.memory
    if device == "cpu":
        if host is None:
            raise Skipped("/proc/meminfo does not say how much memory there is")
        return Pool(host.total, host.available, min(GIB, host.total // 20), host.origin, False)
    if not machine.gpus:
        raise Skipped("no GPU")
    gpu = machine.gpus[0]
    if gpu.unified:
        if host is None:
            raise Skipped("/proc/meminfo does not say how much of the unified memory there is")
        headroom = max(LEAST_HEADROOM, int(HEADROOM * host.total))
        return Pool(host.total, host.available, headroom, f"{host.origin} (unified memory)", True)
    if gpu.total is None or gpu.free is None:
        raise Skipped(f"the memory of {gpu.name} is not known; install nvidia-ml-py")
    return Pool(gpu.total, gpu.free, 0, f"driver of {gpu.name}", False)


def plan(situation: Situation) -> Plan:
    """The plan of one start. Raises Skipped where a value is missing, Refusal on unreadable JSON."""
    pool = pool_of(situation.device, situation.machine)
    folder = situation.folder("model")
    config = text_config(read_json(folder / "config.json"))
    dtype = situation.setting("dtype")
    size = item_size(config, str(dtype.value) if dtype else "auto")
    shards = situation.tensor_parallel
    quantised = of_model(folder)
    kv_size = _kv_size(situation, size, quantised)
    target = geometry(config, size, kv_size, shards, str(folder / "config.json"))
    requests, width, length = situation.max_num_seqs.value, situation.width or 1, situation.max_model_len
    fixed = {"weights": weight_bytes(folder, size, quantised is not None) // shards}
    drafter = None
    if situation.drafter is not None:
        where = situation.folder("drafter")
        draft = read_json(where / "config.json")
        drafter = geometry(draft, size, kv_size, shards, str(where / "config.json"))
        fixed["drafter"] = weight_bytes(where, size, "quantization_config" in draft) // shards
    tokens = situation.max_num_batched_tokens.value
    fixed["activations"] = _activations(target, tokens, size)
    fixed["sampling"] = _sampling(target, min(tokens, requests * width), requests * (situation.horizon or 0))
    if situation.drafter is not None:
        fixed["tree factors"] = target.recurrent * target.factors * width * requests
    if situation.device == "cpu":
        fixed["processes"] = PROCESSES
    else:
        fixed["CUDA context"] = CONTEXT
        eager = situation.flag("enforce-eager")
        if not (eager and eager.value is True):
            fixed["CUDA graphs"] = GRAPH * (target.full + target.recurrent + (drafter.full if drafter else 0))
    per_token, state = _cache(target, drafter)
    request = per_token * length.value + state
    share, utilisation = _share(situation, pool, sum(fixed.values()))
    return Plan(fixed, request, per_token, requests, length, share, pool, utilisation)


def _kv_size(situation: Situation, size: int, quantised: Quantisation | None) -> int:
    flag = situation.flag("kv-cache-dtype")
    if flag is None or flag.value == "auto":
        return 1 if quantised is not None and quantised.kv == "FP8" else size
    return KV_SIZES.get(str(flag.value), 2)


def _activations(model: Geometry, tokens: int, size: int) -> int:
    """Of the widest layer, with its inputs and outputs alive: an estimate of what vLLM's profiling measures."""
    return tokens * size * (4 * model.hidden + 3 * max(model.mlp, model.channels))


def _sampling(model: Geometry, rows: int, drafted: int) -> int:
    """fp32 logits, noise and scores of every sampled row; logits and candidates of every drafted position."""
    return model.vocabulary * 4 * (3 * rows + 2 * drafted)


def _cache(target: Geometry, drafter: Geometry | None) -> tuple[int, int]:
    """(bytes per token, bytes of state per request), with the padding of vLLM's cache groups.

    vLLM sorts layers of each kind into groups of equal size (that of the rarest kind) and gives all pages one size.
    """
    kinds = [count for count in (target.full, target.recurrent, drafter.full if drafter else 0) if count]
    group = min(kinds)

    def padded(count: int) -> int:
        return -(-count // group) * group

    per_token = padded(target.full) * target.kv_token
    if drafter is not None:
        per_token += padded(drafter.full) * drafter.kv_token
    page = target.state
    if target.full and target.recurrent:
        block = -(-target.state // (16 * target.kv_token)) * 16  # tokens of a page that can hold a state
        page = block * target.kv_token
    return per_token, padded(target.recurrent) * page if target.recurrent else 0


def _share(situation: Situation, pool: Pool, fixed: int) -> tuple[int, Value | None]:
    if situation.device == "cpu":
        given = situation.variable(SPACE)
        if given.isdigit() and int(given) > 0:
            return fixed + int(given) * GIB, None
        # The dispatcher gives the CPU's server no utilisation.
        return int(USUAL_UTILISATION * pool.total), Value(USUAL_UTILISATION, "vLLM's default")
    setting = situation.setting("gpu_memory_utilization")
    try:
        value = Value(float(setting.value), setting.origin) if setting else Value(USUAL_UTILISATION, "vLLM's default")
    except (TypeError, ValueError):
        raise Skipped(f"{setting.origin if setting else ''}: gpu_memory_utilization is no number") from None
    return math.ceil(value.value * pool.total), value
