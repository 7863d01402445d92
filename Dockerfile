# The GPU environment: exactly requirements/gpu.txt on CUDA 13 with Python 3.12.
#   docker build -t fusionrl .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 -it fusionrl
# The development image of CUDA is needed: Transformer Engine and SGLang's kernels compile some code against it.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive \
    PIP_NO_CACHE_DIR=1 \
    CUDA_HOME=/usr/local/cuda \
    FUSIONRL_ENV=gpu
# Ubuntu removes a version from its mirrors when it has a newer one: a pinned one would break the build.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        build-essential ca-certificates cmake git libibverbs1 libnuma1 ninja-build \
        python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/fusionrl
# The packages come before the sources, so that a change of the sources does not install them anew. setup-env.sh
# installs the project itself too and needs a package to point at.
COPY setup.py LICENSE ./
COPY requirements requirements
COPY scripts/setup-env.sh scripts/setup-env.sh
COPY fusionrl/__init__.py fusionrl/__init__.py
RUN PYTHON=python3.12 scripts/setup-env.sh examples

COPY . .
ENV PATH=/opt/fusionrl/.venv/bin:$PATH
RUN fusionrl --help >/dev/null
CMD ["bash"]
