# SPDX-License-Identifier: Apache-2.0
"""`aeon-ddtree download` against a hub on this machine; in processes of its own, as variables are read at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hub_server import COMMIT, Hub, serving

REPOSITORY = "org/small-model"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights" * 1000,
    "pytorch_model.bin": b"the same weights" * 1000,
    "original/consolidated.00.pth": b"and again",
    "tokenizer.json": b"[]",
}
READ = ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture
def hub():
    hub = Hub(REPOSITORY, dict(FILES))
    with serving(hub):
        yield hub


def download(hub, tmp_path, *arguments, **environ):
    for name in [name for name in os.environ if name.startswith(("HF_", "DDTREE_", "HUGGINGFACE_"))]:
        environ.setdefault(name, "")
    set_up = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
    given = {name: value for name, value in (os.environ | set_up | environ).items() if value != ""}
    command = [sys.executable, "-m", "aeon_entrypoints", "download", *map(str, arguments)]
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=120)


def assert_refused(done, *parts):
    assert done.returncode == 2, done.stdout + done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("aeon-ddtree: ") and "Traceback" not in done.stderr, done.stderr
    for part in parts:
        assert part in line, line


def names(folder: Path) -> list[str]:
    found = (file for file in folder.rglob("*") if file.is_file() and ".cache" not in file.parts)
    return sorted(str(file.relative_to(folder)) for file in found)


def test_into_the_cache_and_only_once(hub, tmp_path):
    done = download(hub, tmp_path, REPOSITORY)
    assert done.returncode == 0, done.stderr
    snapshot = tmp_path / "home" / "hub" / "models--org--small-model" / "snapshots" / COMMIT
    assert done.stdout.strip() == f"--model {snapshot}"
    assert names(snapshot) == READ
    assert f"at {COMMIT}: 3 files" in done.stderr
    before = len([request for request in hub.requests if request.startswith("GET /org/")])
    assert before == 3
    again = download(hub, tmp_path, REPOSITORY)
    assert again.returncode == 0 and "complete already" in again.stderr
    assert len([request for request in hub.requests if request.startswith("GET /org/")]) == before


def test_into_a_folder(hub, tmp_path):
    done = download(hub, tmp_path, REPOSITORY, "--to", tmp_path / "models", "--revision", "v1")
    assert done.stdout.strip() == f"--model {tmp_path / 'models' / 'small-model'}", done.stderr
    assert names(tmp_path / "models" / "small-model") == READ
    assert (tmp_path / "models" / "small-model" / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def recipe(tmp_path, **content):
    file = tmp_path / "recipe.yaml"
    base = {"recipe_version": 1, "name": "r", "description": "made up", "modes": {"baseline": {}}}
    file.write_text(yaml.safe_dump(base | content))
    return file


def test_a_recipe_gives_revisions_and_the_names_of_its_folders(hub, tmp_path):
    """Mounting what --to gave as /models is all that is left to do."""
    file = recipe(
        tmp_path, model="/models/target", drafter=REPOSITORY, drafter_revision=COMMIT,
        sources={"model": f"{REPOSITORY}@v1"},
    )  # fmt: skip
    done = download(hub, tmp_path, "--recipe", file, "--to", tmp_path / "models")
    assert done.returncode == 0, done.stderr
    folders = {"--model": tmp_path / "models" / "target", "--drafter": tmp_path / "models" / "small-model"}
    assert done.stdout.split() == [str(part) for pair in folders.items() for part in pair]
    for folder in folders.values():
        assert names(folder) == READ
    asked = [
        request.partition("/revision/")[2].partition("?")[0] for request in hub.requests if "/revision/" in request
    ]
    assert {"v1", COMMIT} <= set(asked)


def test_what_no_hub_has_is_said(hub, tmp_path):
    done = download(hub, tmp_path, "--recipe", "proving-ground")
    assert done.returncode == 0 and done.stderr.count("nothing to download") == 2, done.stderr
    assert_refused(download(hub, tmp_path, "--recipe", recipe(tmp_path, model="/models/a")), "sources")


def test_a_token_is_sent(hub, tmp_path):
    hub.token = "secret"
    assert_refused(download(hub, tmp_path, REPOSITORY), REPOSITORY, "HF_TOKEN is not set")
    refused = download(hub, tmp_path, REPOSITORY, HF_TOKEN="wrong")
    assert_refused(refused, "HF_TOKEN is not for it")
    assert "wrong" not in refused.stderr
    assert download(hub, tmp_path, REPOSITORY, HF_TOKEN="secret").returncode == 0


def test_offline_serves_from_the_cache_alone(hub, tmp_path):
    refused = download(hub, tmp_path, REPOSITORY, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path / "other"))
    assert_refused(refused, str(tmp_path / "other"), "HF_HUB_OFFLINE")
    assert hub.requests == []
    assert download(hub, tmp_path, REPOSITORY, HF_HUB_CACHE=str(tmp_path / "other")).returncode == 0
    hub.requests.clear()
    done = download(hub, tmp_path, REPOSITORY, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path / "other"))
    assert done.returncode == 0 and COMMIT in done.stdout and hub.requests == []


REFUSALS = [
    (["org/other"], None, ["org/other does not exist"]),
    ([REPOSITORY, "--revision", "v9"], None, ["no revision v9"]),
    ([f"{REPOSITORY}@v9"], None, ["no revision v9"]),
    ([REPOSITORY], (403, "GatedRepo"), ["licence", "HF_TOKEN"]),
    ([REPOSITORY], (403, ""), ["answered 403", "HF_TOKEN"]),
    ([REPOSITORY], (500, ""), ["answered 500", "try again later"]),
    (["not-a-name"], None, ["not-a-name", "ORG/NAME"]),
    (["proving-ground"], None, ["ORG/NAME", "give --recipe proving-ground"]),
    ([REPOSITORY, "--recipe", "proving-ground"], None, ["--recipe", "leave one out"]),
    (["--revision", "v1"], None, ["--revision", "ORG/NAME"]),
    ([f"{REPOSITORY}@v1", "--revision", "v2"], None, ["v2 and v1"]),
]


@pytest.mark.parametrize(("arguments", "refuse", "parts"), REFUSALS)
def test_refusals_are_one_line(hub, tmp_path, arguments, refuse, parts):
    hub.refuse = refuse
    assert_refused(download(hub, tmp_path, *arguments), *parts)


def test_a_hub_that_cannot_be_reached(hub, tmp_path):
    done = download(hub, tmp_path, REPOSITORY, HF_ENDPOINT="http://127.0.0.1:9")
    assert_refused(done, "http://127.0.0.1:9 cannot be reached")


def test_a_file_in_the_way(hub, tmp_path):
    (tmp_path / "models").touch()
    assert_refused(download(hub, tmp_path, REPOSITORY, "--to", tmp_path / "models"), "models")


TIGHT = """
from collections import defaultdict
from aeon_entrypoints import cli
from aeon_entrypoints.preflight import Machine
machine = Machine(disk=defaultdict(lambda: (1 << 30) + ROOM))
cli.cli.main(["download", "org/small-model"], obj=machine, standalone_mode=False)
"""


@pytest.mark.parametrize("room", [5_000, 50_000])
def test_free_space_is_looked_at_first(hub, tmp_path, room):
    """7 kB wanted, and 1 GiB must stay free."""
    environ = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path), "NO_PROXY": "*"}
    command = [sys.executable, "-c", TIGHT.replace("ROOM", str(room))]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    fetched = [request for request in hub.requests if request.startswith("GET /org/")]
    if room == 5_000:
        assert f"{tmp_path}: 1.0 GiB free, expected 0.0 GiB for org/small-model and 1 to spare" in done.stderr
        assert done.returncode != 0 and not fetched
    else:
        assert done.returncode == 0 and len(fetched) == 3, done.stderr
