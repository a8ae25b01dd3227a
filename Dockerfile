# The images of all stacks: docs/concepts/images.md, docs/decisions/0005-images-from-hashes.md.
#
#   docker build --tag sparkforge/vllm:spark .                                     for a DGX Spark (linux/arm64)
#   docker build --build-arg STACK=embedded --tag sparkforge/vllm:embedded .       for a machine without a GPU
#   docker build --platform linux/arm64 --tag sparkforge/vllm:spark-arm64 .        for a Spark, on x86-64
#
# Every input has a hash: base images a digest (pins.toml), Debian packages and Python packages a sha256 (locks/).

ARG STACK=spark
# wheel: upstream's vLLM and FlashInfer's kernels for 12.1a. source: vLLM's kernels are compiled too.
ARG VLLM_FROM=wheel

# Wheels that your package index lacks: --build-context wheels=FOLDER
FROM scratch AS wheels
# Kernel packs, an OCI layout or pack.tar: --build-context packs=FOLDER
FROM scratch AS packs
# vLLM's sources for VLLM_FROM=source without git hosts, an unpacked bundle or checkouts: --build-context bundle=FOLDER
FROM scratch AS bundle

# ── The base of each device, and of each stack, for linux/arm64 and linux/amd64. locks/debian/DEVICE-… has the Debian
# packages; the locks of Python packages are for Python 3.13 (cuda) and 3.11 (cpu) ──────────────────────────────────
FROM debian:trixie-slim@sha256:a29215f6a35e51e22adffa17f89e9d2ef06214e64a2bad10d765c46aea49f11f AS base-cuda
# Variables with which kernels are compiled, and which a server needs to use them.
ENV SPARKFORGE_DEVICE=cuda \
    SPARKFORGE_PROFILE=spark \
    FLASHINFER_CUDA_ARCH_LIST=12.1a \
    FLASHINFER_MOE_SM120_DTYPES=fp8xfp4 \
    VLLM_HAS_FLASHINFER_CUBIN=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
FROM debian:bookworm-slim@sha256:3783cc01769c7b2b1b83a5c5ad96c815348e28ed7da68e2e3687004faa906251 AS base-cpu
ENV SPARKFORGE_DEVICE=cpu \
    SPARKFORGE_PROFILE=embedded

FROM base-cuda AS base-spark
FROM base-cuda AS base-spark-next
FROM base-cpu AS base-embedded

# ── The same for the machine that builds, which can have another architecture, so that nothing is compiled in emulation.
# In a native build these stages equal those above, and Docker builds them once ─────────────────────────────────────────
FROM --platform=$BUILDPLATFORM debian:trixie-slim@sha256:a29215f6a35e51e22adffa17f89e9d2ef06214e64a2bad10d765c46aea49f11f AS builder-cuda
ENV SPARKFORGE_DEVICE=cuda \
    SPARKFORGE_PROFILE=spark \
    FLASHINFER_CUDA_ARCH_LIST=12.1a \
    FLASHINFER_MOE_SM120_DTYPES=fp8xfp4 \
    VLLM_HAS_FLASHINFER_CUBIN=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
FROM --platform=$BUILDPLATFORM debian:bookworm-slim@sha256:3783cc01769c7b2b1b83a5c5ad96c815348e28ed7da68e2e3687004faa906251 AS builder-cpu
ENV SPARKFORGE_DEVICE=cpu \
    SPARKFORGE_PROFILE=embedded

FROM builder-cuda AS builder-spark
FROM builder-cuda AS builder-spark-next
FROM builder-cpu AS builder-embedded

# ── base: the base of the runtime ────────────────────────────────────────────────────────────────────────────────────
# hadolint ignore=DL3006
FROM base-${STACK} AS base
ARG DEBIAN_MIRROR=
ARG DEBIAN_SNAPSHOT=
RUN --mount=type=bind,source=locks/debian,target=/mnt/locks \
    --mount=type=bind,source=deploy/install-debs,target=/mnt/install-debs \
    --mount=type=cache,target=/var/cache/debs \
    sh /mnt/install-debs "/mnt/locks/${SPARKFORGE_DEVICE}-runtime-$(dpkg --print-architecture).txt"
# Libraries need a user name. adduser would write today's date into /etc/shadow, so the line is written by hand. Every user
# can enter /root, because Hugging Face's cache is mounted there and `docker run --user` can name another uid than 1000.
RUN echo 'spark:x:1000:1000:Sparkforge:/var/cache/sparkforge:/usr/sbin/nologin' >> /etc/passwd \
    && echo 'spark:x:1000:' >> /etc/group \
    && mkdir -p /models /root/.cache/huggingface/hub /run/sparkforge /var/cache/sparkforge \
    && chown 1000:1000 /run/sparkforge /var/cache/sparkforge \
    && chmod 1777 /run/sparkforge /var/cache/sparkforge \
    && chmod 711 /root
