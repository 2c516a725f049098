# SPDX-License-Identifier: Apache-2.0
"""The child process of a `Decoder`: one engine inside it, stepped by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aeon_ddtree.engine.decoder import Completion, DecodeRequest


class Engine:
    """Answers a `Decoder`'s calls."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._serial = 0

    def run(self, requests: list[DecodeRequest]) -> list[list[Completion]]:
        try:
            return self._run(requests)
        except BaseException:
            engine = self._llm.llm_engine
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
            raise

    def _run(self, requests: list[DecodeRequest]) -> list[list[Completion]]:
        engine = self._llm.llm_engine
        waiting = sorted(range(len(requests)), key=lambda index: requests[index].arrival)
        names: dict[str, int] = {}
        sequences: list[dict[int, _Sequence]] = [{} for _ in requests]  # of n > 1, a step brings those that advanced
        at_once: list[str] = []
        step = 0
        while waiting or engine.has_unfinished_requests():
            while waiting and (requests[waiting[0]].arrival <= step or not engine.has_unfinished_requests()):
                index = waiting.pop(0)
                self._serial += 1
                name = f"r{self._serial}"
                names[name] = index
                if requests[index].abort_after == 0:
                    at_once.append(name)
                try:
                    self._add(name, requests[index])
                except (ValueError, TypeError) as error:  # what vLLM's front end answers with 400
                    if not requests[index].may_fail:
                        raise
                    sequences[index][0] = _Sequence(refusal=str(error))
            for output in engine.step():
                index = names[output.request_id]
                for part in output.outputs:
                    sequences[index].setdefault(part.index, _Sequence()).take(part, output, requests[index].stream)
                limit = requests[index].abort_after
                if limit is not None and not output.finished and len(sequences[index][0].token_ids) >= limit:
                    engine.abort_request([output.request_id])
            engine.abort_request(at_once)
            at_once.clear()
            step += 1
        return [[found[n].completion() for n in sorted(found)] for found in sequences]

    def stats(self, reset: bool) -> Any:
        return self._llm.collective_rpc("ddtree_stats", kwargs={"reset": reset})[0]

    def configure(self, values: dict[str, Any]) -> None:
        self._llm.collective_rpc("ddtree_configure", args=(values,))

    def rpc(self, method: Any, args: tuple[Any, ...]) -> Any:
        return self._llm.collective_rpc(method, args=args)[0]

    def _add(self, name: str, request: DecodeRequest) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        params = dict(request.params)
        if isinstance(params.get("structured_outputs"), dict):
            params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
        wanted = SamplingParams(**params)
        if request.stream:
            from vllm.sampling_params import RequestOutputKind

            wanted.output_kind = RequestOutputKind.DELTA
        prompt = {"prompt_token_ids": request.prompt} if isinstance(request.prompt, list) else request.prompt
        self._llm.llm_engine.add_request(name, prompt, wanted)


@dataclass
class _Sequence:
    """A sequence while it grows."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    pieces: list[int] = field(default_factory=list)
    logprobs: list[Any] | None = None
    prompt_logprobs: Any = None
    prompt_token_ids: Any = None
    last: Any = None
    refusal: str | None = None

    def take(self, part: Any, output: Any, is_increment: bool) -> None:
        """vLLM's output of one step: everything so far, or only what is new."""
        before = len(self.token_ids)
        if is_increment:
            self.token_ids += part.token_ids
            self.text += part.text
            if part.logprobs is not None:
                self.logprobs = [*(self.logprobs or ()), *part.logprobs]
        else:
            self.token_ids, self.text, self.logprobs = list(part.token_ids), part.text, part.logprobs
        if len(self.token_ids) > before:
            self.pieces.append(len(self.token_ids) - before)
        self.prompt_logprobs = self.prompt_logprobs if output.prompt_logprobs is None else output.prompt_logprobs
        self.prompt_token_ids = output.prompt_token_ids
        self.last = part

    def completion(self) -> Completion:
        if self.refusal is not None:
            return Completion([], "", "refused", [], stop_reason=self.refusal)
        return Completion(
            token_ids=self.token_ids,
            text=self.text,
            finish_reason=self.last.finish_reason,
            pieces=self.pieces,
            stop_reason=self.last.stop_reason,
            logprobs=_plain(self.logprobs),
            prompt_logprobs=_plain(self.prompt_logprobs),
            prompt_token_ids=list(self.prompt_token_ids or ()),
        )


def _plain(entries: Any) -> Any:
    """vLLM's log-probabilities as plain numbers."""
    if entries is None:
        return None
    return [None if e is None else {token: value.logprob for token, value in e.items()} for e in entries]
