# SPDX-License-Identifier: Apache-2.0
"""The watcher's own process; watch.py starts it. It reads its plan from stdin and ends with the server."""

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import server_state
from .probes import Reading, Server, Silence, StallClock, Trouble
from .server_state import ServerProcess, start_ticks
from .watch import Plan, inode, say

PROBE_TIMEOUT = 5.0  # seconds for an answer that needs no engine
GENERATION_TIMEOUT = 600.0  # seconds: kernels may be compiled during the first one


class Watcher:
    """Asks in a thread, which may wait for an answer, and keeps time in the main thread, which never does."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.process = ServerProcess(plan.pid, plan.start)
        self.server = Server(plan.host, plan.port, plan.tls, plan.api_key)
        self.state = plan.state()
        self.lock = threading.Lock()
        self.folder = Path(plan.folder) if plan.folder is not None else None
        self.ended = False
        self.told = plan.began
        self.kill_because = ""

    def run(self) -> None:
        """Until the server has ended."""
        self.note(watcher=[os.getpid(), start_ticks(os.getpid())])
        if self.plan.asks:
            threading.Thread(target=self._ask, daemon=True).start()
        while not self.process.wait(0.5):
            if self.plan.asks:
                self._keep_time()
            if self.kill_because:
                self._end_server()
        with self.lock:
            self.ended = True
        self._clean_up()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.plan.began

    def enter(self, phase: str, detail: str = "", **changes: Any) -> None:
        """Notes phase and detail, and tells them on stderr, if they are new."""
        with self.lock:
            if self.ended or (phase, detail) == (self.state["phase"], self.state["detail"]):
                return
            if phase != self.state["phase"]:
                changes["since"] = time.monotonic()
            self._change(phase=phase, detail=detail, **changes)
            self._tell()

    def note(self, **changes: Any) -> None:
        with self.lock:
            self._change(**changes)

    def _change(self, **changes: Any) -> None:
        self.state |= changes
        if self.folder is not None:
            try:
                server_state.write(self.folder, self.state)
            except OSError as error:
                say(f"state of port {self.plan.port} not written: {error}")

    def _tell(self) -> None:
        phase, detail, elapsed = self.state["phase"], self.state["detail"], f"{self.elapsed:.0f} s"
        self.told = time.monotonic()
        where = f" (port {self.plan.port})"
        if phase == "ready":
            say(f"ready after {elapsed}{where}" if not detail else f"ready, {detail}{where}")
        elif phase == "stalled":
            say(f"stalled: {detail}{where}")
        else:
            say(f"{phase}, {elapsed}{self._detail()}{where}")

    def _detail(self) -> str:
        return f": {self.state['detail']}" if self.state["detail"] else ""

    def _keep_time(self) -> None:
        with self.lock:
            if self.state["ready_after"] is not None:
                return
            if time.monotonic() - self.told >= self.plan.notice_every:
                self._tell()
            late = 0 < self.plan.ready_timeout <= self.elapsed and not self.state["late"]
            if late:
                self._change(late=True)
                what = f"not ready after {self.plan.ready_timeout:g} s"
                say(f"{what}: still {self.state['phase']}{self._detail()} (port {self.plan.port})")
                if self.plan.exit_on_stall:
                    self.kill_because = what

    def _ask(self) -> None:
        try:
            while not self._first_generation():
                time.sleep(min(1.0, self.plan.notice_every / 4))
            self.enter("ready", ready_after=round(self.elapsed, 3))
            if self.plan.stall_after > 0:
                Guard(self).watch()
        except Exception as error:  # the server runs on, but nobody may believe that it is looked after
            self.enter("unwatched", f"the watcher failed with {type(error).__name__}: {' '.join(str(error).split())}")

    def _first_generation(self) -> bool:
        if not self.server.port_is_open(PROBE_TIMEOUT):
            was_open = self.state["phase"] not in ("starting", "loading") or self.state["detail"]
            self.enter("loading", "its port is closed again" if was_open else "")
            return False
        try:
            self.server.check_health(PROBE_TIMEOUT)
        except Trouble as trouble:
            self.enter("port open", str(trouble))
            return False
        detail = self.state["detail"] if self.state["phase"] == "first generation" else ""
        self.enter("first generation", detail)
        try:
            return self.server.generate(GENERATION_TIMEOUT) > 0
        except Trouble as trouble:
            self.enter("first generation", str(trouble))
            return False

    def _end_server(self) -> None:
        """Ends the server with SIGKILL, so that its exit status says that it failed: asked to end, it would answer 0.

        Its engine processes, which hold the device, get SIGTERM, and SIGKILL after the grace time.
        """
        import psutil

        say(f"ending the server: {self.kill_because} (port {self.plan.port})")
        self.kill_because = ""
        try:
            children = psutil.Process(self.plan.pid).children(recursive=True)
        except psutil.Error:
            children = []
        # In a container without an init process the server is the first one: it adopts us, and is deaf to SIGKILL.
        children = [child for child in children if child.pid != os.getpid()]
        self.process.send(signal.SIGTERM if self.plan.pid == 1 else signal.SIGKILL)
        for process in children:
            _attempt(process.terminate)
        for process in psutil.wait_procs(children, timeout=self.plan.grace)[1]:
            _attempt(process.kill)

    def _clean_up(self) -> None:
        plan = self.plan
        # A later server on this port may have made the folder anew already.
        if plan.metrics_dir is not None and inode(plan.metrics_dir) == plan.metrics_inode is not None:
            shutil.rmtree(plan.metrics_dir, ignore_errors=True)
        if self.folder is not None:
            server_state.remove(self.folder, plan.port, plan.pid, plan.start)


def _attempt(action: Callable[[], object]) -> None:
    import psutil

    try:
        action()
    except psutil.Error:
        pass  # it has ended meanwhile


class Guard:
    """The watchdog of a server that was ready once."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher, self.server, self.after = watcher, watcher.server, watcher.plan.stall_after
        self.interval = min(15.0, max(0.2, self.after / 8))
        self.engines: dict[str, StallClock] = {}
        self.whole = StallClock()
        self.answered = time.monotonic()
        self.blind = False
        self.refusal = ""
        self.trial: threading.Thread | None = None

    def watch(self) -> None:
        while True:
            time.sleep(self.interval)
            stall, now = self.look(), time.monotonic()
            was = self.watcher.state["phase"]
            if stall:
                self.watcher.enter("stalled", self.watcher.state["detail"] if was == "stalled" else stall)
                if was != "stalled" and self.watcher.plan.exit_on_stall:
                    self.watcher.kill_because = "stalled"
            elif was == "stalled" and stall is not None:
                self.watcher.enter("ready", f"moving again after {now - self.watcher.state['since']:.0f} s")

    def look(self) -> str | None:
        """What stands still for stall_after seconds by now; "" for nothing; None when it cannot be told yet."""
        try:
            self.server.check_health(PROBE_TIMEOUT)
            readings = self.server.readings(PROBE_TIMEOUT)
            taken = self.server.in_flight(PROBE_TIMEOUT)
        except Trouble as trouble:
            silent = time.monotonic() - self.answered
            return f"no good answer for {silent:.0f} s, {trouble}" if silent >= self.after else None
        now = self.answered = time.monotonic()
        if not readings and not self.blind:
            self.blind = True
            say("/metrics reports no requests (--disable-log-stats?): stalls of the engine are not seen")
        for engine, reading in readings.items():
            clock = self.engines.setdefault(engine, StallClock())
            quiet = clock.update(reading, now, demand=reading.demand > 0)
            if quiet >= self.after:
                held = f"{reading.running:g} running, {reading.waiting:g} waiting"
                return f"engine {engine or 0} has requests ({held}) and no token for {quiet:.0f} s"
        return self._look_at_taken(readings, taken, now)

    def _look_at_taken(self, readings: dict[str, Reading], taken: int, now: float) -> str:
        """A request that hangs in its first step is in no metric of the engine. The server's own count has it, but may
        keep one whose client has left; so a small request of ours decides, before a stall is reported."""
        total = Reading(
            produced=sum(reading.produced for reading in readings.values()),
            kv_usage=sum(reading.kv_usage for reading in readings.values()),
        )
        demand = taken > 0 and bool(readings) and not any(reading.demand for reading in readings.values())
        quiet = self.whole.update(total, now, demand)
        if self.trial is not None and not self.trial.is_alive():
            self.trial, self.whole.moved, quiet = None, now, 0.0
        if quiet >= self.after / 2 and self.trial is None:
            self.trial = threading.Thread(target=self._try, daemon=True)
            self.trial.start()
        return f"{taken} requests taken and no token for {quiet:.0f} s" if quiet >= self.after else ""

    def _try(self) -> None:
        """Until there is an answer, be it a refusal: what refuses does not hang."""
        while True:
            try:
                self.server.generate(GENERATION_TIMEOUT)
                return
            except Silence:
                time.sleep(self.interval)
            except Trouble as trouble:
                if str(trouble) != self.refusal:
                    self.refusal = str(trouble)
                    say(f"a trial generation failed: {trouble} (port {self.watcher.plan.port})")
                return


if __name__ == "__main__":
    Watcher(Plan(**json.load(sys.stdin))).run()