ARG STACK
ENV SPARKFORGE_STACK=${STACK}

# ── toolchain: ./inv with its environment, and the CUDA compiler ─────────────────────────────────────────────────────
# hadolint ignore=DL3006
FROM builder-${STACK} AS builder
ARG DEBIAN_MIRROR=
ARG DEBIAN_SNAPSHOT=
RUN --mount=type=bind,source=locks/debian,target=/mnt/locks \
    --mount=type=bind,source=deploy/install-debs,target=/mnt/install-debs \
    --mount=type=cache,target=/var/cache/debs \
    sh /mnt/install-debs "/mnt/locks/${SPARKFORGE_DEVICE}-runtime-$(dpkg --print-architecture).txt"
ARG STACK
ARG TARGETPLATFORM
ENV SPARKFORGE_STACK=${STACK} \
    SPARKFORGE_PLATFORM=${TARGETPLATFORM}

FROM builder AS tools
ARG BUILDARCH
ARG TARGETARCH
ARG DEBIAN_MIRROR
ARG DEBIAN_SNAPSHOT
RUN --mount=type=bind,source=locks/debian,target=/mnt/locks \
    --mount=type=bind,source=deploy/install-debs,target=/mnt/install-debs \
    --mount=type=cache,target=/var/cache/debs \
    [ "$BUILDARCH" = "$TARGETARCH" ] || cross=/mnt/locks/${SPARKFORGE_DEVICE}-cross-${BUILDARCH}.txt; \
    sh /mnt/install-debs "/mnt/locks/${SPARKFORGE_DEVICE}-build-${BUILDARCH}.txt" ${cross:+"$cross"}
WORKDIR /opt/sparkforge
COPY sparkforge/__init__.py sparkforge/
COPY sparkforge/core/__init__.py sparkforge/core/bootstrap.py sparkforge/core/errors.py sparkforge/core/installers.py sparkforge/core/installers.toml sparkforge/core/
COPY locks/tools.txt locks/
COPY deploy/with-ca deploy/
ENV UV_LINK_MODE=copy
RUN --mount=type=cache,target=/root/.cache,sharing=locked \
    --mount=type=secret,id=ca,required=false \
    deploy/with-ca python3 -B -m sparkforge.core.bootstrap /opt/sparkforge
