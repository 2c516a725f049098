# SPDX-License-Identifier: Apache-2.0
"""The watcher beside a server of ours, which the dispatcher's process becomes by exec as in a real start."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from aeon_entrypoints import server_state, watch
from aeon_entrypoints.probes import Reading, StallClock, read_metrics

SERVER = Path(__file__).with_name("watched_server.py")
USUAL = {"open_after": 0, "health": 200, "completions": "ok", "chat": "ok", "key": None, "running": 0, "waiting": 0}
USUAL |= {"kv": 0.0, "moving": False, "metrics": True, "load": 0, "child": False, "close_after": None}
PATIENCE = 20.0  # seconds; a busy machine starts two interpreters in it


def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what}")


class Started:
    """One server with its watcher. Its state is read as `health` reads it, its words are in `told()`."""

    def __init__(
        self, folder: Path, arguments: list[str], environ: dict[str, str], options: dict[str, Any], behaviour: Any
    ):
        self.folder, self.behaviour = folder, USUAL | behaviour
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.metrics = folder / "metrics"
        self.metrics.mkdir(exist_ok=True)
        (self.metrics / "counter.db").write_bytes(b"x")
        self.write()
        plan = {"port": self.port, "server_folder": str(folder), "server_arguments": arguments}
        plan |= {"metrics_dir": str(self.metrics), "stall_after": 1.0, "grace": 0.5} | options
        runtime = folder / "run"
        runtime.mkdir(mode=0o700, exist_ok=True)
        self.state_folder = runtime / "aeon-ddtree"
        with open(folder / "stderr", "wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, SERVER, "begin", json.dumps(plan)],
                env={
                    **os.environ,
                    "XDG_RUNTIME_DIR": str(runtime),
                    "PROMETHEUS_MULTIPROC_DIR": str(self.metrics),
                    **environ,
                },
                stderr=stderr,
            )

    def write(self, **changes: Any) -> None:
        self.behaviour |= changes
        draft = self.folder / "draft"
        draft.write_text(json.dumps(self.behaviour))
        draft.replace(self.folder / "behaviour.json")

    @property
    def state(self) -> dict[str, Any]:
        return server_state.read(self.state_folder / f"{self.port}.json") or {"phase": None, "watcher": None}

    def told(self) -> str:
        return (self.folder / "stderr").read_text()

    def requests(self) -> str:
        file = self.folder / "requests"
        return file.read_text() if file.exists() else ""

    def reach(self, phase: str) -> dict[str, Any]:
        return until(lambda: (state := self.state)["phase"] == phase and state, f"{phase}; it told: {self.told()}")

    def watcher(self) -> tuple[int, int]:
        pid, start = until(lambda: self.state["watcher"], "a watcher")
        return pid, start

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    servers: list[Started] = []

    def call(
        arguments: list[str] | None = None, environ: dict[str, str] | None = None, options: Any = None, **behaviour: Any
    ) -> Started:
        servers.append(Started(tmp_path, arguments or [], environ or {}, options or {}, behaviour))
        return servers[-1]

    yield call
    for server in servers:
        server.end()


def gone(pid: int, start_of: int) -> bool:
    return server_state.start_ticks(pid) != start_of


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
    assert "not ready after 4 s: still first generation" in server.told()
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


def test_a_stall_is_told_once_and_its_end_too(start: Callable[..., Started]) -> None:
    server = start()
    server.reach("ready")
    server.write(running=2, waiting=1)
    detail = server.reach("stalled")["detail"]
    assert "2 running, 1 waiting" in detail and "no token for" in detail
    time.sleep(1.5)
    assert server.told().count("stalled: ") == 1 and server.process.poll() is None
    server.write(moving=True)
    assert "moving again after" in server.reach("ready")["detail"]
    server.write(moving=False)
    server.reach("stalled")
    assert server.told().count("stalled: ") == 2


@pytest.mark.parametrize("state", [{}, {"running": 3, "moving": True}, {"waiting": 2, "moving": True}, {"kv": 0.5}])
def test_idle_and_moving_are_no_stall(start: Callable[..., Started], state: dict[str, Any]) -> None:
    server = start()
    server.reach("ready")
    server.write(**state)
    time.sleep(3)
    assert server.state["phase"] == "ready" and "stalled" not in server.told()


def test_a_long_prompt_is_no_stall(start: Callable[..., Started]) -> None:
    server = start(options={"stall_after": 2.0})
    server.reach("ready")
    for step in range(16):  # its tokens count at its end only
        server.write(running=1, kv=0.01 * step)
        time.sleep(0.25)
    assert "stalled" not in server.told()
    server.reach("stalled")


def test_a_request_that_hangs_in_its_first_step(start: Callable[..., Started]) -> None:
    server = start()
    server.reach("ready")
    server.write(load=1, completions="hang")  # the engine reports nothing: its metrics come with a finished step
    assert "1 requests taken and no token" in server.reach("stalled")["detail"]
    server.write(load=0, completions="ok")
    server.reach("ready")


def test_a_count_of_requests_that_is_off_is_no_stall(start: Callable[..., Started]) -> None:
    server = start()
    server.reach("ready")
    before = server.requests().count("POST")
    server.write(load=1)  # a client that left without being counted
    time.sleep(3)
    assert server.requests().count("POST") > before, "a trial generation has shown that it generates"
    assert "stalled" not in server.told()


@pytest.mark.parametrize("health", [503, "hang"])
def test_a_server_that_stops_answering(start: Callable[..., Started], health: Any) -> None:
    server = start()
    server.reach("ready")
    server.write(health=health)
    assert "no good answer for" in server.reach("stalled")["detail"]
    server.write(health=200)
    server.reach("ready")


def test_a_server_without_metrics_is_told(start: Callable[..., Started]) -> None:
    server = start(metrics=False, running=1)
    server.reach("ready")
    until(lambda: "--disable-log-stats" in server.told(), "the notice")
    time.sleep(1.5)
    assert server.told().count("--disable-log-stats") == 1 and server.state["phase"] == "ready"


def test_exit_on_stall_ends_server_and_engine(start: Callable[..., Started]) -> None:
    server = start(child=True, options={"exit_on_stall": True})
    server.reach("ready")
    child = int((server.folder / "child").read_text())
    child_start = server_state.start_ticks(child)
    watcher = server.watcher()
    server.write(running=1)
    assert server.process.wait(PATIENCE) != 0
    until(lambda: gone(*watcher), "the watcher ended", 4.0)
    assert gone(child, child_start), "deaf to SIGTERM, it got SIGKILL"
    assert "ending the server: stalled" in server.told() and not server.metrics.exists()


def test_exit_on_stall_at_the_deadline(start: Callable[..., Started]) -> None:
    server = start(open_after=600, options={"exit_on_stall": True, "ready_timeout": 1.0})
    assert server.process.wait(PATIENCE) != 0
    until(lambda: "ending the server: not ready after 1 s" in server.told(), "the reason")


def test_no_watchdog_and_no_deadline(start: Callable[..., Started]) -> None:
    server = start(options={"stall_after": 0, "ready_timeout": 0, "exit_on_stall": True})
    server.reach("ready")
    server.write(running=1, health="hang")
    time.sleep(2)
    assert server.state["phase"] == "ready" and not server.state["late"] and server.process.poll() is None


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


def test_metrics_of_several_engines() -> None:
    text = "\n".join(
        [
            "# TYPE vllm:num_requests_running gauge",
            'vllm:num_requests_running{engine="0",model_name="m"} 1.0',
            'vllm:num_requests_running{engine="1",model_name="m"} 0.0',
            'vllm:num_requests_waiting{engine="1",model_name="m"} 4.0',
            'vllm:num_requests_waiting_by_reason{engine="1",reason="capacity"} 9.0',
            'vllm:prompt_tokens_total{engine="0",model_name="m"} 1e+03',
            'vllm:prompt_tokens_created{engine="0",model_name="m"} 1.7e+09',
            'vllm:generation_tokens_total{engine="0",model_name="m"} 23.0',
            'vllm:kv_cache_usage_perc{engine="1",model_name="a } b"} 0.25',
            'vllm:generation_tokens_total{engine="7",model_name="m"} 5.0',
        ]
    )
    assert read_metrics(text) == {"0": Reading(1, 0, 1023, 0), "1": Reading(0, 4, 0, 0.25)}
    assert read_metrics("") == {}


def test_stall_clock_starts_when_demand_does() -> None:
    clock = StallClock()
    idle, busy = Reading(produced=5), Reading(running=1, produced=5)
    assert clock.update(idle, 0.0, False) == 0
    assert clock.update(idle, 1000.0, False) == 0
    assert clock.update(busy, 1010.0, True) == 10
    assert clock.update(Reading(running=1, produced=6), 1020.0, True) == 0
    assert clock.update(Reading(running=1, produced=6), 1050.0, True) == 30
