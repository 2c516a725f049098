# SPDX-License-Identifier: Apache-2.0
"""docker/fetch-source against a local repository that stands in for upstream."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=tests", "-c", "user.email=tests@localhost", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Upstream:
    url: str
    commits: tuple[str, ...]
    tag: str


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    """Three commits on a branch, an annotated tag on the second."""
    folder = tmp_path / "upstream"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    commits = []
    for number in range(3):
        (folder / "file.txt").write_text(f"{number}\n")
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "-m", f"commit {number}")
        commits.append(git(folder, "rev-parse", "HEAD").strip())
    git(folder, "tag", "-a", "v1", "-m", "tag", commits[1])
    return Upstream(f"file://{folder}", tuple(commits), git(folder, "rev-parse", "v1").strip())


@pytest.mark.parametrize("which", [0, 1, 2])
def test_gives_exactly_the_commit(script, upstream, tmp_path, which):
    target = tmp_path / "source"
    done = script("docker/fetch-source", upstream.url, upstream.commits[which], target)
    assert done.returncode == 0, done.stderr
    assert (target / "file.txt").read_text() == f"{which}\n"
    assert git(target, "rev-parse", "HEAD").strip() == upstream.commits[which]
    assert git(target, "rev-list", "--count", "HEAD").strip() == "1"


def test_refuses_a_commit_that_upstream_does_not_have(script, upstream, tmp_path):
    wrong = upstream.commits[1][:-1] + ("0" if upstream.commits[1][-1] != "0" else "1")
    target = tmp_path / "source"
    done = script("docker/fetch-source", upstream.url, wrong, target)
    assert done.returncode != 0
    assert wrong in done.stderr
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("name", ["main", "v1", "HEAD", "abc123", "", "g" * 40, "A" * 40, "--upload-pack=touch x"])
def test_refuses_anything_but_a_full_name(script, upstream, tmp_path, name):
    done = script("docker/fetch-source", upstream.url, name, tmp_path / "source")
    assert done.returncode == 1
    assert "40" in done.stderr
    assert not (tmp_path / "source").exists()


def test_refuses_a_tag_object_of_that_name(script, upstream, tmp_path):
    done = script("docker/fetch-source", upstream.url, upstream.tag, tmp_path / "source")
    assert done.returncode != 0
    assert list((tmp_path / "source").iterdir()) == []


def test_refuses_a_folder_with_content(script, upstream, tmp_path):
    target = tmp_path / "source"
    target.mkdir()
    (target / "mine").write_text("kept")
    done = script("docker/fetch-source", upstream.url, upstream.commits[0], target)
    assert done.returncode == 1
    assert (target / "mine").read_text() == "kept"


def test_refuses_an_upstream_that_is_not_there(script, tmp_path):
    done = script("docker/fetch-source", f"file://{tmp_path}/nothing", "0" * 40, tmp_path / "source")
    assert done.returncode != 0


def test_the_users_git_configuration_does_not_change_the_tree(script, upstream, tmp_path):
    (tmp_path / ".gitconfig").write_text("[core]\n\tautocrlf = true\n[init]\n\tdefaultBranch = x\n")
    target = tmp_path / "source"
    done = script("docker/fetch-source", upstream.url, upstream.commits[2], target, env={"HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert (target / "file.txt").read_bytes() == b"2\n"
