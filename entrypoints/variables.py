# SPDX-License-Identifier: Apache-2.0
"""The environment: our own variables, those that images for this hardware made usual, and those that are refused."""

import shlex
from collections.abc import Mapping
from typing import Any

from .failure import Refusal, nearest
from .settings import ALIASES, BY_NAME, PREFIX, TREE_MODES, read_switch

# Variables with the prefix that are not values of settings.py.
OTHER_VARIABLES = {
    "DDTREE_RECIPE": "recipe to use when --recipe is not given",
    "DDTREE_PROFILE": "profile of the recipe to use when --profile is not given",
    "DDTREE_UNSAFE_FULL_BRANCH_RESEARCH": "must be 1 for unsafe-full-branch",
    "DDTREE_CHECK": "1: the kernels also check the values of parents, for debugging",
    "DDTREE_TRACE_FILE": "file to which the worker appends one JSON line per verified tree",
    "DDTREE_CAPTURE_DIR": "folder into which the worker writes one verify window, for aeon_ddtree.kernels.replay",
    "DDTREE_KERNELS": "reference: plain PyTorch kernels on every device; triton: Triton or an error; unset: by device",
}
# Those of them that take one of a few values; the worker refuses others too, but only once the server is up.
CHOICES = {"DDTREE_KERNELS": ("reference", "triton")}

# Names that are usual elsewhere -> our setting. Our own name wins where both are given.
USUAL = {
    "MODEL_PATH": "model",
    "MODEL_ID": "model",
    "DFLASH_DRAFTER": "drafter",
    "DRAFTER_PATH": "drafter",
    "SERVED_MODEL_NAME": "served_model_name",
    "PORT": "port",
    "DTYPE": "dtype",
    "MAX_MODEL_LEN": "max_model_len",
    "MAX_NUM_SEQS": "max_num_seqs",
    "MAX_NUM_BATCHED_TOKENS": "max_num_batched_tokens",
    "GPU_MEMORY_UTILIZATION": "gpu_memory_utilization",
    "TENSOR_PARALLEL": "tensor_parallel",
    "TENSOR_PARALLEL_SIZE": "tensor_parallel",
    "ENABLE_PREFIX_CACHING": "prefix_caching",
    "NUM_SPECULATIVE_TOKENS": "horizon",
    "DFLASH_NUM_SPEC_TOKENS": "horizon",
}
PROFILE_VARIABLES = ("DDTREE_PROFILE", "PROFILE")

# Names that are usual elsewhere -> a flag of vLLM, in place of the recipe's.
USUAL_FLAGS = {
    "QUANTIZATION": "--quantization",
    "KV_CACHE_DTYPE": "--kv-cache-dtype",
    "ATTENTION_BACKEND": "--attention-backend",
    "LOAD_FORMAT": "--load-format",
    "REASONING_PARSER": "--reasoning-parser",
    "TOOL_CALL_PARSER": "--tool-call-parser",
    "LIMIT_MM_PER_PROMPT": "--limit-mm-per-prompt",
}
USUAL_SWITCHES = {
    "ENFORCE_EAGER": "--enforce-eager",
    "TRUST_REMOTE_CODE": "--trust-remote-code",
    "LANGUAGE_MODEL_ONLY": "--language-model-only",
    "ENABLE_AUTO_TOOL_CHOICE": "--enable-auto-tool-choice",
    "ENABLE_CHUNKED_PREFILL": "--enable-chunked-prefill",
}
EXTRA_VARIABLES = ("EXTRA_VLLM_ARGS", "VLLM_EXTRA_ARGS", "EXTRA_ARGS")
METHODS = {"dflash": ("dflash",), "dflash_ddtree": TREE_MODES, "ddtree": TREE_MODES, "none": ("baseline",)}

