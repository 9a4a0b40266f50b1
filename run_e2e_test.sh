#!/usr/bin/env bash
# The whole system end to end in its smallest real form: about a minute on two cores without a GPU, ten at most.
#
#   ./run_e2e_test.sh
#   NUM_GPUS=2 ACTOR_STRATEGY=fsdp2 MODEL_ID=Qwen/Qwen2.5-0.5B ./run_e2e_test.sh
#
# From the environment: NUM_GPUS (default: all there are), MODEL_PATH (a folder) or MODEL_ID (a hub id; default: a tiny model of our own),
# ACTOR_STRATEGY (single, fsdp2, megatron), ENGINE (native, vllm), CLUSTER (local, ray), PYTHON (an interpreter that has all it takes, used
# as it is; default: .venv, made on first use). The exit code tells: 0 = every check holds.
set -euo pipefail
cd "$(dirname "$0")"
source benchmarks/suite/setup.sh
exec "$python" -m benchmarks.suite.e2e
