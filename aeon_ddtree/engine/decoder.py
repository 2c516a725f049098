# SPDX-License-Identifier: Apache-2.0
"""`Decoder`: an engine in a process of its own, driven step by step. The parity harness and the tests decode with it.

The engine runs inside one child process (no engine-core or worker processes), so that arrivals and aborts happen at
exactly the step they are asked for, and several engines can live beside each other.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aeon_ddtree.engine.options import KEY


@dataclass(frozen=True)
class DecodeRequest:
    """prompt: text, token ids or a vLLM prompt mapping (pictures); params: keyword arguments of SamplingParams
    (structured_outputs as a mapping); arrival: engine step before which it is added; abort_after: abort once that many
    tokens came out (0: after its first step, within a long prompt); stream: take vLLM's increments, as a streaming
    client does; may_fail: a refusal by the engine ends this request alone, as a Completion with finish_reason "refused"
    (without it, a refusal ends the whole run)."""

    prompt: Any
    params: dict[str, Any] = field(default_factory=dict)
    arrival: int = 0
    abort_after: int | None = None
    stream: bool = False
    may_fail: bool = False


@dataclass(frozen=True)
class Completion:
    """One decoded sequence. logprobs: per token {token id: log-probability}, as vLLM reports them; pieces: how many
    tokens each engine step that emitted any brought, the one that ended the prompt included."""

    token_ids: list[int]
    text: str
    finish_reason: str | None
    pieces: list[int]
    stop_reason: Any = None
    logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    prompt_token_ids: list[int] | None = None

    @property
    def steps(self) -> int:
        """Engine steps that emitted tokens."""
        return len(self.pieces)


class DecoderError(RuntimeError):
    """The engine failed to start or to decode; carries the child's traceback."""


class Decoder:
    """Start with the folders of a pair and DDTree's options; use as a context manager or call `close`.

    python_path: a folder whose vllm/ is used instead of the installed one, as with PYTHONPATH.
    """

    def __init__(
        self,
        target: str,
        drafter: str | None,
        options: dict[str, Any],
        *,
        num_speculative_tokens: int = 0,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int | None = None,
        method: str = "dflash",
        python_path: str | None = None,
        **engine_args: Any,
    ) -> None:
        worker = {"cpu": "CPUWorker", "cuda": "GPUWorker"}[device]
        arguments = {
            "model": target,
            "dtype": dtype,
            "worker_cls": f"aeon_ddtree.engine.worker.{worker}",
            "additional_config": {KEY: options},
            "enforce_eager": True,
            "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "generation_config": "vllm",
            "disable_log_stats": True,
        } | engine_args
        if drafter is not None:
            arguments["speculative_config"] = {
                "method": method,
                "model": drafter,
                "num_speculative_tokens": num_speculative_tokens,
            }
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
        if device == "cpu":
            environment["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        if python_path is not None:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (python_path, os.environ.get("PYTHONPATH"))))
        self._process = context.Process(target=_serve, args=(theirs, environment, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._started = False

    def run(self, requests: Sequence[DecodeRequest]) -> list[list[Completion]]:
        """Decode all requests to their end; one list of n completions per request, in order."""
        return self._call("run", list(requests))

    def stats(self, reset: bool = False) -> dict[str, Any]:
        """Counters of verification; see `engine.stats.Stats`."""
        return self._call("stats", reset)

    def configure(self, **values: Any) -> None:
        """Change tree options that need no restart."""
        self._call("configure", values)

    def rpc(self, method: Any, *args: Any) -> Any:
        """Call a worker method by name, or a picklable function taking the worker, and return its result."""
        return self._call("rpc", method, args)

    def ready(self) -> Decoder:
        """Wait until the engine has started; DecoderError with its traceback when it could not."""
        if not self._started:
            self._receive()
            self._started = True
        return self

    def close(self) -> None:
        if self._process.is_alive():
            try:
                self.ready()
                self._pipe.send(None)
                self._process.join(20)
            except (DecoderError, OSError):
                pass
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
        self._pipe.close()

    def __enter__(self) -> Decoder:
        return self.ready()

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _call(self, name: str, *args: Any) -> Any:
        self.ready()
        self._pipe.send((name, args))
        return self._receive()

    def _receive(self) -> Any:
        try:
            ok, value = self._pipe.recv()
        except EOFError:
            self._process.join(20)
            raise DecoderError(f"the engine process died with exit code {self._process.exitcode}") from None
        if not ok:
            raise DecoderError(value)
        return value


def _serve(pipe: Any, environment: dict[str, str], arguments: dict[str, Any]) -> None:
    """The child process: build the engine, then answer calls until None arrives."""
    os.environ.update(environment)
    for folder in reversed(environment.get("PYTHONPATH", "").split(os.pathsep)):
        if folder:  # this interpreter has started already
            sys.path.insert(0, folder)
    try:
        from vllm import LLM

        from aeon_ddtree.engine.decoder_child import Engine

        engine = Engine(LLM(**arguments))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        return
    pipe.send((True, None))
    while True:
        try:
            call = pipe.recv()
            if call is None:
                return
            name, args = call
            pipe.send((True, getattr(engine, name)(*args)))
        except EOFError:  # the parent is gone
            return
        except BaseException:
            pipe.send((False, traceback.format_exc()))
