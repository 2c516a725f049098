# SPDX-License-Identifier: Apache-2.0
"""Values that contradict a mode, the tree or the drafter's horizon: nothing here looks at the machine."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..failure import Refusal
from ..settings import TREE_BY_NAME
from .finding import Finding

UNSAFE_VARIABLE = "DDTREE_UNSAFE_FULL_BRANCH_RESEARCH"


def unsafe_mode(mode: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """The unpromoted branch policy starts only for those who say that they know."""
    if mode == "unsafe-full-branch" and environ.get(UNSAFE_VARIABLE) != "1":
        got = environ.get(UNSAFE_VARIABLE) or "not set"
        cure = f"set {UNSAFE_VARIABLE}=1 if this is research, or use the mode ddtree"
        yield Finding("environment", UNSAFE_VARIABLE, got, "1 for the mode unsafe-full-branch", cure, "options.unsafe")


def prefix_caching(mode: str, enabled: bool, origin: str) -> Iterator[Finding]:
    """A restored prefix has no drafter context, and one state slot no snapshots: in no mode until that is proven."""
    if enabled:
        expected = f"false under {mode} (not proven lossless yet)"
        yield Finding(origin, "prefix_caching", "true", expected, "remove it", "options.prefix-caching")


def tree_ranges(options: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[Finding]:
    """Ranges that do not need the engine's own judgement, so that the message can name where the value came from."""
    for name, low, high in (("budget", 1, 127), ("top_k", 1, None), ("root_leaves", 0, None)):
        value = options.get(name)
        if isinstance(value, int) and (value < low or (high is not None and value > high)):
            expected = f"{low} to {high}" if high is not None else f"at least {low}"
            cure = f"give another value, for instance {TREE_BY_NAME[name].flag} {max(low, 15)}"
            yield Finding(origins[name], name, value, expected, cure, "options.range")


def engine_options(options: Mapping[str, Any], horizon: int | None, place: str) -> Iterator[Finding]:
    """The engine's own judgement on the object in --additional-config; with the drafter's horizon where it is known."""
    from aeon_ddtree.engine.options import DDTreeOptions, OptionsError

    try:
        parsed = DDTreeOptions.from_mapping(dict(options))
        if horizon is not None and parsed.mode != "plain":
            parsed.policy(horizon)
    except OptionsError as error:
        raise Refusal(f"{place}: {' '.join(str(error).split())}") from None
    yield from ()


def chain_length(value: int, origin: str, longest: int | None) -> Iterator[Finding]:
    """The chain cannot be longer than what the drafter predicts."""
    if value < 1 or (longest is not None and value > longest):
        expected = "at least 1" if longest is None else f"1 to {longest} (the drafter's block, less the bonus)"
        cure = "leave it out to use the drafter's own"
        yield Finding(origin, "horizon", value, expected, cure, "options.horizon")
