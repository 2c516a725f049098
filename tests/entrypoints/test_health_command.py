# SPDX-License-Identifier: Apache-2.0
"""`aeon-ddtree health`: which server is meant, what it answers, and from which state files."""

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from aeon_entrypoints import server_state
from aeon_entrypoints.health import health


class Health(BaseHTTPRequestHandler):
    status: int | None = 200  # None: no answer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.status is None:
            time.sleep(5)
            return
        self.send_response(self.status if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def listening() -> Iterator[int]:
    """The port of a server that answers /health."""
    Health.status = 200
    with ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder where states are looked for."""
    private = tmp_path / "state"
    private.mkdir(mode=0o700)
    monkeypatch.setattr(server_state, "folders", lambda: [tmp_path / "absent", private])
    monkeypatch.delenv("DDTREE_PORT", raising=False)
    return private


def me() -> list[int]:
    start = server_state.start_ticks(os.getpid())
    assert start is not None
    return [os.getpid(), start]


@pytest.fixture
def state(folder: Path) -> Callable[..., dict[str, Any]]:
    """Writes the state of a ready server, which this very process plays, with changes."""

    def write(port: int, **changes: Any) -> dict[str, Any]:
        pid, start = me()
        now = time.monotonic()
        content = {"pid": pid, "start": start, "watcher": me(), "host": "0.0.0.0", "port": port, "tls": False}
        content |= {"name": "pair", "began": now - 100, "since": now - 40, "phase": "ready", "detail": ""}
        content |= {"ready_after": 60.0, "late": False} | changes
        server_state.write(folder, content)
        return content

    return write


def call(*arguments: str) -> Result:
    result = CliRunner().invoke(health, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.output.count("\n") == 1, "one line"
    return result


def test_ready(listening: int, state: Callable[..., Any]) -> None:
    state(listening)
    result = call()
    assert (result.exit_code, result.output) == (0, f"port {listening}: ready for 40 s, 100 s in all\n")
    answer = json.loads(call("--json").output)
    assert answer["healthy"] is True and answer["port"] == listening and answer["ready_after_s"] == 60.0


@pytest.mark.parametrize("phase", [name for name in server_state.PHASES if name != "ready"])
def test_other_phases(listening: int, state: Callable[..., Any], phase: str) -> None:
    state(listening, phase=phase, detail="because", ready_after=None)
    result = call()
    assert (result.exit_code, result.output) == (1, f"port {listening}: {phase} for 40 s, 100 s in all; because\n")
    assert json.loads(call("--json").output)["healthy"] is False


def test_past_the_deadline(listening: int, state: Callable[..., Any]) -> None:
    state(listening, phase="loading", ready_after=None, late=True)
    assert call().output == f"port {listening}: loading for 40 s, 100 s in all, past its deadline\n"
    state(listening, late=True)
    assert call().exit_code == 0, "late, but ready by now"


@pytest.mark.parametrize(("status", "words"), [(503, "HTTP 503"), (None, "no answer within 0.3 s")])
def test_ready_by_its_state_but_not_answering(
    listening: int, state: Callable[..., Any], status: int | None, words: str
) -> None:
    state(listening)
    Health.status = status
    before = time.monotonic()
    result = call("--timeout", "0.3")
    assert result.exit_code == 1 and words in result.output
    assert time.monotonic() - before < 2


def test_nobody_listens_any_more(state: Callable[..., Any]) -> None:
    state(1)
    assert call().exit_code == 1


def test_a_state_that_outlived_its_server_is_none(listening: int, state: Callable[..., Any]) -> None:
    state(listening, start=me()[1] - 1)
    result = call()
    assert (result.exit_code, result.output) == (1, "no server that is watched\n")


def test_a_watcher_that_ended(listening: int, state: Callable[..., Any]) -> None:
    state(listening, watcher=[me()[0], me()[1] - 1])
    result = call()
    assert result.exit_code == 1 and "unwatched" in result.output
    state(listening, watcher=None, phase="starting")
    assert "starting for" in call().output, "not running yet is not ended"


def test_which_server(listening: int, state: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    state(listening)
    monkeypatch.setenv("DDTREE_PORT", "9")
    assert call().exit_code == 0, "the only server is meant: its command line may have overruled the variable"
    assert call("--port", "9").output == f"port 9: no server that is watched; on other ports: {listening}\n"
    state(9)
    assert call("--port", str(listening)).exit_code == 0
    assert call().output.startswith("port 9: ready")
    monkeypatch.setenv("DDTREE_PORT", "10")
    assert call().output == f"servers on ports 9, {listening}: give --port\n"
    assert call().exit_code == 1


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"port": 5}', '{"pid": "x", "start": 1}'])
def test_files_that_are_no_states(folder: Path, content: str) -> None:
    (folder / "8000.json").write_text(content)
    assert call().output == "no server that is watched\n"


def test_a_state_of_another_version(folder: Path, listening: int, state: Callable[..., Any]) -> None:
    content = state(listening)
    del content["phase"]
    server_state.write(folder, content)
    result = call()
    assert result.exit_code == 1 and "written by another version" in result.output


def test_a_folder_that_others_can_write_to_is_not_trusted(
    folder: Path, listening: int, state: Callable[..., Any]
) -> None:
    state(listening)
    folder.chmod(0o777)
    assert call().exit_code == 1


def test_where_the_state_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    mine = tmp_path / f"aeon-ddtree-{os.getuid()}"
    assert server_state.writable_folder() == mine and mine.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "absent"))
    assert server_state.writable_folder() == mine, "named, but not there"
    (tmp_path / "absent").mkdir()
    assert server_state.writable_folder() == tmp_path / "absent" / "aeon-ddtree"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    mine.rmdir()
    mine.symlink_to(elsewhere)  # somebody was faster, in a folder that all may write to
    monkeypatch.setattr(server_state, "folders", lambda: [mine])
    with pytest.raises(OSError, match="set XDG_RUNTIME_DIR"):
        server_state.writable_folder()


def test_starts_quickly_and_lightly(tmp_path: Path) -> None:
    program = (
        "import sys, aeon_entrypoints.health as h; "
        "heavy = {'torch', 'vllm', 'pydantic', 'httpx', 'rich', 'numpy'} & set(sys.modules); assert not heavy, heavy; "
        "h.health()"
    )
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    used = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ended = subprocess.run(
            [sys.executable, "-c", program, "--port", "9"], env=environ, capture_output=True, text=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert ended.returncode == 1 and ended.stdout.startswith("port 9: no server that is watched"), ended
    assert min(used) < 0.7, "seconds of one core; the clock on the wall depends on what else runs"
