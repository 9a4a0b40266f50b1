# Paceline on NVIDIA GPUs: docker build -f deploy/cuda.Dockerfile -t paceline:cuda .
#   docker run --rm --gpus all --ipc host -v "$PWD/runs:/runs" paceline:cuda paceline doctor
# The wheels of torch contain CUDA; the host needs only the driver. Triton needs a C compiler.
FROM python:3.12-slim-bookworm

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap gcc git libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /paceline
COPY . .
RUN pip install --no-cache-dir -c constraints.txt ".[parquet,lora,ray]"

RUN useradd --create-home paceline
USER paceline
WORKDIR /home/paceline
# No entry point: KubeRay starts Ray in this image.
CMD ["paceline", "--help"]
