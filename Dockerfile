# One image for every role, for Ray's nodes and for the command line.
#
#   docker build --tag outrider:0.1.0 .                             for NVIDIA GPUs; coordinators run from it as well
#   docker build --tag outrider:0.1.0-cpu --build-arg VARIANT=cpu .  without CUDA: smaller by gigabytes
#
# The GPU variant needs no CUDA base image: PyTorch brings CUDA's libraries along, Triton its assembler, and the node's
# container runtime the driver. What Triton wants besides is a C compiler, for the stub that launches a kernel.
ARG VARIANT=cuda

FROM python:3.12-slim-bookworm AS base-cpu
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PATH=/opt/outrider/bin:$PATH

FROM base-cpu AS base-cuda
# The distribution's own version: a compiler pinned here would be gone from its mirrors with the next point release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM base-cpu AS build-cpu
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

FROM base-cpu AS build-cuda

# hadolint ignore=DL3006
FROM build-${VARIANT} AS build
WORKDIR /build
COPY . .
RUN python -m venv /opt/outrider \
    && /opt/outrider/bin/pip install --no-cache-dir --constraint constraints.txt ".[kubernetes]"

# hadolint ignore=DL3006
FROM base-${VARIANT}
# KubeRay starts Ray in a login shell, which sets PATH anew.
RUN useradd --uid 10001 --user-group --create-home --shell /usr/sbin/nologin outrider \
    && echo "export PATH=/opt/outrider/bin:\$PATH" > /etc/profile.d/outrider.sh
COPY --from=build /opt/outrider /opt/outrider
USER 10001:10001
WORKDIR /home/outrider
# No init beside it: every role handles SIGTERM itself and waits for the processes that it starts.
ENTRYPOINT ["outrider"]
