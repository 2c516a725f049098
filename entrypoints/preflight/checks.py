# SPDX-License-Identifier: Apache-2.0
"""The table of all checks, and running it: on a start (first failure ends it) or for `doctor` (every row)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..failure import Refusal
from . import fits, host
from .drafter import drafter_fits
from .finding import Finding, Skipped
from .hub import on_hub
from .machine import Machine
from .memory import plan
from .models import model_folder
from .quantisation import BACKEND, gemm_backend, of_model, quantised_as
from .situation import Situation
from .window import sliding_window, window_patch

if TYPE_CHECKING:
    from ..resolve import Resolved

Look = Callable[[Situation], Iterator[Finding]]


@dataclass(frozen=True)
class Check:
    """look: yields findings, raises Skipped or Refusal; when_absent: whether it can look while a model is not there;
    here: it looks at this machine, so that a dry run, which may be for another, leaves it out; says: one line when
    all is well."""

    name: str
    look: Look
    when_absent: bool = True
    here: bool = False
    says: Callable[[Situation], str] = lambda _: ""


@dataclass
class Row:
    """What one check found. status: ok, warning, failed or skipped; detail: what was looked at, or why it was not."""

    check: str
    status: str
    detail: str = ""
    findings: list[Finding] = field(default_factory=list)

    @property
    def failure(self) -> str:
        """The line that ends a start."""
        failures = [finding for finding in self.findings if not finding.warning]
        return str(failures[0]) if failures else self.detail

    def as_json(self) -> dict[str, Any]:
        findings = [finding.as_json() for finding in self.findings]
        return {"check": self.check, "status": self.status, "detail": self.detail, "findings": findings}


def _folder(name: str) -> Look:
    def look(situation: Situation) -> Iterator[Finding]:
        resolved = situation.resolved
        reference, place = (
            (resolved.target, situation.target) if name == "model" else (resolved.drafter, situation.drafter)
        )
        if reference is None or place is None:
            raise Skipped("this mode has no drafter")
        origin = resolved.settings[name].origin
        yield from on_hub(reference, situation.revision(name), name, origin, situation.machine)
        yield from model_folder(place, name, origin)

    return look


def _drafter(situation: Situation) -> Iterator[Finding]:
    target, drafter = situation.folder("model"), situation.folder("drafter")
    yield from drafter_fits(target, drafter)


def _window(situation: Situation) -> Iterator[Finding]:
    yield from sliding_window(situation.folder("drafter"))


def _window_patch(situation: Situation) -> Iterator[Finding]:
    drafter = situation.folder("drafter")
    yield from window_patch(drafter, situation.max_model_len.value, situation.machine)


def _quantisation(situation: Situation) -> Iterator[Finding]:
    flag, folder = situation.flag("quantization"), situation.folder("model")
    given, origin = (str(flag.value), flag.origin) if flag else (None, "")
    yield from quantised_as(folder, given, origin, situation.device)
    if situation.device == "cuda":
        yield from gemm_backend(folder, situation.variable(BACKEND), situation.machine)


def _say_quantisation(situation: Situation) -> str:
    found = of_model(situation.folder("model"))
    return "full precision" if found is None else f"{found.method} {found.algorithm}".strip()


def _say_tokens(situation: Situation) -> str:
    seqs, tokens = situation.max_num_seqs.value, situation.max_num_batched_tokens.value
    return f"{seqs} requests × {situation.width} rows of {tokens} tokens in a step"


def _say_gpu(situation: Situation) -> str:
    return ", ".join(gpu.name for gpu in situation.machine.gpus)


CHECKS = (
    Check("model files", _folder("model"), says=lambda s: str(s.target)),
    Check("drafter files", _folder("drafter"), says=lambda s: str(s.drafter)),
    Check("drafter fits target", _drafter, when_absent=False),
    Check("sliding window", _window, when_absent=False),
    Check("window patch", _window_patch, when_absent=False, here=True),
    Check("quantisation", _quantisation, when_absent=False, says=_say_quantisation),
    Check("context length", fits.context_length, when_absent=False, says=lambda s: f"{s.max_model_len.value} tokens"),
    Check("token budget", fits.token_budget, says=_say_tokens),
    Check("processor", host.architecture, here=True, says=lambda s: s.machine.architecture),
    Check("GPU", host.gpu, here=True, says=_say_gpu),
    Check("memory plan", fits.memory_plan, when_absent=False, here=True, says=lambda s: str(plan(s))),
    Check("vLLM and plugin", host.packages, here=True, says=lambda s: f"vLLM {s.machine.vllm_version}"),
    Check("kernel caches", host.caches, here=True),
    Check("shared memory", host.shared_memory, here=True),
    Check("disk", host.disk, here=True),
    Check("port", host.port, here=True, says=lambda s: str(s.number("port", 8000).value)),
)


def run_check(check: Check, situation: Situation) -> Row:
    """One row; never raises for what a model, a file or the machine may be."""
    findings: list[Finding] = []
    try:
        for finding in check.look(situation):
            findings.append(finding)
    except Skipped as why:
        if not findings:
            return Row(check.name, "skipped", str(why))
    except Refusal as refusal:
        return Row(check.name, "failed", str(refusal), findings)
    except OSError as error:  # of a file or folder that this user may not look at, above all
        got = f"{error.filename or check.name}: {error.strerror or error}"
        said = f"{got}, expected something that user {os.getuid()} can read; correct its permissions"
        return Row(check.name, "failed", said, findings)
    failed = any(not finding.warning for finding in findings)
    try:
        detail = check.says(situation)
    except (Skipped, Refusal, OSError):
        detail = ""  # what is wrong has been found; there is nothing more to say
    return Row(check.name, "failed" if failed else "warning" if findings else "ok", detail, findings)


def run_all(situation: Situation, dry_run: bool = False) -> Iterator[Row]:
    """Every row in order. Checks that read both models' files are skipped once one of them is damaged or absent."""
    damaged = False
    for check in CHECKS:
        if check.here and dry_run:
            continue
        if damaged and not check.when_absent:
            yield Row(check.name, "skipped", "the models are not complete")
            continue
        row = run_check(check, situation)
        damaged = damaged or (row.status == "failed" and check.name.endswith(" files"))
        yield row


def before_start(
    resolved: Resolved, environ: Mapping[str, str], dry_run: bool = False, machine: Machine | None = None
) -> None:
    """All checks of a start. Raises Refusal with the first failure, and adds warnings to the notes.

    In a dry run, which may be for another machine, models that are not there become a note too, and nothing that only
    this machine decides is looked at.
    """
    situation = Situation(resolved, machine or Machine(environ))
    for row in run_all(situation, dry_run):
        if row.status == "failed":
            # Models may come later, and vLLM's defaults are those of the machine that it will run on.
            later = row.check.endswith(" files") or all(finding.code == "tokens.default" for finding in row.findings)
            if not (dry_run and row.findings and later):
                raise Refusal(row.failure)
            resolved.notes.append(f"a real start would stop here: {row.failure}")
        elif row.status == "warning":
            resolved.notes += [str(finding) for finding in row.findings]
        if row.check == "memory plan" and row.status in ("ok", "warning"):
            resolved.notes.append(f"memory: {row.detail}")
