# SPDX-License-Identifier: Apache-2.0
"""Values that contradict a mode or the drafter's horizon: nothing here looks at the machine."""

from collections.abc import Iterator, Mapping

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


def chain_length(value: int, origin: str, longest: int | None) -> Iterator[Finding]:
    """The chain cannot be longer than what the drafter predicts."""
    if value < 1 or (longest is not None and value > longest):
        expected = "at least 1" if longest is None else f"1 to {longest} (the drafter's block, less the bonus)"
        cure = "leave it out to use the drafter's own"
        yield Finding(origin, "horizon", value, expected, cure, "options.horizon")
