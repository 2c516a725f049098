# SPDX-License-Identifier: Apache-2.0
"""The watcher from the start of a server to its end: phases, the first generation, exec, and what is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from watched import SERVER, Started, gone, start, until

from aeon_entrypoints import server_state, watch

__all__ = ["start"]  # a fixture


def test_phases_of_a_slow_load(start: Callable[..., Started]) -> None:
    server = start(open_after=2.5, health=503, completions="hang", options={"notice_every": 0.5})
    assert server.reach("loading")["ready_after"] is None
    assert "HTTP 503" in server.reach("port open")["detail"]
    server.write(health=200)
    server.reach("first generation")
    server.write(completions="ok")
    state = server.reach("ready")
    assert state["ready_after"] > 2.5 and not state["late"]
    told = server.told()
    places = [told.index(word) for word in ("loading, ", "port open, ", "first generation, ", "ready after ")]
    assert places == sorted(places)
    assert told.count("loading, ") >= 3, "the time that passes is told while nothing changes"
    assert told.count("ready after ") == 1


def test_healthy_is_not_ready_while_the_first_generation_hangs(start: Callable[..., Started]) -> None:
    server = start(completions="hang", options={"ready_timeout": 4.0})
    server.reach("first generation")
    until(lambda: server.state["late"], "late")
    assert server.state["phase"] == "first generation"
    until(lambda: "not ready after 4 s: still first generation" in server.told(), "the notice")
    assert server.process.poll() is None, "without --exit-on-stall the server goes on"
    server.write(completions="ok")
    assert server.reach("ready")["late"]


@pytest.mark.parametrize(("answer", "words"), [("empty", "answered with 0 tokens"), (500, "HTTP 500: told to")])
def test_answers_that_are_no_generation(start: Callable[..., Started], answer: Any, words: str) -> None:
    server = start(completions=answer)
    until(lambda: words in server.state.get("detail", ""), words)
    assert server.state["phase"] == "first generation"
    server.write(completions="ok")
    server.reach("ready")


def test_a_port_that_closes_again_is_told(start: Callable[..., Started]) -> None:
    server = start(completions=500, close_after=1)
    until(lambda: "its port is closed again" in server.told(), "the notice")
    assert server.state["phase"] == "loading"


def test_a_server_for_chat_only(start: Callable[..., Started]) -> None:
    server = start(completions=404)
    server.reach("ready")
    assert "POST /v1/chat/completions 200" in server.requests()


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [(["--api-key", "secret"], {}), (["--api_key=secret"], {"VLLM_API_KEY": "old"}), ([], {"VLLM_API_KEY": "secret"})],
)
def test_api_key(start: Callable[..., Started], arguments: list[str], environ: dict[str, str]) -> None:
    server = start(arguments, environ, key="secret")
    server.reach("ready")
    pid, _ = server.watcher()
    assert "secret" not in " ".join(psutil.Process(pid).cmdline())
    assert "secret" not in (server.state_folder / f"{server.port}.json").read_text()
    assert "secret" not in server.told()


def test_a_wrong_api_key_is_told(start: Callable[..., Started]) -> None:
    server = start(["--api-key", "another"], key="secret")
    until(lambda: "GET /v1/models: HTTP 401" in server.told(), "the refusal")
    assert server.state["phase"] == "first generation"


def test_outlives_exec_and_is_nobodys_child(start: Callable[..., Started]) -> None:
    server = start()
    server.reach("ready")
    pid, _ = server.watcher()
    process = psutil.Process(server.process.pid)
    assert process.cmdline()[1:3] == [str(SERVER), str(server.port)], "the dispatcher became the server"
    assert process.children() == [], "neither the watcher nor what started it stays behind in the server"
    watcher = psutil.Process(pid)
    assert os.getsid(pid) != os.getsid(server.process.pid)
    assert watcher.memory_info().rss < 60e6
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    assert sorted(path.name for path in server.metrics.iterdir()) == ["counter.db"], "no metrics of its own"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ends_with_the_server_and_cleans_up(start: Callable[..., Started], number: signal.Signals) -> None:
    server = start()
    server.reach("ready")
    watcher = server.watcher()
    file = server.state_folder / f"{server.port}.json"
    assert file.stat().st_mode & 0o777 == 0o600 and server.state_folder.stat().st_mode & 0o777 == 0o700
    server.process.send_signal(number)  # not reaped here for now: what is left of it counts as gone
    until(lambda: gone(*watcher), "the watcher ended", 2.0)
    assert not file.exists() and not server.metrics.exists()
    assert list(server.state_folder.iterdir()) == []


def test_ends_with_the_server_while_an_answer_is_outstanding(start: Callable[..., Started]) -> None:
    server = start(completions="hang")
    server.reach("first generation")
    watcher = server.watcher()
    os.kill(server.process.pid, signal.SIGSTOP)  # connections stay open, nothing is answered
    time.sleep(0.5)
    server.process.kill()
    until(lambda: gone(*watcher), "the watcher ended", 2.0)


def test_a_later_servers_things_are_left_alone(start: Callable[..., Started], tmp_path: Path) -> None:
    server = start()
    server.reach("ready")
    watcher = server.watcher()
    server.metrics.rename(tmp_path / "old")
    server.metrics.mkdir()
    later = server.state | {"pid": os.getpid(), "start": server_state.start_ticks(os.getpid())}
    server_state.write(server.state_folder, later)
    server.process.terminate()
    until(lambda: gone(*watcher), "the watcher ended", 2.0)
    assert server.metrics.exists() and server.state == later


def test_without_a_known_port_it_only_tidies_up(start: Callable[..., Started]) -> None:
    server = start(["--uds=/a/socket"])
    until(lambda: "not watched" in server.told(), "the notice")
    until(lambda: psutil.Process(server.process.pid).cmdline()[1:3] == [str(SERVER), str(server.port)], "the exec")
    time.sleep(1)
    assert server.requests() == "" and not server.state_folder.exists()
    server.process.terminate()
    until(lambda: not server.metrics.exists(), "the metrics removed")


def test_port_0_is_not_watched(capsys: pytest.CaptureFixture[str]) -> None:
    assert watch.begin([], {}, host="127.0.0.1", port=0) is False
    assert "not watched" in capsys.readouterr().err


def test_another_process_of_the_same_number_is_not_the_server() -> None:
    start_of = server_state.start_ticks(os.getpid())
    assert start_of is not None
    assert server_state.ServerProcess(os.getpid(), start_of).wait(0.01) is False
    assert server_state.ServerProcess(os.getpid(), start_of - 1).wait(60) is True


def test_without_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", refuse)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start_of = server_state.start_ticks(process.pid)
    assert start_of is not None
    seen = server_state.ServerProcess(process.pid, start_of)
    assert seen.wait(0.05) is False
    seen.send(signal.SIGKILL)
    until(lambda: seen.wait(0.05), "gone, though not reaped")
    assert process.wait() == -signal.SIGKILL
