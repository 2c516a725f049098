# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile, read: versions at the top, secrets nowhere, every script there, agreement with the locks."""

import fnmatch
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_tools import ROOT

GPU_STAGES = ["base", "vllm-source", "vllm-build", "gpu-env", "runtime", "gate"]
CPU_STAGES = ["cpu-base", "cpu-build", "cpu-runtime", "cpu-test"]
STAGES = GPU_STAGES + CPU_STAGES
PRIVATE = r"(?i)(password|passwd|token|secret|api_?key|credential|PIP_|INDEX_URL=.|_CERT|proxy)"
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def instructions(text: str) -> list[tuple[str, str]]:
    """(INSTRUCTION, its text with continuation lines joined), without comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = []
    for line in joined.splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            found.append((word, rest.strip()))
    return found


ALL = instructions(TEXT)
FIRST_STAGE = next(i for i, (word, _) in enumerate(ALL) if word == "FROM")
TOP = dict(rest.partition("=")[::2] for word, rest in ALL[:FIRST_STAGE] if word == "ARG")


def stages() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for word, rest in ALL[FIRST_STAGE:]:
        if word == "FROM":
            found[re.fullmatch(r"(\S+) AS (\S+)", rest)[2]] = []
        list(found.values())[-1].append((word, rest))
    return found


def test_only_arguments_stand_before_the_first_stage():
    assert {word for word, _ in ALL[:FIRST_STAGE]} == {"ARG"}
    assert list(stages()) == STAGES


def test_every_base_image_is_an_argument_with_a_digest_or_a_stage():
    bases = [re.fullmatch(r"(\S+) AS \S+", rest)[1] for word, rest in ALL if word == "FROM"]
    for base in bases:
        if match := re.fullmatch(r"\$\{(\w+)\}", base):
            assert re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", TOP[match[1]]), match[1]
        else:
            assert base in STAGES
    assert TOP["CUDA_DEVEL_IMAGE"].split("@")[0].startswith("nvidia/cuda:13.0.")
    assert "24.04" in TOP["CUDA_BASE_IMAGE"] and "24.04" in TOP["CPU_IMAGE"]


def test_versions_stand_at_the_top_and_only_there():
    assert TOP["VLLM_COMMIT"] == "f6490a28413526adefae8dd7af32906d060e0436"
    assert TOP["VLLM_VERSION"].endswith(f"+g{TOP['VLLM_COMMIT'][:9]}")
    assert TOP["TORCH_CUDA_ARCH_LIST"] == "12.1a" and TOP["CUBIN_ARCH"] == "sm_121"
    for word, rest in ALL[FIRST_STAGE:]:
        if word == "ARG" and "=" in rest:
            assert rest == "MAX_JOBS=", "an argument with a default belongs to the top"
        if word == "ARG" and "=" not in rest:
            assert rest in TOP
        if word in ("RUN", "COPY"):
            assert not re.search(r"[^\w.][0-9]+\.[0-9]+\.[0-9]+|sha256:|[0-9a-f]{40}|==", rest), rest


def test_each_stage_asks_for_the_arguments_it_uses():
    inherited = {"gate": "runtime", "cpu-test": "cpu-runtime", "cpu-runtime": "cpu-base", "cpu-build": "cpu-base"}
    for name, content in stages().items():
        asked = {rest.split("=")[0] for word, rest in content if word == "ARG"}
        set_here = {match for word, rest in content if word == "ENV" for match in re.findall(r"(\w+)=", rest)}
        assert not inherited.get(name) or inherited[name] in STAGES
        for word, rest in content:
            for used in re.findall(r"\$\{(\w+)\}", rest) if word != "FROM" else ():
                assert used in asked | set_here, f"{name} uses {used}"


def test_secrets_are_mounted_for_one_command_and_never_copied():
    for word, rest in ALL:
        if word in ("ARG", "ENV", "LABEL"):
            assert not re.search(PRIVATE, rest), rest
        if word in ("COPY", "ADD"):
            assert not re.search(r"(?i)(pip\.conf|\.crt|\.pem|netrc|\.docker)", rest), rest
    for mount in re.findall(r"--mount=type=secret,\S+", TEXT):
        assert re.fullmatch(r"--mount=type=secret,id=(pipconf|ca|aptconf|aptsources|netrc)", mount), mount
    assert "ADD" not in {word for word, _ in ALL}


def test_every_command_that_reaches_the_network_gets_the_builders_configuration():
    for word, rest in ALL:
        if word == "RUN" and re.search(r"apt-install|install-cpu|install-gpu|fetch-source|build-vllm", rest):
            assert "--mount=type=secret,id=ca" in rest, rest
        if word == "RUN" and " pip " in rest and "uninstall" not in rest:
            assert "--no-index" in rest, rest


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps `path` out; the last line that fits wins, as in Docker."""
    out = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        keep, pattern = pattern.startswith("!"), pattern.removeprefix("!")
        parts = path.split("/")
        prefixes = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
        tail = pattern.removeprefix("**/")
        anywhere = tail != pattern and any(fnmatch.fnmatch(part, tail) for part in parts)
        if anywhere or any(fnmatch.fnmatch(prefix, pattern) for prefix in prefixes):
            out = not keep
    return out


