# SPDX-License-Identifier: Apache-2.0
"""What is known about a server that runs here: one JSON file per port, written by the watcher, read by `health`.

File `PORT.json` in a folder of mode 0700, replaced in one piece. Its keys:

    pid, start     the server's process and its start in clock ticks since boot (together they name one process)
    watcher        [pid, start] of the watcher; null until it runs
    host, port, tls, name
    began, since   when the server, and the present phase, began: seconds of the system's monotonic clock
    phase          one of PHASES
    detail         one line on the phase, or ""
    ready_after    seconds from the start to the first generation; null before
    late           true once the deadline for being ready has passed without it
"""

import json
import os
import select
import signal
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

PHASES = ("starting", "loading", "port open", "first generation", "ready", "stalled", "unwatched")
HEALTHY = "ready"


def start_ticks(pid: int) -> int | None:
    """When the process began, in clock ticks since boot; None when there is none, or only its exit status is left."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


class ServerProcess:
    """One process, not mistaken for a later one of the same number."""

    def __init__(self, pid: int, start: int) -> None:
        self.pid, self.start = pid, start
        self._pidfd: int | None = None
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:
            pass  # gone already, or a kernel or container profile without it: wait() asks /proc then

    @property
    def running(self) -> bool:
        return start_ticks(self.pid) == self.start

    def wait(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds, whether the process is gone."""
        if not self.running:
            return True
        if self._pidfd is None:
            time.sleep(min(timeout, 0.5))
        else:
            select.select([self._pidfd], [], [], timeout)
        return not self.running

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, to this process only."""
        try:
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, number)
            elif self.running:
                os.kill(self.pid, number)
        except ProcessLookupError:
            pass


def folders() -> list[Path]:
    """Where a state file may be, best first. The shared-memory file system is there when all else is read-only."""
    found = [Path(runtime, "aeon-ddtree")] if (runtime := os.environ.get("XDG_RUNTIME_DIR")) else []
    try:
        found.append(Path(tempfile.gettempdir(), f"aeon-ddtree-{os.getuid()}"))
    except FileNotFoundError:
        pass
    return [*found, Path(f"/dev/shm/aeon-ddtree-{os.getuid()}")]


def _private(folder: Path) -> bool:
    """Whether the folder is a real one, ours, and closed to others: names in a shared folder can be taken first."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def writable_folder() -> Path:
    """The first of folders() that can be written to, made when absent. Raises OSError when there is none."""
    for folder in folders():
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            continue
        if _private(folder) and os.access(folder, os.W_OK | os.X_OK):
            return folder
    places = ", ".join(map(str, folders()))
    raise OSError(f"no private folder can be written to, tried {places}; set XDG_RUNTIME_DIR to one")


def write(folder: Path, state: dict[str, Any]) -> None:
    """Replaces the state of this port. Raises OSError."""
    handle, name = tempfile.mkstemp(dir=folder, prefix=f".{state['port']}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(state, file)
        os.replace(name, folder / f"{state['port']}.json")
    except OSError:
        os.unlink(name)
        raise


def read(file: Path) -> dict[str, Any] | None:
    """The state in `file`, of a server that runs; None when it is gone, or the file is not to be trusted."""
    if not _private(file.parent):
        return None
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        alive = start_ticks(state["pid"]) == state["start"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return state if alive else None


def running_servers() -> dict[int, dict[str, Any]]:
    """port -> state, for every server of this user that runs."""
    files = [file for folder in reversed(folders()) for file in folder.glob("*.json")]
    return {state["port"]: state for file in files if (state := read(file)) is not None}


def remove(folder: Path, port: int, pid: int, start: int) -> None:
    """Removes the state of this process; that of a later server on the same port stays."""
    file = folder / f"{port}.json"
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        if (state["pid"], state["start"]) == (pid, start):
            file.unlink()
    except (OSError, ValueError, KeyError, TypeError):
        pass
