# SPDX-License-Identifier: Apache-2.0
# What CI builds and pushes: `docker buildx bake gpu` and `docker buildx bake cpu`; `scripts/bake-print` shows what that means.
# Versions and digests have their one place at the top of the Dockerfile. Expressions are kept to names in strings, so
# that the file can be evaluated without buildx too.

variable "REGISTRY" { default = "ghcr.io/aeon-ddtree" }
variable "TAG" { default = "dev" }
variable "REVISION" { default = "unknown" }
variable "CREATED" { default = "1970-01-01T00:00:00Z" }
variable "VERSION" { default = "0.1.0" }
variable "SOURCE_URL" { default = "" }
# Empty: docker/max-jobs computes it from memory and cores.
variable "MAX_JOBS" { default = "" }
# PyTorch's index of CPU wheels; empty: torch as requirements/lock.txt has it, with its CUDA libraries, about 4 GB more.
variable "TORCH_INDEX_URL" { default = "" }
# The builder's own package configuration, as files; empty files count as none.
variable "PIP_CONF" { default = "/dev/null" }
variable "CA_CERTS" { default = "/dev/null" }
variable "APT_CONF" { default = "/dev/null" }
variable "APT_SOURCES" { default = "/dev/null" }

group "default" {
  targets = ["cpu"]
}

# In CI, metadata-action defines this target: its tags and labels then come after, and replace, those below.
target "docker-metadata-action" {}

target "_common" {
  context    = "."
  dockerfile = "Dockerfile"
  args = {
    REVISION   = "${REVISION}"
    CREATED    = "${CREATED}"
    VERSION    = "${VERSION}"
    SOURCE_URL = "${SOURCE_URL}"
  }
  secret = [
    "id=pipconf,src=${PIP_CONF}",
    "id=ca,src=${CA_CERTS}",
    "id=aptconf,src=${APT_CONF}",
    "id=aptsources,src=${APT_SOURCES}",
  ]
  attest = [
    "type=provenance,mode=max",
    "type=sbom",
  ]
}

target "gpu-tags" {
  tags = ["${REGISTRY}/aeon-ddtree:${TAG}"]
}

# vLLM from the pinned commit with the patches, for GB10. The Spark is arm64; an amd64 build serves other sm_12x machines.
target "gpu" {
  inherits  = ["_common", "gpu-tags", "docker-metadata-action"]
  target    = "gate"
  platforms = ["linux/arm64"]
  args = {
    MAX_JOBS = "${MAX_JOBS}"
  }
}

target "cpu-tags" {
  tags = ["${REGISTRY}/aeon-ddtree-cpu:${TAG}"]
}

# Serves the embedded pair and runs the tests, anywhere.
target "cpu" {
  inherits  = ["_common", "cpu-tags", "docker-metadata-action"]
  target    = "cpu-test"
  platforms = ["linux/amd64", "linux/arm64"]
  args = {
    TORCH_INDEX_URL = "${TORCH_INDEX_URL}"
  }
}
