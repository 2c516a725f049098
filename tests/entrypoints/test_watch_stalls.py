# SPDX-License-Identifier: Apache-2.0
"""The watchdog of a server that was ready: what is a stall, what is none, and how a stalled server is ended."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from watched import PATIENCE, Started, gone, start, until

from aeon_entrypoints import server_state
from aeon_entrypoints.probes import Reading, StallClock, read_metrics

__all__ = ["start"]  # a fixture


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
    until(lambda: server.told().count("stalled: ") == 2, "the second stall told")  # the state comes first


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
    until(lambda: server.requests().count("POST") > before, "a trial generation, to see that it generates")
    time.sleep(2)
    assert "stalled" not in server.told()


@pytest.mark.parametrize("health", [503, "hang"])
def test_a_server_that_stops_answering(start: Callable[..., Started], health: Any) -> None:
    server = start()
    server.reach("ready")
    server.write(health=health)
    assert "no good answer for" in server.reach("stalled")["detail"]
    server.write(health=200)
    server.reach("ready")


def test_a_stall_is_not_over_when_health_fails_too(start: Callable[..., Started]) -> None:
    server = start(options={"stall_after": 2.0})
    server.reach("ready")
    server.write(running=1)
    server.reach("stalled")
    server.write(health=503)
    time.sleep(1.5)
    assert server.state["phase"] == "stalled" and "moving again" not in server.told()


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
    assert "moving again" not in server.told()
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
