# SPDX-License-Identifier: Apache-2.0
"""A server of ours with the watcher beside it, as in a real start: the dispatcher's process becomes the server."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aeon_entrypoints import server_state

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


def gone(pid: int, start_of: int) -> bool:
    return server_state.start_ticks(pid) != start_of


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
