# SPDX-License-Identifier: Apache-2.0
"""What the workflows may do: pinned actions, least permissions, no fork near the registry or the GB10."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WORKFLOWS: dict[str, dict[Any, Any]] = {file.stem: yaml.safe_load(file.read_text("utf-8")) for file in FILES}
JOBS = [(name, job) for name, workflow in WORKFLOWS.items() for job in workflow["jobs"]]

# Jobs that may write, and what; all others read.
WRITERS = {
    ("cpu-image", "push"): {"packages"},
    ("cpu-image", "tag"): {"packages", "id-token", "attestations"},
    ("gpu-image", "publish"): {"packages", "id-token", "attestations"},
}
SELF_HOSTED = {("gpu-image", "gb10-gate")}


def job_of(name: str, job: str) -> dict[str, Any]:
    return WORKFLOWS[name]["jobs"][job]


def triggers(name: str) -> set[str]:
    # YAML reads the key `on` as true.
    return set(WORKFLOWS[name][True])


def steps(name: str, job: str) -> list[dict[str, Any]]:
    return job_of(name, job)["steps"]


def commands() -> Iterator[tuple[str, str]]:
    for name, job in JOBS:
        for step in steps(name, job):
            if "run" in step:
                yield f"{name}.{job}", step["run"]


def with_needs(name: str, job: str) -> Iterator[str]:
    """The job and all that must have succeeded before it."""
    yield job
    needs = job_of(name, job).get("needs", [])
    for each in [needs] if isinstance(needs, str) else needs:
        yield from with_needs(name, each)


def test_there_are_workflows():
    assert set(WORKFLOWS) == {"checks", "cpu-image", "gpu-image"}


def test_actions_are_pinned_by_commit_with_their_version():
    pins: dict[str, set[tuple[str, str]]] = {}
    for file in FILES:
        for line in file.read_text("utf-8").splitlines():
            if "uses:" in line:
                pin = re.fullmatch(r"\s*(?:- )?uses: ([\w./-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)", line)
                assert pin, f"{file.name}: {line.strip()}"
                pins.setdefault(pin[1], set()).add((pin[2], pin[3]))
    assert len(pins) >= 8
    assert {action: found for action, found in pins.items() if len(found) > 1} == {}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_no_trigger_hands_a_token_to_strangers(name):
    assert triggers(name) <= {"push", "pull_request", "workflow_dispatch"}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_start_without_permissions_and_one_at_a_time(name):
    assert WORKFLOWS[name]["permissions"] == {}
    assert "github.ref" in WORKFLOWS[name]["concurrency"]["group"]


@pytest.mark.parametrize(("name", "job"), JOBS)
def test_jobs_have_least_permissions(name, job):
    permissions = job_of(name, job)["permissions"]
    assert {scope for scope, level in permissions.items() if level == "write"} == WRITERS.get((name, job), set())
    assert {scope for scope, level in permissions.items() if level != "write"} <= {"contents"}
    assert set(permissions.values()) <= {"read", "write"}
    assert job_of(name, job)["timeout-minutes"] < 360


@pytest.mark.parametrize(("name", "job"), sorted({*WRITERS, *SELF_HOSTED}))
def test_what_writes_is_out_of_reach_for_forks_and_pull_requests(name, job):
    conditions = " ".join(str(job_of(name, each).get("if", "")) for each in with_needs(name, job))
    assert "!github.event.repository.fork" in conditions
    assert "pull_request" not in triggers(name) or "github.event_name != 'pull_request'" in conditions
    assert "||" not in conditions.replace("(github.ref_protected || github.ref_type == 'tag')", "")


def test_the_gate_job_is_guarded():
    own = {(name, job) for name, job in JOBS if "self-hosted" in str(job_of(name, job)["runs-on"])}
    assert own == SELF_HOSTED
    gate = job_of("gpu-image", "gb10-gate")
    assert gate["environment"] == "gb10-gate"
    assert gate["permissions"] == {}
    assert "publish" in gate["needs"]
    assert "vars.GB10_GATE == 'enabled'" in gate["if"]
    assert "github.event_name != 'pull_request'" in gate["if"]
    # It runs the published image by digest, and nothing from a checkout.
    assert not any("uses" in step for step in gate["steps"])
    assert all(step["env"]["REFERENCE"] == "${{ needs.publish.outputs.reference }}" for step in gate["steps"])


@pytest.mark.parametrize(("name", "job"), JOBS)
def test_no_checkout_leaves_credentials(name, job):
    checkouts = [step for step in steps(name, job) if step.get("uses", "").startswith("actions/checkout@")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_expressions_reach_commands_through_the_environment_alone():
    assert [where for where, command in commands() if "${{" in command] == []


@pytest.mark.parametrize("name", ["cpu-image", "gpu-image"])
def test_the_anonymous_pull_is_anonymous(name):
    job = job_of(name, "anonymous-pull")
    assert set(job["permissions"].items()) <= {("contents", "read")}
    assert not any("login" in str(step) for step in job["steps"])
    assert any("docker pull" in step.get("run", "") for step in job["steps"])


def test_scripts_that_are_called_exist():
    text = "\n".join(command for _, command in commands())
    called = set(re.findall(r"(?<![\w/])(?:\.github/)?scripts/[\w.-]+", text)) - set(re.findall(r"! -f (\S+)", text))
    assert {".github/scripts/free-space", ".github/scripts/tags-are-new", ".github/scripts/tag-digests"} <= called
    assert [path for path in sorted(called) if not os.access(ROOT / path, os.X_OK)] == []


def test_make_targets_that_are_called_exist():
    called = {target for _, command in commands() for target in re.findall(r"^make ([\w-]+)", command, re.MULTILINE)}
    assert {"setup", "lint", "test", "image-cpu", "image-check"} <= called
    for target in called:
        recipe = re.search(rf"^{target}:\n\t@(\S+)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        assert recipe and os.access(ROOT / recipe[1], os.X_OK), target


def test_bake_targets_that_are_called_exist():
    bake = (ROOT / "docker-bake.hcl").read_text("utf-8")
    for name, job in JOBS:
        for step in steps(name, job):
            if "bake-action" in step.get("uses", ""):
                assert f'target "{step["with"]["targets"]}"' in bake


@pytest.mark.parametrize(
    ("git_tag", "image_tag"),
    [
        ("qwen36-v1-m2", "qwen36-v1-m2"),
        ("qwen36-v12-m30", "qwen36-v12-m30"),
        ("qwen36-m2", None),
        ("v1.2.3", None),
    ],
)
@pytest.mark.parametrize("name", ["cpu-image", "gpu-image"])
def test_milestone_tags(name, git_tag, image_tag):
    meta = next(step for job in WORKFLOWS[name]["jobs"].values() for step in job["steps"] if step.get("id") == "meta")
    assert meta["with"]["flavor"] == "latest=false"
    pattern = re.search(r"type=match,pattern=([^,]+),", meta["with"]["tags"])
    assert pattern
    found = re.search(pattern[1], git_tag)
    assert (found and found[0]) == image_tag


def run(script: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = ROOT / ".github" / "scripts" / script
    return subprocess.run([path, *arguments], env={**os.environ, **environ}, capture_output=True, text=True)


@pytest.fixture
def registry(tmp_path):
    """A `docker` that knows the tag v1.0.0-gb10, gives indexes the digest 1…1, and writes down what was asked of it."""
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(
        f"""#!/bin/sh
