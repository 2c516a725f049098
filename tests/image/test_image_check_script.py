# SPDX-License-Identifier: Apache-2.0
"""scripts/image-check notices what it is there for: run against a stand-in for docker with a made-up image."""

import hashlib
import io
import json
import os
import sys
import tarfile
from pathlib import Path

import pytest

CLIENT = """#!{python}
import json, pathlib, shutil, sys
here = pathlib.Path({folder!r})
if sys.argv[1] == "save":
    sys.stdout.buffer.write((here / "image.tar").read_bytes())
elif sys.argv[1] == "history":
    print((here / "history").read_text())
elif sys.argv[1:3] == ["image", "inspect"]:
    print((here / "inspect.json").read_text())
elif sys.argv[1] == "run":
    print('{{"base": "debian"}}')
else:
    sys.exit(9)
"""


def archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def check(script, tmp_path: Path):
    """check(layers, history) -> the finished `image-check --only leaks` for an image of these layers."""
    client = tmp_path / "docker"
    client.write_text(CLIENT.format(python=sys.executable, folder=str(tmp_path)))
    client.chmod(0o755)
    (tmp_path / "needles").write_text("index.example.invalid\n")

    def call(*layers: dict[str, bytes], history: str = "RUN true", name: str = "{}/layer.tar", base=()):
        parts = {name.format(number): archive(layer) for number, layer in enumerate(layers)}
        (tmp_path / "image.tar").write_bytes(archive(parts | {"manifest.json": b"[]"}))
        (tmp_path / "history").write_text(history)
        image = {"Config": {"Env": []}, "Size": 5, "RootFS": {"Layers": [*base]}}
        (tmp_path / "inspect.json").write_text(json.dumps([image]))
        env = {"DOCKER": str(client), "PIP_CONFIG_FILE": os.devnull}
        return script("scripts/image-check", "x", "--only", "leaks", "--needles", tmp_path / "needles", env=env)

    return call


CLEAN = {"usr/bin/tool": b"binary" * 1000, "etc/passwd": b"root:x:0:0\n"}


@pytest.mark.parametrize("name", ["{}/layer.tar", "blobs/sha256/{}"])
def test_a_clean_image_passes(check, name):
    done = check(CLEAN, {"var/lib/apt/lists/partial": b""}, name=name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in 3 files" in done.stdout


@pytest.mark.parametrize(
    "path",
    ["etc/pip.conf", "root/.config/pip/pip.conf", "root/.netrc", "root/.cache/pip/http/a", "var/lib/apt/lists/x_In"],
)
def test_a_file_of_the_builder_in_any_layer_fails(check, path):
    done = check({path: b""}, CLEAN)
    assert done.returncode == 1 and path in done.stdout


def test_deletions_and_the_base_images_own_files_pass(check, tmp_path):
    lists = {"var/lib/apt/lists/x_In": b"of the base"}
    assert check(lists, CLEAN).returncode == 1
    base = hashlib.sha256(archive(lists)).hexdigest()
    done = check(lists, {"var/lib/apt/lists/.wh.x_In": b""}, base=[f"sha256:{base}"])
    assert done.returncode == 0, done.stdout
    assert check(lists, {"root/.netrc": b""}, base=[f"sha256:{base}"]).returncode == 1


@pytest.mark.parametrize("name", ["{}/layer.tar", "blobs/sha256/{}"])
def test_a_text_of_the_builder_in_any_file_fails(check, name):
    # across the border of two reads, too
    for content in (b"url=https://index.example.invalid/simple", b"x" * ((1 << 22) - 5) + b"index.example.invalid"):
        done = check(CLEAN, {"opt/file": content}, name=name)
        assert done.returncode == 1 and "opt/file" in done.stdout


@pytest.mark.parametrize(
    "history",
    [
        "RUN pip install --index-url https://index.example.invalid/simple x",
        "ENV HF_TOKEN=hf_" + "a" * 34,
        "RUN git clone https://name:password@host.invalid/x",
        "ARG T=ghp_" + "b" * 36,
    ],
)
def test_a_secret_in_the_history_fails(check, history):
    done = check(CLEAN, history=history)
    assert done.returncode == 1 and "history" in done.stdout
