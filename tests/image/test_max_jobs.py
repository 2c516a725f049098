# SPDX-License-Identifier: Apache-2.0
"""docker/max-jobs: jobs from cores and memory, for given machines."""

from pathlib import Path

import pytest

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path):
    """machine(cores, available GiB, cgroup files) -> the variables that describe it to the script."""

    def make(cores: int, available: float, cgroup: dict[str, object] | None = None) -> dict[str, str]:
        meminfo = tmp_path / "meminfo"
        meminfo.write_text(f"MemTotal: 999999999 kB\nMemFree: 1 kB\nMemAvailable: {int(available * 1048576)} kB\n")
        for name, value in (cgroup or {}).items():
            file = tmp_path / "cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{value}\n")
        return {"CORES": str(cores), "MEMINFO": str(meminfo), "CGROUP": str(tmp_path / "cgroup"), "MAX_JOBS": ""}

    return make


@pytest.mark.parametrize(
    "cores, available, jobs",
    [
        (20, 115, 18),  # a DGX Spark: 111 GiB at 6 GiB each
        (20, 300, 20),  # memory for more than there are cores
        (4, 16, 2),  # a small runner
        (16, 14, 1),
        (16, 3, 1),  # less than the reserve: still one
        (1, 64, 1),
    ],
)
def test_build_jobs(script, machine, cores, available, jobs):
    done = script("docker/max-jobs", "build", env=machine(cores, available))
    assert (done.returncode, done.stdout) == (0, f"{jobs}\n"), done.stderr


@pytest.mark.parametrize("cores, available, jobs", [(20, 115, 2), (20, 300, 6), (2, 300, 2), (20, 20, 1)])
def test_run_jobs_leave_memory_to_the_model(script, machine, cores, available, jobs):
    assert script("docker/max-jobs", "run", env=machine(cores, available)).stdout == f"{jobs}\n"


@pytest.mark.parametrize(
    "cgroup, jobs",
    [
        ({"memory.max": 24 * GIB, "memory.current": 2 * GIB}, 3),
        ({"memory.max": "max", "memory.current": 2 * GIB}, 18),
        ({"memory.max": 500 * GIB, "memory.current": 0}, 18),
        ({"memory.max": 2 * GIB, "memory.current": 3 * GIB}, 1),
        ({"memory/memory.limit_in_bytes": 28 * GIB, "memory/memory.usage_in_bytes": 0}, 4),
        ({"memory/memory.limit_in_bytes": 9223372036854771712, "memory/memory.usage_in_bytes": GIB}, 18),
    ],
)
def test_a_containers_limit_counts(script, machine, cgroup, jobs):
    assert script("docker/max-jobs", "build", env=machine(20, 115, cgroup)).stdout == f"{jobs}\n"


def test_a_given_number_wins(script, machine):
    assert script("docker/max-jobs", "build", env=machine(20, 115) | {"MAX_JOBS": "7"}).stdout == "7\n"


@pytest.mark.parametrize("given", ["0", "-1", "many", "2.5", "3 4"])
def test_a_given_number_that_is_none_is_refused(script, machine, given):
    done = script("docker/max-jobs", "build", env=machine(20, 115) | {"MAX_JOBS": given})
    assert done.returncode == 2
    assert "whole number" in done.stderr and done.stdout == ""


def test_refuses_another_purpose_and_a_machine_that_does_not_say(script, machine, tmp_path):
    assert script("docker/max-jobs", env=machine(4, 16)).returncode == 2
    (tmp_path / "empty").write_text("")
    done = script("docker/max-jobs", "build", env=machine(4, 16) | {"MEMINFO": str(tmp_path / "empty")})
    assert done.returncode == 1 and "MemAvailable" in done.stderr


def test_this_machine(script):
    done = script("docker/max-jobs", "build", env={"MAX_JOBS": ""})
    assert done.returncode == 0 and int(done.stdout) >= 1
