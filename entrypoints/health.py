# SPDX-License-Identifier: Apache-2.0
"""`aeon-ddtree health`: whether a server of this user, on this machine or in this container, is ready and moving."""

import json
import os
import sys
import time
from typing import Any

import click

from . import server_state
from .probes import Server, Trouble

VARIABLE = "DDTREE_PORT"


def pick(servers: dict[int, dict[str, Any]], port: int | None, wished: str | None) -> tuple[int | None, str]:
    """(port, why there is none). port: from the command line; wished: text of DDTREE_PORT.

    With one server running, that one is meant whatever the variable says: the server's own command line may have
    overruled it, and a container's health check knows the variable only.
    """
    running = ", ".join(map(str, sorted(servers))) or "none"
    if port is not None:
        return (port, "") if port in servers else (None, f"no server that is watched; on other ports: {running}")
    if len(servers) == 1:
        return next(iter(servers)), ""
    if not servers:
        return None, "no server that is watched"
    if wished is not None and wished.isdecimal() and int(wished) in servers:
        return int(wished), ""
    return None, f"servers on ports {running}: give --port"


def examine(state: dict[str, Any], timeout: float) -> dict[str, Any]:
    """The answer for one server: healthy, port, phase, seconds in all and in this phase, detail."""
    now = time.monotonic()
    answer = {
        "healthy": state["phase"] == server_state.HEALTHY,
        "port": state["port"],
        "name": state["name"],
        "phase": state["phase"],
        "elapsed_s": round(now - state["began"], 1),
        "phase_s": round(now - state["since"], 1),
        "ready_after_s": state["ready_after"],
        "late": state["late"],
        "detail": state["detail"],
    }
    watcher = state["watcher"]
    if watcher is not None and server_state.start_ticks(watcher[0]) != watcher[1]:
        return answer | {"healthy": False, "phase": "unwatched", "detail": "the watcher has ended"}
    if answer["healthy"]:
        try:
            Server(state["host"], state["port"], state["tls"]).check_health(timeout)
        except Trouble as trouble:
            return answer | {"healthy": False, "detail": str(trouble)}
    return answer


def line(answer: dict[str, Any]) -> str:
    """One line: port, phase, how long in it and in all, what is wrong."""
    if answer["phase"] is None:
        return f"{'port ' + str(answer['port']) + ': ' if answer['port'] else ''}{answer['detail']}"
    text = f"port {answer['port']}: {answer['phase']} for {answer['phase_s']:.0f} s, {answer['elapsed_s']:.0f} s in all"
    text += ", past its deadline" if answer["late"] and answer["ready_after_s"] is None else ""
    return text + (f"; {answer['detail']}" if answer["detail"] else "")


@click.command()
@click.option("--port", type=click.IntRange(1, 65535), help=f"Port of the server [the only one; else {VARIABLE}].")
@click.option("--timeout", type=click.FloatRange(0.1), default=3.0, show_default=True, help="Seconds for /health.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def health(port: int | None, timeout: float, as_json: bool) -> None:
    """Exit 0 if the server has generated, does not stall, and answers /health; else 1 and one line that says why."""
    servers = server_state.running_servers()
    found, why = pick(servers, port, os.environ.get(VARIABLE))
    if found is None:
        answer = {"healthy": False, "port": port, "phase": None, "detail": why}
    else:
        try:
            answer = examine(servers[found], timeout)
        except KeyError as missing:
            why = f"its state has no {missing}: written by another version; restart the server"
            answer = {"healthy": False, "port": found, "phase": None, "detail": why}
    click.echo(json.dumps(answer) if as_json else line(answer))
    sys.exit(0 if answer["healthy"] else 1)
