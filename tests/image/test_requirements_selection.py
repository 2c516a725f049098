# SPDX-License-Identifier: Apache-2.0
"""docker/select_requirements.py, docker/with-config and docker/build_id.py."""

import hashlib
import json

import pytest
from image_tools import ROOT

LOCK = """# a comment
alpha==1.0 ; sys_platform == 'linux' \\
    --hash=sha256:aa \\
    --hash=sha256:ab
Beta_x==2.0 \\
    --hash=sha256:ba
nvidia-cublas==13.1 \\
    --hash=sha256:ca
torch==2.11.0 \\
    --hash=sha256:da
"""


@pytest.fixture
def lock(tmp_path):
    file = tmp_path / "lock.txt"
    file.write_text(LOCK)
    return file


def test_what_is_named_goes_with_its_hashes(script, lock, tmp_path):
    (tmp_path / "without.txt").write_text("# linters\nbeta-X  # any spelling\nnot-in-the-lock\n")
    done = script("docker/select_requirements.py", lock, "--without", tmp_path / "without.txt")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        line for line in LOCK.splitlines() if not line.startswith("#") and "Beta" not in line and "ba" not in line
    ]
    assert "beta-x" in done.stderr


def test_patterns_match_whole_names(script, lock):
    done = script("docker/select_requirements.py", lock, "--without-matching", "torch|(nvidia|cuda)-.*")
    assert [line.split("==")[0] for line in done.stdout.splitlines() if "==" in line] == ["alpha", "Beta_x"]
    done = script("docker/select_requirements.py", lock, "--without-matching", "tor")
    assert "torch==2.11.0" in done.stdout


@pytest.mark.parametrize(
    "line",
    ["gamma>=1", "gamma==1.0", "-r other.txt", "--index-url https://a.invalid", "    --hash=sha256:aa", "./x.whl"],
)
def test_anything_but_a_hashed_pin_is_refused(script, tmp_path, line):
    file = tmp_path / "lock.txt"
    file.write_text(line + "\n")
    done = script("docker/select_requirements.py", file)
    assert done.returncode == 2
    assert done.stdout == "" and done.stderr.count("\n") == 1


def test_the_projects_locks_are_accepted(script):
    for lock, without, gone in (
        ("requirements/lock.txt", "docker/cpu-without.txt", ("mypy", "triton")),
        ("docker/gpu-lock.txt", "docker/gpu-build-only.txt", ("cmake",)),
    ):
        done = script("docker/select_requirements.py", ROOT / lock, "--without", ROOT / without)
        assert done.returncode == 0, done.stderr
        names = {line.split("==")[0] for line in done.stdout.splitlines() if "==" in line}
        assert "torch" in names and not names & set(gone)


def test_secrets_become_variables_for_one_command(script, tmp_path):
    for name in ("pipconf", "ca", "netrc", "aptconf"):
        (tmp_path / name).write_text("content\n")
    done = script("docker/with-config", "env", env={"BUILD_SECRETS": str(tmp_path)})
    got = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    for variable, name in {
        "PIP_CONFIG_FILE": "pipconf",
        "PIP_CERT": "ca",
        "SSL_CERT_FILE": "ca",
        "GIT_SSL_CAINFO": "ca",
        "APT_CONFIG": "aptconf",
        "NETRC": "netrc",
    }.items():
        assert got[variable] == str(tmp_path / name)


def test_apt_gets_its_sources_and_certificates(script, tmp_path):
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "apt-get").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (fake / "apt-get").chmod(0o755)
    env = {"PATH": f"{fake}:/usr/bin:/bin", "BUILD_SECRETS": str(tmp_path)}
    plain = script("docker/with-config", "apt-get", "install", "a b", env=env)
    assert plain.stdout == "install\na b\n"
    (tmp_path / "aptsources").write_text("deb x y z\n")
    (tmp_path / "ca").write_text("pem\n")
    said = script("docker/with-config", "apt-get", "update", env=env).stdout
    assert f"Dir::Etc::sourcelist={tmp_path}/aptsources" in said
    assert f"Acquire::https::CaInfo={tmp_path}/ca" in said
    assert said.endswith("update\n")


def test_empty_secrets_count_as_absent_and_exit_codes_pass(script, tmp_path):
    (tmp_path / "pipconf").write_text("")
    env = {"BUILD_SECRETS": str(tmp_path), "PIP_CONFIG_FILE": "mine"}
    done = script("docker/with-config", "sh", "-c", 'echo "$PIP_CONFIG_FILE"; exit 7', env=env)
    assert (done.returncode, done.stdout) == (7, "mine\n")
    assert script("docker/with-config").returncode == 2


def build_id(script, out, *arguments):
    done = script("docker/build_id.py", "--flavour", "cpu", "--out", out, *arguments)
    assert done.returncode == 0, done.stderr
    return (out / "build-id").read_text().strip()


def test_equal_inputs_give_equal_build_ids(script, tmp_path):
    patches = tmp_path / "patches"
    patches.mkdir()
    (patches / "series").write_text("0001-a.patch # first\n\n")
    (patches / "0001-a.patch").write_text("content\n")
    facts = ("--fact", "revision=0123456789abcdef", "--fact", "base=x=y", "--patches", patches)
    first = build_id(script, tmp_path / "one", *facts)
    assert len(first) == 16 and first == build_id(script, tmp_path / "two", *facts)
    build = json.loads((tmp_path / "one/build.json").read_text())
    assert build["base"] == "x=y"
    assert build["patches"] == {"0001-a.patch": hashlib.sha256(b"content\n").hexdigest()}
    banner = (tmp_path / "one/banner").read_text()
    assert first in banner and "0123456789ab" in banner and "1 patches" in banner and "production:" in banner
    (patches / "0001-a.patch").write_text("changed\n")
    assert build_id(script, tmp_path / "three", *facts) != first


def test_a_series_that_names_a_missing_patch_has_no_build_id(script, tmp_path):
    (tmp_path / "series").write_text("0001-a.patch\n")
    done = script("docker/build_id.py", "--flavour", "cpu", "--out", tmp_path / "out", "--patches", tmp_path)
    assert done.returncode == 1 and "0001-a.patch" in done.stderr
