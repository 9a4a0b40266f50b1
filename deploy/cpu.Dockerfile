# Paceline on CPUs: docker build -f deploy/cpu.Dockerfile -t paceline:cpu .
#   docker run --rm -v "$PWD/runs:/runs" paceline:cpu train fully_async run_dir=/runs/first
FROM python:3.12-slim-bookworm

# git: the version comes from the tags. bubblewrap: the sandbox for code that a model wrote.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /paceline
COPY . .
# torch without CUDA: 200 MB instead of 3 GB.
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
        -c constraints.txt ".[parquet,lora,ray]"

RUN useradd --create-home paceline
USER paceline
WORKDIR /home/paceline
ENTRYPOINT ["paceline"]
CMD ["--help"]