_KERNELS = "the kernels follow from the device: nothing replaces it"
_COMMIT = "the mode ddtree commits what is safe, unsafe-full-branch everything: nothing else replaces it"
# Variables of other images that would change what is served, and mean nothing here -> what replaces them.
RETIRED = {
    "DDTREE_CHAIN_SEED": "DDTREE_SPINE=full (the default under flat) or none",
    "DDTREE_CHAIN_SEED_LIMIT": "DDTREE_SPINE=N",
    "DDTREE_ROOT_LEAF_ONLY": "DDTREE_TOPOLOGY=root_leaves (the default under flat) or best_first",
    "DDTREE_ROOT_LEAF_ALT_COUNT": "DDTREE_ROOT_LEAVES=N",
    "DDTREE_MIN_ROOT_BRANCHES": "DDTREE_ROOT_LEAVES=N",
    "DDTREE_DISABLE_EXTRA_ROOT_CHILDREN": "DDTREE_TOPOLOGY=best_first",
    "DDTREE_FULL_BRANCH_COMMIT": "the mode unsafe-full-branch",
    "DDTREE_ALLOW_BRANCH_STATE_COMPACTION": "the mode unsafe-full-branch",
    "DDTREE_NUM_SPECULATIVE_TOKENS": "DDTREE_BUDGET for a tree, DDTREE_HORIZON for a chain",
    "DDTREE_FORCE_GREEDY_TREE_SAMPLER": "the request's own sampling parameters",
    "DDTREE_TARGET_VERIFY": "the mode dflash, if no tree is wanted",
    "DDTREE_USE_RUNTIME_SAMPLER": "the mode dflash, if no tree is wanted",
    **dict.fromkeys(
        (
            "DDTREE_TRITON_TREE_GDN",
            "DDTREE_SLOW_TREE_GDN",
            "DDTREE_SLOW_TREE_CONV",
            "DDTREE_EAGER_TREE_ATTN",
            "DDTREE_BRANCH_ONLY_ATTN",
            "DDTREE_BYPASS_FLAT_CHAIN_ATTN",
            "DDTREE_TRITON_BRANCH_ATTN",
            "DDTREE_INLINE_PARENT_FALLBACK",
            "DDTREE_BATCH_BRANCH_CONV_MIRROR",
            "DDTREE_BATCH_BRANCH_SSM_MIRROR",
            "DDTREE_MATERIALIZE_TREE_SAMPLE",
        ),
        _KERNELS,
    ),
    **dict.fromkeys(
        (
            "DDTREE_COMPACT_RECURRENT_STATE",
            "DDTREE_COMPACT_DRAFTER_CONTEXT",
            "DDTREE_DFLASH_COMPACT_CONTEXT_ROWS",
            "DDTREE_FULL_BRANCH_STATE_COUNT_BIAS",
            "DDTREE_FULL_BRANCH_FREEZE_MAMBA_POSTPROCESS",
            "DDTREE_FULL_BRANCH_REQUIRE_PREFIX",
            "DDTREE_ROOT_SIBLING_STATE_OFFSET",
        ),
        _COMMIT,
    ),
    "ENABLE_TURBOQUANT": "KV_CACHE_DTYPE=auto: a compressed KV cache is not supported",
    "TQ_MODE": "KV_CACHE_DTYPE=auto: a compressed KV cache is not supported",
}
OFF = ("", "0", "off", "false", "no", "none")


def known_variables() -> list[str]:
    return sorted([*(setting.variable for setting in BY_NAME.values()), *OTHER_VARIABLES])


def usual_variables() -> list[str]:
    return sorted([*USUAL, "PROFILE", "SPEC_METHOD", *USUAL_FLAGS, *USUAL_SWITCHES, *EXTRA_VARIABLES])


def check_names(environ: Mapping[str, str]) -> None:
    """Raises Refusal on a variable that means nothing here but looks as if: a retired, or an unknown DDTREE_ one."""
    known = known_variables()
    for variable in sorted(environ):
        if variable in RETIRED:
            if variable.startswith(PREFIX) or environ[variable].strip().lower() not in OFF:
                raise Refusal(
                    f"environment: {variable} is not known to this image, expected {RETIRED[variable]}; unset it"
                )
        elif variable.startswith(PREFIX) and variable not in known:
            raise Refusal(f"environment: unknown variable {variable}{nearest(variable, known)}; unset or correct it")


