# SPDX-License-Identifier: Apache-2.0
"""How the target is quantised, read from its own files, against each other and against --quantization."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .finding import Finding
from .machine import Machine
from .models import read_json

# ModelOpt's algorithms that vLLM loads, and vLLM's name for the method.
MODELOPT = {
    "FP8": "modelopt",
    "FP8_PER_CHANNEL_PER_TOKEN": "modelopt",
    "FP8_PB_WO": "modelopt",
    "NVFP4": "modelopt_fp4",
    "MXFP8": "modelopt_mxfp8",
    "MIXED_PRECISION": "modelopt_mixed",
}
FAMILY = set(MODELOPT.values())  # vLLM picks the one that the files ask for, whichever of them is given
# Methods that quantise full-precision weights while loading: they need no files.
ONLINE = {"fp8", "bitsandbytes", "torchao", "experts_int8", "inc", "online", "mxfp8", "fp8_per_tensor", "fp8_per_block",
          "int8_per_channel_weight_only"}  # fmt: skip
VARIANTS = {"gptq": {"gptq_marlin"}, "awq": {"awq_marlin"}, "gptq_marlin": {"gptq"}, "awq_marlin": {"awq"}}
SEPARATE = "hf_quant_config.json"
REQUIRED = {
    "NVFP4": ("group_size", "kv_cache_quant_algo", "exclude_modules"),
    "MXFP8": ("kv_cache_quant_algo", "exclude_modules"),
}
BACKEND, GOOD_BACKEND = "VLLM_NVFP4_GEMM_BACKEND", "flashinfer-cutlass"
AGAIN = "copy the model again"


@dataclass(frozen=True)
class Quantisation:
    """method: vLLM's name; algorithm: ModelOpt's ("" for others); place: file and field; kv: dtype of the KV cache."""

    method: str
    algorithm: str
    place: tuple[str, str]
    kv: str | None = None


def _inline(folder: Path) -> Quantisation | None:
    """config.json's own, wherever it stands in it."""
    file = folder / "config.json"
    config = read_json(file)
    nested = config.get("text_config")
    for owner, prefix in ((config, ""), (nested if isinstance(nested, dict) else {}, "text_config.")):
        for field in ("quantization_config", "compression_config"):
            content = owner.get(field)
            if isinstance(content, dict) and content:
                return _read(content, str(file), prefix + field)
    return None


def _read(content: Mapping[str, Any], file: str, field: str) -> Quantisation:
    inner = content.get("quantization")
    inner = inner if isinstance(inner, dict) else content
    algorithm = str(inner.get("quant_algo") or "").upper()
    method = str(content.get("quant_method") or "")
    kv = inner.get("kv_cache_quant_algo")
    scheme = content.get("kv_cache_scheme")
    if isinstance(scheme, dict) and scheme.get("num_bits") == 8:
        kv = "FP8"
    if algorithm and method in ("", "modelopt"):
        return Quantisation(MODELOPT.get(algorithm, ""), algorithm, (file, f"{field}.quant_algo"), kv)
    return Quantisation(method, "", (file, f"{field}.quant_method"), kv)


def _separate(folder: Path) -> Quantisation | None:
    file = folder / SEPARATE
    return _read(read_json(file), str(file), "quantization") if file.is_file() else None


def of_model(folder: Path) -> Quantisation | None:
    """The model's quantisation, None for full precision. Raises Refusal on unreadable JSON."""
    return _inline(folder) or _separate(folder)


def quantised_as(folder: Path | str, flag: str | None, origin: str, device: str) -> Iterator[Finding]:
    """flag: the value of --quantization, None when not given; origin: where it was given. Raises Refusal."""
    if isinstance(folder, str):
        return
    inline, separate = _inline(folder), _separate(folder)
    for one in (inline, separate):
        if one is not None and not one.method:
            expected = f"one of {', '.join(MODELOPT)}" if one.algorithm else "the name of a method"
            yield Finding(*one.place, one.algorithm or "missing", expected, AGAIN, "quantisation.algorithm")
            return
    if inline and separate and (inline.method, inline.algorithm) != (separate.method, separate.algorithm):
        got = separate.algorithm or separate.method
        expected = f"{inline.algorithm or inline.method} as in {' '.join(Path(p).name for p in inline.place)}"
        yield Finding(*separate.place, got, expected, f"{AGAIN}: the two contradict each other", "quantisation.files")
        return
    found = inline or separate
    if found is not None:
        yield from _fields(folder, found, inline)
        if device == "cpu" and found.algorithm:
            cure = "start where a GPU is seen (docker run --gpus all), or use a model in full precision"
            expected = "full precision on the CPU"
            yield Finding(*found.place, found.algorithm, expected, cure, "quantisation.device")
    yield from _flag(folder, found, flag, origin)


def gemm_backend(folder: Path, backend: str, machine: Machine) -> Iterator[Finding]:
    """On compute capability 12 the backend that vLLM chooses by itself for NVFP4 may be slow, or wrong."""
    found = of_model(folder)
    first = next(iter(machine.gpus), None)
    if found is None or found.algorithm != "NVFP4" or first is None or (first.capability or (12, 0))[0] != 12:
        return
    if backend != GOOD_BACKEND:
        cure = f"set {BACKEND}={GOOD_BACKEND}"
        yield Finding(
            "environment",
            BACKEND,
            backend or "not set",
            f"{GOOD_BACKEND} on {first.name}",
            cure,
            "quantisation.backend",
            True,
        )


def _fields(folder: Path, found: Quantisation, inline: Quantisation | None) -> Iterator[Finding]:
    file = folder / SEPARATE
    separate = read_json(file).get("quantization") if file.is_file() else None
    if found.algorithm == "MIXED_PRECISION":
        config = read_json(folder / "config.json").get("quantization_config")
        if not any(isinstance(part, dict) and part.get("quantized_layers") for part in (config, separate)):
            place = (str(file), "quantization.quantized_layers")
            expected = "the precision of every quantised layer, as quant_algo is MIXED_PRECISION"
            yield Finding(*place, "missing", expected, AGAIN, "quantisation.layers")
    elif inline is None and isinstance(separate, dict):
        for name in REQUIRED.get(found.algorithm, ()):
            if name not in separate:
                expected = f"present, as quant_algo is {found.algorithm}"
                yield Finding(str(file), f"quantization.{name}", "missing", expected, AGAIN, "quantisation.field")


def _flag(folder: Path, found: Quantisation | None, flag: str | None, origin: str) -> Iterator[Finding]:
    if flag is None:
        return
    if found is None:
        if flag not in ONLINE:
            expected = f"nothing: neither config.json nor {SEPARATE} of {folder} names a quantisation"
            yield Finding(
                origin, "quantization", flag, expected, "remove it, or give the quantised model", "quantisation.flag"
            )
    elif flag != found.method and flag not in VARIANTS.get(found.method, ()) and not {flag, found.method} <= FAMILY:
        expected = f"{found.method}, as {' '.join(found.place)} says"
        yield Finding(
            origin, "quantization", flag, expected, "remove it: the model's own files decide", "quantisation.flag"
        )
