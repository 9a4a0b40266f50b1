#!/usr/bin/env bash
# Runs the whole system once with the smallest real settings and checks each part. Takes about one
# minute on two cores without a GPU, at most ten.
#
#   ./run_e2e_test.sh
#   NUM_GPUS=2 ACTOR_STRATEGY=fsdp2 MODEL_ID=Qwen/Qwen2.5-0.5B ./run_e2e_test.sh
#
# Environment variables:
#   NUM_GPUS         number of GPUs to use, 0 for none (default: all)
#   MODEL_PATH       model directory, or MODEL_ID, a Hugging Face model ID (default: built-in model)
#   ACTOR_STRATEGY   single, fsdp2 or megatron (default: single)
#   ENGINE           native or vllm (default: native)
#   CLUSTER          local or ray (default: local)
#   PYTHON           interpreter that has all packages; nothing is installed
#                    (default: the active environment, or .venv, created on first use)
#
# The exit code is 0 if every check passes.
set -euo pipefail
cd "$(dirname "$0")"
source benchmarks/suite/setup.sh
exec "$python" -m benchmarks.suite.e2e