def check_choices(variables: Mapping[str, str], origin: str) -> None:
    """Raises Refusal on a value that the worker would refuse; empty variables count as absent."""
    for variable, choices in CHOICES.items():
        value = variables.get(variable)
        if value and value not in choices:
            expected = " or ".join(choices)
            raise Refusal(
                f"{origin}: {variable} is {value!r}, expected {expected}{nearest(value, choices)}; correct or unset it"
            )


def read_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """setting name -> (raw value, origin); empty variables count as absent. Raises Refusal as `check_names` does."""
    check_names(environ)
    check_choices(environ, "environment")
    found: dict[str, tuple[Any, str]] = {}
    for setting in BY_NAME.values():
        usual = [variable for variable, name in USUAL.items() if name == setting.name]
        for variable in (setting.variable, *usual):
            if environ.get(variable) and setting.name not in found:
                found[setting.name] = (environ[variable], f"environment {variable}")
    if found.get("drafter", ("", ""))[0] in ("off", "none"):
        raise Refusal(f"{found['drafter'][1]}: drafter is off, expected a drafter; use the mode baseline instead")
    return found


def profile_name(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """(name, origin) of the profile that the environment asks for."""
    for variable in PROFILE_VARIABLES:
        if environ.get(variable):
            return environ[variable], f"environment {variable}"
    return None


def read_flags(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """vLLM's flag -> (value, origin). Value None takes the recipe's flag away; a switch is a bool."""
    found: dict[str, tuple[Any, str]] = {}
    for variable, flag in (USUAL_FLAGS | USUAL_SWITCHES).items():
        raw, origin = environ.get(variable), f"environment {variable}"
        if not raw:
            continue
        if variable in USUAL_SWITCHES:
            try:
                found[flag] = (read_switch(raw), origin)
            except KeyError:
                raise Refusal(f"{origin}: {flag} is {raw!r}, expected 1 or 0; correct or unset it") from None
        elif "\0" in raw:
            raise Refusal(f"{origin}: {flag} is {raw!r}, expected text without NUL; correct it")
        else:
            found[flag] = (None if flag == "--quantization" and raw in ("auto", "none") else raw, origin)
    return found


def extra_arguments(environ: Mapping[str, str]) -> tuple[list[str], str]:
    """(arguments for vLLM, origin): the words of EXTRA_VLLM_ARGS as a shell would split them; no shell sees them."""
    given = [variable for variable in EXTRA_VARIABLES if environ.get(variable, "").strip()]
    words: list[str] = []
    for variable in given:
        try:
            words += shlex.split(environ[variable])
        except ValueError as error:
            raise Refusal(
                f"environment {variable}: {environ[variable]!r} cannot be split into arguments ({error}); "
                "close the quotes"
            ) from None
    return words, "environment " + ", ".join(given)


def check_method(environ: Mapping[str, str], mode: str) -> None:
    """SPEC_METHOD says what the mode says already: Refusal when they differ."""
    method = environ.get("SPEC_METHOD")
    if not method:
        return
    modes = METHODS.get(method.lower())
    if modes is None:
        raise Refusal(
            f"environment SPEC_METHOD: method is {method!r}, expected one of {', '.join(METHODS)}"
            f"{nearest(method, METHODS)}; unset it and choose a mode"
        )
    if ALIASES.get(mode, mode) not in modes:
        raise Refusal(
            f"environment SPEC_METHOD: method is {method!r}, expected what the mode {mode} uses; "
            f"unset it, or use the mode {modes[0]}"
        )


def server_variables(environ: Mapping[str, str]) -> list[str]:
    """Sentences on variables that are often taken for ours and are not, and on those of which only one can be used."""
    notes = []
    if environ.get("VLLM_PORT"):
        notes.append("VLLM_PORT is for vLLM's own processes, not the API's port: that is --port, PORT or DDTREE_PORT")
    for setting in BY_NAME.values():
        names = [setting.variable, *(variable for variable, name in USUAL.items() if name == setting.name)]
        given = [name for name in names if environ.get(name)]
        if len({environ[name] for name in given}) > 1:
            notes.append(f"{' and '.join(given)} differ; {given[0]} is used where the command line gives nothing")
    return notes
