# An image with Espalier and every extra that needs no cluster.
#
#   docker build -t espalier .
#   docker build -t espalier --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 --build-arg TORCH=gpu .
#   docker run --rm -v "$PWD":/work espalier train recipe.toml
#
# With TORCH=pinned pip takes the versions that are tested, which are builds for processors where one is offered; with
# TORCH=gpu it takes the newest PyTorch of the package index, which brings its CUDA libraries.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
ARG TORCH=pinned
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv openssh-client iproute2 \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/espalier
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN python3 -m venv .venv \
 && if [ "$TORCH" = gpu ]; then grep -v '^torch==' constraints.txt > chosen.txt; else cp constraints.txt chosen.txt; fi \
 && .venv/bin/pip install -c chosen.txt '.[graph,track,hub]'
ENV PATH=/opt/espalier/.venv/bin:$PATH
RUN useradd --create-home user
USER user
WORKDIR /work
ENTRYPOINT ["espalier"]
