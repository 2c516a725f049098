# SPDX-License-Identifier: Apache-2.0
"""Starts the watcher: a small process beside the server that says when it is ready, and when it stalls.

The dispatcher becomes the server (exec), so the watcher starts just before, as its sibling:

    argv = build_argv(resolved)             # with --enable-server-load-tracking among its flags, and
                                            # --disable-access-log-for-endpoints /health,/metrics,/load
    environ = {**os.environ, ...}           # what the server will get
    watch.begin(argv, environ, host="0.0.0.0", port=8000, name="the recipe's name",
                ready_timeout=3600, stall_after=120, exit_on_stall=False,
                metrics_dir=FOLDER or None) # the folder that the dispatcher made for PROMETHEUS_MULTIPROC_DIR
    os.execvpe(argv[0], argv, environ)

It tells the phases of the start on stderr, writes the state that `aeon-ddtree health` reads, watches for stalls, and
ends with the server, whose metrics folder and state it then removes.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import server_state
from .server_state import start_ticks


@dataclass(frozen=True)
class Plan:
    """What a watcher is told. Times in seconds; ready_timeout and stall_after 0: no deadline, no watchdog."""

    pid: int
    start: int
    began: float
    host: str
    port: int
    name: str
    tls: bool
    api_key: str | None
    ready_timeout: float
    stall_after: float
    exit_on_stall: bool
    metrics_dir: str | None
    metrics_inode: int | None
    folder: str | None  # of the state file
    asks: bool  # false: only tidies up when the server has ended
    notice_every: float = 30.0
    grace: float = 10.0  # for the engine's processes to end by themselves

    def state(self) -> dict[str, Any]:
        kept = {"pid": self.pid, "start": self.start, "host": self.host, "port": self.port, "tls": self.tls}
        kept |= {"name": self.name, "began": self.began, "since": self.began, "watcher": None}
        return kept | {"phase": "starting", "detail": "", "ready_after": None, "late": False}


def say(text: str) -> None:
    try:
        print(f"aeon-ddtree: {text}", file=sys.stderr, flush=True)
    except OSError:
        pass  # nobody reads any more; the server goes on


def _argument(argv: list[str], flag: str) -> str | None:
    """The value of `--flag VALUE` or `--flag=VALUE`, the last one given."""
    found = None
    for position, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == flag:
            found = value if equals else next(iter(argv[position + 1 :]), None)
    return found


def begin(
    argv: list[str],
    environ: Mapping[str, str],
    *,
    host: str,
    port: int,
    name: str = "",
    ready_timeout: float = 3600.0,
    stall_after: float = 120.0,
    exit_on_stall: bool = False,
    metrics_dir: str | None = None,
    **timing: float,
) -> bool:
    """Starts the watcher of the process that calls this, which becomes the server next. False when it is not watched.

    argv, environ: the server's; its key and whether it speaks TLS are taken from them. metrics_dir: a folder to remove
    when the server has ended. timing: fields of Plan. Nothing that goes wrong here keeps the server from starting.
    """
    pid, folder = os.getpid(), None
    asks = port != 0 and _argument(argv, "--uds") is None
    if asks:
        try:
            folder = str(server_state.writable_folder())
        except OSError as error:
            say(f"health will not answer: {error}")
    else:
        say("not watched: the server is not at a port that is known before; health will not answer for it")
        if metrics_dir is None:
            return False
    plan = Plan(
        pid=pid,
        start=start_ticks(pid) or 0,
        began=time.monotonic(),
        host=host,
        port=port,
        name=name,
        tls=_argument(argv, "--ssl-certfile") is not None,
        api_key=_argument(argv, "--api-key") or environ.get("VLLM_API_KEY") or None,
        ready_timeout=ready_timeout,
        stall_after=stall_after,
        exit_on_stall=exit_on_stall,
        metrics_dir=metrics_dir,
        metrics_inode=inode(metrics_dir),
        folder=folder,
        asks=asks,
        **timing,
    )
    try:
        # Before the exec, so that `health` never reads the state of an earlier server on this port.
        if folder is not None:
            server_state.write(Path(folder), plan.state())
        _spawn(json.dumps(asdict(plan)).encode(), environ)
    except OSError as error:
        say(f"not watched: {error}")
        return False
    return asks


def inode(folder: str | None) -> int | None:
    try:
        return None if folder is None else os.stat(folder, follow_symlinks=False).st_ino
    except OSError:
        return None


def _spawn(plan: bytes, environ: Mapping[str, str]) -> None:
    """Runs the watcher as nobody's child, or it would stay behind in the server as a zombie. The plan, which may hold
    a key, goes through a pipe. Raises OSError."""
    # With the variable set, importing prometheus_client would make the watcher write metrics of its own.
    environ = {name: value for name, value in environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
    reading, writing = os.pipe()
    try:
        os.write(writing, plan)  # at most some hundred bytes: the pipe holds them
        os.close(writing)
        between = os.fork()
        if between == 0:
            code = 1
            try:
                command = [sys.executable, "-m", "aeon_entrypoints.watcher"]
                # A session of its own: Ctrl-C in the terminal is for the server, and the watcher ends after it.
                subprocess.Popen(command, stdin=reading, stdout=2, start_new_session=True, env=environ)
                code = 0
            finally:
                os._exit(code)
        if os.waitpid(between, 0)[1] != 0:
            raise OSError(f"{sys.executable} could not be started once more")
    finally:
        os.close(reading)
