# SPDX-License-Identifier: Apache-2.0
"""docker-bake.hcl, evaluated without buildx, and scripts/bake-print's own refusals."""

import importlib.machinery
import importlib.util
import json

import pytest
from image_tools import ROOT

pytest.importorskip("hcl2", reason="python-hcl2 is not installed")
loader = importlib.machinery.SourceFileLoader("bake_print", str(ROOT / "scripts/bake-print"))
bake_print = importlib.util.module_from_spec(importlib.util.spec_from_loader("bake_print", loader))
loader.exec_module(bake_print)

HCL = (ROOT / "docker-bake.hcl").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_both_images_fit_the_dockerfile():
    bake = bake_print.evaluated(HCL, ["gpu", "cpu"], {})
    bake_print.check(bake, DOCKERFILE)
    gpu, cpu = bake["target"]["gpu"], bake["target"]["cpu"]
    assert gpu["target"] == "gate" and gpu["platforms"] == ["linux/arm64"]
    assert cpu["target"] == "cpu-test" and cpu["platforms"] == ["linux/amd64", "linux/arm64"]
    assert "type=sbom" in gpu["attest"] and "type=provenance,mode=max" in cpu["attest"]
    assert "id=pipconf,src=/dev/null" in cpu["secret"]
    # versions have one place, the Dockerfile
    assert not {"VLLM_COMMIT", "CUDA_BASE_IMAGE", "FLASHINFER_VERSION"} & {*gpu["args"], *cpu["args"]}


def test_variables_come_from_the_environment():
    environ = {"TAG": "v1.2.3-gb10", "REVISION": "abc", "REGISTRY": "ghcr.io/someone", "MAX_JOBS": "3"}
    gpu = bake_print.evaluated(HCL, ["gpu"], environ)["target"]["gpu"]
    assert gpu["tags"] == ["ghcr.io/someone/aeon-ddtree:v1.2.3-gb10"]
    assert gpu["args"]["REVISION"] == "abc" and gpu["args"]["MAX_JOBS"] == "3"


def test_tags_of_metadata_action_replace_those_of_the_file():
    theirs = 'target "docker-metadata-action" {\n  tags = ["ghcr.io/a/b:v9"]\n  labels = { "x" = "y" }\n}\n'
    text = HCL.replace('target "docker-metadata-action" {}\n', theirs)
    assert text != HCL
    gpu = bake_print.evaluated(text, ["gpu"], {})["target"]["gpu"]
    assert gpu["tags"] == ["ghcr.io/a/b:v9"] and gpu["labels"] == {"x": "y"}


@pytest.mark.parametrize(
    "old, new, said",
    [
        ('"gate"', '"gates"', "gates"),
        ("MAX_JOBS = ", "MAX_JOBZ = ", "MAX_JOBZ"),
        ("${TAG}", "${TAGG}", "TAGG"),
        ("${TAG}", "${upper(TAG)}", "expression"),
        ('target "gpu-tags"', 'target "gpu_tags"', "gpu-tags"),
        ('target "cpu-tags"', 'target "gpu-tags"', "twice"),
        ('group "default" {', 'group "default" {{', "parse"),
    ],
)
def test_a_broken_file_is_refused(old, new, said):
    assert old in HCL
    with pytest.raises(bake_print.Wrong, match=said):
        bake_print.check(bake_print.evaluated(HCL.replace(old, new), ["gpu"], {}), DOCKERFILE)


def test_the_command_prints_json_and_refuses_an_unknown_target(script):
    import sys

    path = {"PATH": f"{ROOT / '.venv/bin'}:{sys.exec_prefix}/bin:/usr/bin:/bin"}
    done = script("scripts/bake-print", env=path)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["target"]) == {"gpu", "cpu"}
    done = script("scripts/bake-print", "tpu", env=path)
    assert done.returncode == 1 and "tpu" in done.stderr and done.stderr.count("\n") == 1
