# SPDX-License-Identifier: Apache-2.0
"""docker/entrypoint with a stand-in for the dispatcher: arguments, home, name, MAX_JOBS."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from image_tools import ROOT

STAND_IN = """#!/bin/sh
printf '%s\\0' "$#" "$@"
exec env -0
"""
UNKNOWN = 51234


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user reaches, with the script, the stand-in and a place for temporary files."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        (place / "environment/bin").mkdir(parents=True)
        (place / "environment/bin/aeon-ddtree").write_text(STAND_IN)
        (place / "environment/bin/aeon-ddtree").chmod(0o755)
        shutil.copy(ROOT / "docker/entrypoint", place)
        (place / "tmp").mkdir()
        (place / "tmp").chmod(0o1777)
        yield place


@pytest.fixture
def start(folder):
    """start(*arguments, uid=None, **environment) -> (the arguments, the environment) that the stand-in saw."""

    def call(*arguments: str, uid: int | None = None, path: str = "/usr/bin:/bin", **env: str):
        command = ["sh", str(folder / "entrypoint"), *arguments]
        if uid is not None:
            command = ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", *command]
        base = {"PATH": path, "AEON_VENV": str(folder / "environment"), "HOME": str(folder), "TMPDIR": f"{folder}/tmp"}
        done = subprocess.run(command, capture_output=True, text=True, env={**base, **env}, check=True)
        count, *rest = done.stdout.rstrip("\0").split("\0")
        return rest[: int(count)], dict(line.partition("=")[::2] for line in rest[int(count) :])

    return call


ARGUMENTS = [
    ["ddtree", "--recipe", "x y", "--", '--speculative-config={"a": [1, "b c"]}'],
    ["bash", "-c", "echo 'hi $HOME'; exit 3"],
    ["list"],
    [],
    ["", "*", "a\nb", "\\n", "--"],
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_pass_unchanged(start, arguments):
    assert start(*arguments)[0] == arguments


def test_a_known_user_with_a_home_is_left_alone(start, folder):
    seen = start("ddtree")[1]
    assert seen["HOME"] == str(folder)
    assert not {"LD_PRELOAD", "NSS_WRAPPER_PASSWD", "MAX_JOBS", "USER"} & set(seen)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv here")
def test_a_user_without_a_name_gets_one_and_a_home(start, folder):
    seen = start("ddtree", uid=UNKNOWN, HOME="/")[1]
    assert seen["HOME"] == str(folder / f"tmp/aeon-home-{UNKNOWN}")
    assert Path(seen["HOME"]).stat().st_uid == UNKNOWN
    assert seen["USER"] == seen["LOGNAME"] == "aeon"
    if "LD_PRELOAD" in seen:  # where nss_wrapper is installed, as it is in the images
        last = Path(seen["NSS_WRAPPER_PASSWD"]).read_text().splitlines()[-1]
        assert last.split(":")[:4] == ["aeon", "x", str(UNKNOWN), str(UNKNOWN)]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv here")
def test_calls_of_a_user_without_a_name_share_one_private_folder(start, folder):
    first = start("ddtree", uid=UNKNOWN)[1]
    names = folder / f"tmp/aeon-names-{UNKNOWN}"
    assert first["NSS_WRAPPER_PASSWD"] == str(names / "passwd")
    before = (names / "passwd").stat().st_ino
    with ThreadPoolExecutor(4) as pool:  # a health check beside a start and another health check
        seen = list(pool.map(lambda _: start("health", uid=UNKNOWN)[1], range(12)))
    assert {one["NSS_WRAPPER_PASSWD"] for one in seen} == {str(names / "passwd")}
    assert sorted(path.name for path in (folder / "tmp").glob("aeon-names*")) == [names.name]
    assert sorted(path.name for path in names.iterdir()) == ["group", "passwd"]
    assert (names.stat().st_uid, names.stat().st_mode & 0o777) == (UNKNOWN, 0o700)
    # replaced, not written over: whoever reads it meanwhile sees a whole file
    assert (names / "passwd").stat().st_ino != before
    assert (names / "passwd").read_text().splitlines()[-1].startswith(f"aeon:x:{UNKNOWN}:")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv here")
@pytest.mark.parametrize("kind", ["another user's folder", "link"])
def test_a_folder_for_names_that_is_not_ours_is_not_used(start, folder, kind):
    names, theirs = folder / f"tmp/aeon-names-{UNKNOWN}", folder / "theirs"
    (names if kind != "link" else theirs).mkdir(mode=0o777)
    if kind == "link":
        os.chown(theirs, UNKNOWN, UNKNOWN)
        names.symlink_to(theirs)
    seen = start("health", uid=UNKNOWN)[1]
    assert not {"LD_PRELOAD", "NSS_WRAPPER_PASSWD"} & set(seen)
    assert seen["USER"] == "aeon"
    assert not list(names.iterdir())


def test_jobs_at_run_time_come_from_the_images_program(start, folder):
    programs = folder / "programs"
    programs.mkdir()
    shutil.copy(ROOT / "docker/max-jobs", programs)
    path = f"{programs}:/usr/bin:/bin"
    assert int(start("ddtree", path=path)[1]["MAX_JOBS"]) >= 1
    assert start("ddtree", path=path, MAX_JOBS="5")[1]["MAX_JOBS"] == "5"


def test_exit_code_and_signals_are_the_dispatchers(folder):
    (folder / "environment/bin/aeon-ddtree").write_text("#!/bin/sh\nexit 42\n")
    command = ["sh", str(folder / "entrypoint"), "list"]
    env = {"PATH": "/usr/bin:/bin", "AEON_VENV": str(folder / "environment"), "HOME": str(folder)}
    assert subprocess.run(command, env=env, check=False).returncode == 42
    (folder / "environment/bin/aeon-ddtree").write_text("#!/bin/sh\necho $$; exec sleep 60\n")
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # exec: the dispatcher is the very process that the signal reaches
        assert int(process.stdout.readline()) == process.pid
        process.terminate()
        assert process.wait(10) == -15