echo "$*" >>{tmp_path}/calls
case "$*" in
  *create*) ;;
  *--format*) echo '{{"digest": "sha256:{"1" * 64}"}}' ;;
  *:v1.0.0-gb10) ;;
  *:v6.6.6-gb10) echo "connection refused" >&2; exit 1 ;;
  *) echo "ERROR: $4: not found" >&2; exit 1 ;;
esac
"""
    )
    docker.chmod(0o755)
    return {"PATH": f"{docker.parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("tags", "code"),
    [
        (["ghcr.io/a/b:v1.1.0-gb10", "ghcr.io/a/b:sha-1234567"], 0),
        (["ghcr.io/a/b:v1.0.0-gb10"], 1),
        (["ghcr.io/a/b:sha-1234567", "ghcr.io/a/b:v1.0.0-gb10"], 1),
        (["ghcr.io/a/b:v6.6.6-gb10"], 1),
        ([], 2),
    ],
    ids=["new", "taken", "one taken", "no answer", "none given"],
)
def test_release_tags_do_not_move(registry, tags, code):
    assert run("tags-are-new", *tags, **registry).returncode == code


def test_digests_become_one_index(registry, tmp_path):
    folder = tmp_path / "digests"
    folder.mkdir()
    for name, digit in (("amd64", "a"), ("arm64", "b")):
        (folder / name).write_text(f"sha256:{digit * 64}\n")
    out = run("tag-digests", "ghcr.io/a/b", str(folder), "ghcr.io/a/b:x", "ghcr.io/a/b:y", **registry, GITHUB_OUTPUT="")
    assert out.returncode == 0, out.stderr
    assert f"reference=ghcr.io/a/b@sha256:{'1' * 64}" in out.stdout
    created = (tmp_path / "calls").read_text().splitlines()[0]
    assert "--tag ghcr.io/a/b:x --tag ghcr.io/a/b:y" in created
    assert f"@sha256:{'a' * 64}" in created and f"@sha256:{'b' * 64}" in created
    (folder / "arm64").write_text("null\n")
    broken = run("tag-digests", "ghcr.io/a/b", str(folder), "ghcr.io/a/b:x", **registry)
    assert broken.returncode == 1 and "expected sha256" in broken.stderr


@pytest.mark.parametrize(("wanted", "code"), [("0", 0), ("999999", 1)])
def test_a_full_disk_is_found_before_the_build(wanted, code):
    assert run("free-space", wanted, RUNNER_ENVIRONMENT="").returncode == code
