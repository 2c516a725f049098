# SPDX-License-Identifier: Apache-2.0
"""Decoding the cases of a parity run: engines side by side, plain decoding kept at hand to judge the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from aeon_ddtree.proving_ground.parity_judge import Decoded, Difference, differences, judge
from aeon_ddtree.proving_ground.parity_plan import Case, EngineKey, Prompt, Settings, arrivals, cases_of, seed_of

if TYPE_CHECKING:
    from torch import Tensor

    from aeon_ddtree.engine.decoder import Completion, Decoder

MEASURED = 5
"""Differences of one case whose gap is measured; the others stand as outside the rule."""


@dataclass(frozen=True)
class Pair:
    """Where the models are and how engines run them. engine_args: further keyword arguments of vLLM's LLM."""

    target: str
    drafter: str
    device: str = "cpu"
    dtype: str = "float32"
    threads: int | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Run:
    """A case decoded. decoded: in the order of the prompts; counters: see `engine.stats.Stats`, of this case alone."""

    case: Case
    prompts: Sequence[Prompt]
    decoded: list[Decoded]
    seconds: float
    counters: dict[str, Any]
    differences: list[Difference] = field(default_factory=list)
    compared: int = 0


@dataclass(frozen=True)
class Plain:
    """Plain decoding: its engine, still running, its runs by reference, and each prompt's token ids."""

    decoder: Decoder
    runs: dict[tuple[str, float], Run]
    prompt_ids: dict[str, list[int]]


def tokens_per_step(decoded: Iterable[Decoded]) -> float | None:
    """Tokens per step of decoding, pooled over sequences; None where nothing was decoded after the prompts.

    A sequence's first token comes from the step that ends its prompt, so neither that token nor that step counts.
    """
    pairs = [(len(each.tokens) - 1, each.steps - 1) for each in decoded]
    steps = sum(steps for _, steps in pairs)
    return sum(tokens for tokens, _ in pairs) / steps if steps else None


class _Stopped(RuntimeError):
    """Not a failure of its own: another engine failed, so this one need not go on."""