COPY pins.toml pyproject.toml ./
COPY locks/*.txt locks/*.toml locks/
COPY patches/ patches/
COPY sparkforge/ sparkforge/
COPY spark_mxfp4/pyproject.toml spark_mxfp4/

FROM tools AS toolchain
RUN --mount=type=cache,target=/root/.cache,sharing=locked \
    --mount=type=secret,id=ca,required=false \
    deploy/with-ca .venv/bin/python -m sparkforge.image.rootfs toolchain --stack "$SPARKFORGE_STACK" --platform "$SPARKFORGE_PLATFORM"

# ── sources and patches: the tree at /opt/venv, from its lock, with patched wheels ───────────────────────────────────
FROM toolchain AS sources
RUN --mount=type=cache,target=/root/.cache,sharing=locked \
    --mount=type=bind,from=wheels,target=/mnt/wheels \
    --mount=type=secret,id=ca,required=false \
    PIP_FIND_LINKS=/mnt/wheels deploy/with-ca .venv/bin/python -m sparkforge.image.rootfs install --stack "$SPARKFORGE_STACK" --platform "$SPARKFORGE_PLATFORM"

# ── kernels: FlashInfer's modules for gpt-oss, compiled here because nobody publishes them for 12.1a ─────────────────
FROM sources AS kernels
ARG JOBS=auto
# `trial` is one small module, to test the build in a minute; the image compiles the other modules when it starts.
ARG KERNEL_SET=
# A registry's repository with kernel packs; modules without a pack are compiled. trust.toml defines which packs are accepted.
ARG KERNEL_PACKS=
COPY pins.toml trust.tom[l] ./
RUN --mount=type=cache,target=/root/.cache,sharing=locked \
    --mount=type=bind,from=packs,target=/mnt/packs \
    --mount=type=bind,from=wheels,target=/mnt/wheels \
    --mount=type=secret,id=ca,required=false \
    --mount=type=secret,id=signing-key,required=false \
    PIP_FIND_LINKS=/mnt/wheels SPARKFORGE_PACKS="${KERNEL_PACKS:-/mnt/packs}" deploy/with-ca .venv/bin/python -m sparkforge.image.rootfs kernels \
        --stack "$SPARKFORGE_STACK" --platform "$SPARKFORGE_PLATFORM" --set "$KERNEL_SET" --jobs "$JOBS"
# The modules as a pack, for the next build: --target kernel-packs --output .sparkforge/packs --secret id=signing-key,src=KEY.pem
FROM scratch AS kernel-packs
COPY --from=kernels /kernels/packs/ /

# ── vllm: upstream's wheel unchanged, or with compiled kernels ───────────────────────────────────────────────────────
FROM kernels AS vllm-wheel
FROM kernels AS vllm-source
ARG BUILDARCH
ARG DEBIAN_MIRROR
ARG DEBIAN_SNAPSHOT
RUN --mount=type=bind,source=locks/debian,target=/mnt/locks \
    --mount=type=bind,source=deploy/install-debs,target=/mnt/install-debs \
    --mount=type=cache,target=/var/cache/debs \
    sh /mnt/install-debs "/mnt/locks/${SPARKFORGE_DEVICE}-source-${BUILDARCH}.txt"
ARG JOBS=auto
# CMake targets, comma-separated, for trials; empty: all that SM121 uses (docs/concepts/vllm-extensions.md).
ARG VLLM_TARGETS=
RUN --mount=type=cache,target=/root/.cache,sharing=locked \
    --mount=type=bind,from=bundle,target=/mnt/bundle \
    --mount=type=secret,id=ca,required=false \
    deploy/with-ca .venv/bin/python -m sparkforge.image.rootfs vllm --stack "$SPARKFORGE_STACK" --platform "$SPARKFORGE_PLATFORM" --jobs "$JOBS" \
        --sources /mnt/bundle --targets "$VLLM_TARGETS"
# hadolint ignore=DL3006
FROM vllm-${VLLM_FROM} AS vllm

# ── audit: the runtime is copied from this stage, so a failure here means no image ───────────────────────────────────
FROM vllm AS audit
ARG JOBS=auto
COPY deploy/trim.toml deploy/licences.toml /opt/sparkforge/deploy/
COPY deploy/licences/ /opt/sparkforge/deploy/licences/
RUN --mount=type=bind,from=base,target=/mnt/base \
    .venv/bin/python -m sparkforge.image.rootfs finish --stack "$SPARKFORGE_STACK" --platform "$SPARKFORGE_PLATFORM" --jobs "$JOBS" \
    && .venv/bin/python -m sparkforge.image.rootfs verify --stack "$SPARKFORGE_STACK" --platform "$SPARKFORGE_PLATFORM" --debian /mnt/base

# ── project: our own files, with modes and times that do not depend on the checkout ──────────────────────────────────
# packages/ contains only our Python packages; pins, locks and patches are beside it.
FROM builder AS project
ARG SOURCE_DATE_EPOCH=0
WORKDIR /opt/sparkforge
COPY pins.toml pyproject.toml LICENSE ./
COPY deploy/start deploy/bench deploy/
COPY locks/patched.toml locks/
COPY patches/ patches/
COPY sparkforge/ packages/sparkforge/
COPY spark_mxfp4/src/spark_mxfp4/ packages/spark_mxfp4/
COPY validate/ packages/validate/
COPY --from=audit /opt/image.json /opt/audit.json /opt/sbom.json ./
# The commit, from the argument or from git in the context, and a digest of the context: docs/concepts/images.md.
ARG REVISION=
RUN --mount=type=bind,target=/mnt/context \
    sh /mnt/context/deploy/describe-source /mnt/context "$REVISION" > source.json
RUN chmod -R u=rwX,go=rX . \
    && sed -n 's/^  "key": "\(.*\)",$/\1/p' image.json > key \
    && test -s key \
    && PYTHONHASHSEED=0 python3 -m compileall -q -j 1 --invalidation-mode unchecked-hash . \
    && find . -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +

# ── runtime ──────────────────────────────────────────────────────────────────────────────────────────────────────────
FROM base AS runtime
COPY --from=audit /opt/venv /opt/venv
COPY --from=project /opt/sparkforge /opt/sparkforge
WORKDIR /opt/sparkforge
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/var/cache/sparkforge \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONPATH=/opt/sparkforge/packages \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    SPARKFORGE_ROOT=/opt/sparkforge \
    SPARKFORGE_RUN=/run/sparkforge
VOLUME ["/var/cache/sparkforge"]
EXPOSE 8000
USER 1000:1000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=10s --start-period=30m --retries=3 \
    CMD ["/opt/venv/bin/python", "-S", "-m", "sparkforge.serve.health"]
ENTRYPOINT ["/usr/bin/tini", "--", "/opt/sparkforge/deploy/start"]

ARG REVISION=
LABEL org.opencontainers.image.title="Sparkforge" \
      org.opencontainers.image.description="vLLM with gpt-oss in MXFP4 for NVIDIA DGX Spark" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION:-unknown; BUILDX_GIT_LABELS=1 in the environment (Compose: or .env) names the commit here, source.json has it in the image}" \
      org.sparkforge.stack="${SPARKFORGE_STACK}" \
      org.sparkforge.source="/opt/sparkforge/source.json" \
      org.sparkforge.manifest="/opt/sparkforge/image.json" \
      org.sparkforge.audit="/opt/sparkforge/audit.json" \
      org.sparkforge.sbom="/opt/sparkforge/sbom.json"
