# SPDX-License-Identifier: Apache-2.0
"""Questions to a running server over HTTP: is it there, is it healthy, does it generate, has it moved."""

import http.client
import json
import socket
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

LOCAL = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}
PROMPT = "Hello"
TOKENS = 2  # the first comes from the prompt's own step; a second one asks for a step with draft tokens
NOT_OFFERED = {404, 405, 501}  # what a server without that kind of completion answers


class Trouble(Exception):
    """The server did not do what was asked; its text is one line."""


class Silence(Trouble):
    """The server did not answer."""


@dataclass(frozen=True)
class Server:
    """Where a server listens. api_key: sent with every request when there is one."""

    host: str
    port: int
    tls: bool = False
    api_key: str | None = field(default=None, repr=False)

    def request(self, method: str, path: str, timeout: float, body: Any = None) -> tuple[int, bytes]:
        """(status, body). timeout: seconds without a byte. Raises Trouble when no answer comes."""
        host = LOCAL.get(self.host, self.host)
        if self.tls:
            # Our own server on this machine: there is nothing to verify, and its name need not be this address.
            context = ssl._create_unverified_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, self.port, timeout=timeout, context=context
            )
        else:
            connection = http.client.HTTPConnection(host, self.port, timeout=timeout)
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except TimeoutError:
            raise Silence(f"{method} {path}: no answer within {timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise Silence(f"{method} {path}: {str(error) or type(error).__name__}") from None
        finally:
            connection.close()

    def port_is_open(self, timeout: float) -> bool:
        try:
            socket.create_connection((LOCAL.get(self.host, self.host), self.port), timeout).close()
        except OSError:
            return False
        return True

    def check_health(self, timeout: float) -> None:
        """Raises Trouble unless /health answers 200."""
        status, body = self.request("GET", "/health", timeout)
        if status != 200:
            raise _refused("GET /health", status, body)

    def generate(self, timeout: float) -> int:
        """Tokens that the first model of the list generated for a short prompt, at least 1. Raises Trouble."""
        status, body = self.request("GET", "/v1/models", timeout)
        if status != 200:
            raise _refused("GET /v1/models", status, body)
        try:
            model = json.loads(body)["data"][0]["id"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise Trouble("GET /v1/models: no model in the answer") from None
        common = {"model": model, "max_tokens": TOKENS, "temperature": 0, "stream": False}
        path, status, body = "/v1/completions", 0, b""
        status, body = self.request("POST", path, timeout, common | {"prompt": PROMPT})
        if status in NOT_OFFERED:
            path = "/v1/chat/completions"
            messages = [{"role": "user", "content": PROMPT}]
            status, body = self.request("POST", path, timeout, common | {"messages": messages})
        if status != 200:
            raise _refused(f"POST {path}", status, body)
        try:
            tokens = json.loads(body)["usage"]["completion_tokens"]
        except (ValueError, KeyError, TypeError):
            raise Trouble(f"POST {path}: the answer counts no tokens") from None
        if not isinstance(tokens, int) or tokens < 1:
            raise Trouble(f"POST {path}: answered with {tokens} tokens")
        return tokens

    def readings(self, timeout: float) -> "dict[str, Reading]":
        """Per engine, what /metrics says; empty when it says nothing of requests. Raises Trouble."""
        status, body = self.request("GET", "/metrics", timeout)
        if status != 200:
            raise _refused("GET /metrics", status, body)
        try:
            return read_metrics(body.decode("utf-8", "replace"))
        except ValueError as error:
            raise Trouble(f"GET /metrics: not Prometheus text, {error}") from None

    def in_flight(self, timeout: float) -> int:
        """Requests that the server has taken and not answered; 0 where it does not count them. Raises Trouble.

        The metrics are sent with an engine's step: of a request that hangs in its first step they know nothing.
        """
        status, body = self.request("GET", "/load", timeout)
        try:
            return int(json.loads(body)["server_load"]) if status == 200 else 0
        except (ValueError, KeyError, TypeError):
            return 0


def _refused(what: str, status: int, body: bytes) -> Trouble:
    text = " ".join(body.decode("utf-8", "replace").split())
    return Trouble(f"{what}: HTTP {status}{': ' + text[:160] if text else ''}")


@dataclass
class Reading:
    """One engine at one moment. produced: tokens of prompts and of answers; kv_usage: share of the KV cache in use."""

    running: float = 0
    waiting: float = 0
    produced: float = 0
    kv_usage: float = 0

    @property
    def demand(self) -> int:
        return int(self.running + self.waiting)


SAMPLES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens_total": "produced",
    "vllm:generation_tokens_total": "produced",
    "vllm:kv_cache_usage_perc": "kv_usage",
}


def read_metrics(text: str) -> dict[str, Reading]:
    """engine -> reading, from Prometheus text; engines of which no running requests are reported are left out."""
    from prometheus_client.parser import text_string_to_metric_families

    # Only our lines are parsed: the whole is some thousand lines of histograms.
    ours = "\n".join(line for line in text.splitlines() if line.split("{", 1)[0].split(" ", 1)[0] in SAMPLES)
    readings: dict[str, Reading] = {}
    reported = set()
    for sample in _samples(text_string_to_metric_families(ours + "\n")):
        engine = sample.labels.get("engine", "")
        reading = readings.setdefault(engine, Reading())
        name = SAMPLES[sample.name]
        setattr(reading, name, getattr(reading, name) + sample.value)
        if name == "running":
            reported.add(engine)
    return {engine: reading for engine, reading in readings.items() if engine in reported}


def _samples(families: Iterable[Any]) -> Iterable[Any]:
    for family in families:
        yield from family.samples


@dataclass
class StallClock:
    """How long an engine that has requests has not moved.

    It moves with a token of an answer, with the end of a prompt, and with a change of what the KV cache holds: a long
    prompt that is read in several steps counts its tokens at the end only, but takes blocks with each step.
    """

    last: tuple[float, float] | None = None
    moved: float = 0  # seconds, of whatever clock `update` is given

    def update(self, reading: Reading, now: float, demand: bool) -> float:
        """Seconds without a move at `now`; 0 when there is no demand."""
        present = (reading.produced, reading.kv_usage)
        if present != self.last or not demand:
            self.last, self.moved = present, now
        return now - self.moved