class Harness:
    """Decodes all cases with `parallel` engines at work at a time; `tell` gets a line of progress now and then."""

    def __init__(
        self,
        pair: Pair,
        settings: Settings,
        prompts: Mapping[str, Sequence[Prompt]],
        parallel: int,
        tell: Callable[[str], None],
    ) -> None:
        self.pair, self.settings, self.prompts, self.parallel = pair, settings, prompts, parallel
        self._cases = cases_of(settings)
        self._total = sum(map(len, self._cases.values()))
        self._done = 0
        self._tell = tell
        self._plain: Future[Plain] = Future()
        self._plain_lock, self._count_lock = threading.Lock(), threading.Lock()
        self._stop = threading.Event()

    def run(self) -> list[Run]:
        """All runs with their differences judged, in the order of the plan. DecoderError where an engine fails."""
        pool = ThreadPoolExecutor(self.parallel)
        jobs = [pool.submit(self._engine, key, cases) for key, cases in self._cases.items()]
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
        finally:
            self._stop.set()
            pool.shutdown(cancel_futures=True)
            if self._plain.done() and not self._plain.exception():
                self._plain.result().decoder.close()
        errors = [error for job in jobs if not job.cancelled() and (error := job.exception()) is not None]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, _Stopped))
        return [run for job in jobs for run in job.result()]

    def _engine(self, key: EngineKey, cases: Sequence[Case]) -> list[Run]:
        if key.mode == "plain":
            try:
                self._plain.set_result(self._run_plain(key, cases))
            except BaseException as error:
                self._plain.set_exception(error)
                raise
            return list(self._plain.result().runs.values())
        decoder = self._start(key, cases[0])
        try:
            runs = []
            for case in cases:
                decoder.configure(**case.options)
                runs.append(self._decode(decoder, case)[0])
            plain = self._plain.result()
            for run in runs:
                reference = plain.runs[run.case.reference]
                self._compare(reference, run, run.decoded, "plain", decoder)
            same = sum(run.compared - len(run.differences) for run in runs)
            self._tell(f"{key}: {same} of {sum(run.compared for run in runs)} sequences are those of plain decoding")
            return runs
        finally:
            decoder.close()

    def _run_plain(self, key: EngineKey, cases: Sequence[Case]) -> Plain:
        decoder = self._start(key, cases[0])
        try:
            plain = Plain(decoder, {}, {})
            for case in cases:
                run, completions = self._decode(decoder, case)
                plain.runs[case.reference] = run
                for prompt, completion in zip(run.prompts, completions):
                    plain.prompt_ids[prompt.id] = completion.prompt_token_ids or []
            self._compare_batches(plain)
            return plain
        except BaseException:
            decoder.close()
            raise

    def _compare_batches(self, plain: Plain) -> None:
        """Plain decoding one at a time against plain decoding in a batch, on the prompts that both decode."""
        for (kind, temperature), run in plain.runs.items():
            batch = plain.runs.get(("main", temperature))
            if kind == "single" and batch is not None:
                known = {prompt.id: decoded for prompt, decoded in zip(batch.prompts, batch.decoded)}
                shared = [index for index, prompt in enumerate(run.prompts) if prompt.id in known]
                prompts = [run.prompts[index] for index in shared]
                alone = replace(run, prompts=prompts, decoded=[run.decoded[index] for index in shared])
                self._compare(
                    alone, run, [known[p.id] for p in prompts], f"plain, batch {batch.case.batch}", None, plain
                )

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise _Stopped("another engine failed")

    def _start(self, key: EngineKey, case: Case) -> Decoder:
        from aeon_ddtree.engine.decoder import Decoder

        self._go_on()
        self._tell(f"{key}: starting")
        pair, rows = self.pair, {"plain": 0, "chain": self.settings.horizon, "tree": key.budget}[key.mode]
        options = {"mode": key.mode} | ({"budget": key.budget} if key.mode == "tree" else {}) | dict(case.options)
        arguments: dict[str, Any] = {
            "max_num_seqs": self.settings.max_num_seqs,
            "max_logprobs": -1,
            "logprobs_mode": "raw_logits",
        }
        decoder = Decoder(
            pair.target,
            pair.drafter if rows else None,
            options,
            num_speculative_tokens=rows,
            device=pair.device,
            dtype=pair.dtype,
            threads=pair.threads,
            **(arguments | dict(pair.engine_args)),
        )
        began = time.monotonic()
        try:
            decoder.ready()
        except BaseException:
            decoder.close()
            raise
        self._tell(f"{key}: started in {time.monotonic() - began:.0f} s")
        return decoder

    def _decode(self, decoder: Decoder, case: Case) -> tuple[Run, list[Completion]]:
        from aeon_ddtree.engine.decoder import DecodeRequest

        self._go_on()
        prompts = self.prompts[case.kind]
        steps = arrivals(len(prompts), case.batch, self.settings.seed)
        requests = [
            DecodeRequest(
                prompt.text,
                {
                    "temperature": case.temperature,
                    "seed": seed_of(prompt, self.settings),
                    "max_tokens": self.settings.max_tokens,
                },
                arrival,
            )
            for prompt, arrival in zip(prompts, steps)
        ]
        decoder.stats(reset=True)
        began = time.monotonic()
        completions = [each[0] for each in decoder.run(requests)]
        seconds = time.monotonic() - began
        decoded = [Decoded(tuple(c.token_ids), c.steps, c.finish_reason) for c in completions]
        run = Run(case, prompts, decoded, seconds, decoder.stats(reset=True))
        with self._count_lock:
            self._done += 1
            speed = f"{tokens_per_step(decoded) or 0:.3f} tokens/step, {len(prompts)} prompts in {seconds:.0f} s"
            self._tell(f"{self._done}/{self._total} {case}: {speed}")
        return run, completions

    # -- judging

    def _compare(
        self,
        reference: Run,
        run: Run,
        got: Sequence[Decoded],
        against: str,
        decoder: Decoder | None,
        plain: Plain | None = None,
    ) -> None:
        """Add to `run` the differences of `got` from the reference run, judged. decoder: the one that decoded `got`."""
        found = differences(reference.prompts, reference.decoded, got, str(run.case), against)
        run.compared += len(got)
        for number, (index, difference) in enumerate(found):
            if number < MEASURED:
                measured = self._judge(difference, reference, index, run.case, decoder, plain or self._plain.result())
            else:
                measured = replace(difference, note=f"not measured: only the first {MEASURED} of a case are")
            run.differences.append(measured)
            self._tell(f"DIFFERENCE {'inside' if measured.allowed else 'OUTSIDE'} the rule: {measured}")

    def _judge(
        self, difference: Difference, reference: Run, index: int, case: Case, decoder: Decoder | None, plain: Plain
    ) -> Difference:
        if difference.plain is None or difference.got is None:
            return replace(difference, note="one decoding ended where the other did not")
        prompt, position = reference.prompts[index], difference.position
        prefix = list(reference.decoded[index].tokens[:position])
        is_fp32 = self.pair.dtype == "float32"
        seed, temperature = seed_of(prompt, self.settings), case.temperature
        params = {"temperature": temperature, "seed": seed}
        with self._plain_lock:
            row = logits_after(plain.decoder, prompt.text, params, prefix)
            if row is None:
                return replace(difference, note="plain decoding took another way there when it was repeated alone")
            prefilled = logits_after(plain.decoder, plain.prompt_ids[prompt.id] + prefix, {"temperature": 0.0}, [])
        other = None
        if decoder is not None:
            decoder.configure(**case.options)
            other = logits_after(decoder, prompt.text, params, prefix)
        return judge(difference, rows=(row, prefilled, other), temperature=temperature, seed=seed, is_fp32=is_fp32)


def logits_after(
    decoder: Decoder, text: str | list[int], params: Mapping[str, Any], prefix: Sequence[int]
) -> Tensor | None:
    """Logits [V] after `prefix`, decoding `text` alone with `params`; None where that takes another way before.

    With `logprobs_mode` raw_logprobs they are shifted by a constant, which no comparison of tokens sees.
    """
    import torch

    from aeon_ddtree.engine.decoder import DecodeRequest

    wanted = dict(params) | {"max_tokens": len(prefix) + 1, "logprobs": -1}
    completion = decoder.run([DecodeRequest(text, wanted)])[0][0]
    if completion.token_ids[: len(prefix)] != list(prefix) or completion.logprobs is None:
        return None
    values = completion.logprobs[len(prefix)]
    row = torch.full((max(values) + 1,), -torch.inf)
    row[torch.tensor(list(values))] = torch.tensor(list(values.values()))
    return row