def sources() -> Iterator[str]:
    for word, rest in ALL:
        if word == "COPY" and "--from=" not in rest:
            yield from (part for part in rest.split()[:-1] if "$" not in part)
        yield from re.findall(r"type=bind,source=([^,\s]+)", rest)


def test_every_file_that_a_stage_takes_exists_and_reaches_the_builder():
    taken = set(sources())
    assert {"docker/with-config", "docker/fetch-source", "docker/gate.py", "patches", "scripts/apply_patches"} <= taken
    for path in taken - {"."}:
        assert (ROOT / path).exists(), path
        assert not ignored(path), path
    for path in (TOP["TORCH_CPU_REQUIREMENTS"], "setup.py", "aeon_ddtree/__init__.py", "recipes/proving-ground.yaml"):
        assert (ROOT / path).exists() and not ignored(path)
    for path in (".git/config", ".venv/bin/python", "pip.conf", "anything-new", "aeon_ddtree/__pycache__/x.pyc"):
        assert ignored(path), path


def test_scripts_that_stages_call_are_executable():
    for path in (ROOT / "docker").iterdir():
        if path.is_file() and path.read_bytes()[:2] == b"#!":
            assert path.stat().st_mode & 0o111, path
    for called in set(re.findall(r"/(?:src|run)/docker/([\w.-]+)", TEXT)):
        assert (ROOT / "docker" / called).is_file() or called == "torch-cpu.txt", called


@pytest.mark.parametrize(
    "name, recipe, start_period", [("runtime", "qwen36-27b-xs", 480), ("cpu-runtime", "proving-ground", 60)]
)
def test_what_the_images_start(name, recipe, start_period):
    content = stages()[name]
    said = dict(content)
    assert json.loads(said["ENTRYPOINT"]) == ["tini", "--", "aeon-ddtree"]
    assert json.loads(said["CMD"]) == ["ddtree"]
    assert f"DDTREE_RECIPE={recipe}" in said["ENV"]
    assert (ROOT / f"recipes/{recipe}.yaml").is_file()
    check = said["HEALTHCHECK"]
    assert json.loads(check[check.index("[") :]) == ["aeon-ddtree", "health"]
    assert int(re.search(r"--start-period=(\d+)s", check)[1]) >= start_period
    assert said["USER"] == "${UID}" and int(TOP["UID"]) > 0
    assert "aeon-ddtree.production=" in said["LABEL"] and "aeon-ddtree.commit-policy=" in said["LABEL"]
    last = stages()[{"runtime": "gate", "cpu-runtime": "cpu-test"}[name]]
    assert [rest for word, rest in last if word == "USER"][-1] == "${UID}"


def pins(file: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([^\s;\\]+)", file.read_text(encoding="utf-8"), re.MULTILINE):
        found.setdefault(name, set()).add(version)
    return found


def test_versions_agree_with_the_locks():
    gpu, cpu = pins(ROOT / "docker/gpu-lock.txt"), pins(ROOT / "requirements/lock.txt")
    assert gpu["flashinfer-python"] == gpu["flashinfer-cubin"] == {TOP["FLASHINFER_VERSION"]}
    assert TOP["FLASHINFER_VERSION"] in TOP["FLASHINFER_JIT_CACHE_URL"]
    assert "vllm" not in gpu, "vLLM is built from source"
    for name in ("torch", "torchvision", "triton", "transformers"):
        assert gpu[name] == cpu[name]
    small = pins(ROOT / "docker/torch-cpu.txt")
    for name, versions in small.items():
        assert {version.partition("+")[0] for version in versions} == cpu[name]
    # what is left out must be a name of the lock, or a linter that is not in it yet
    for name in (ROOT / "docker/gpu-build-only.txt").read_text().split("\n"):
        assert not name or name.startswith("#") or name in gpu, name
