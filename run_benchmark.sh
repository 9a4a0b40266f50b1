#!/usr/bin/env bash
# Sweeps staleness thresholds, queue sizes, generation interval, the split of devices, pause and resume, modes and back ends, and writes
# benchmark_results_<time>/: performance_report.md with plots, summary.txt, a log per case, results.json.
#
#   ./run_benchmark.sh            30 to 60 minutes on two cores
#   ./run_benchmark.sh --quick    five minutes at most
#   NUM_GPUS=4 ACTOR_STRATEGY=fsdp2 ./run_benchmark.sh
#
# From the environment: as for run_e2e_test.sh, and TARGET_SAMPLES_PER_S (default: what hybrid sync makes on the same machine).
# The exit code is 0 when every case ran and every hard criterion holds.
set -euo pipefail
cd "$(dirname "$0")"
source benchmarks/suite/setup.sh
[ "$python" != .venv/bin/python ] || make --silent .venv/.plots
exec "$python" -m benchmarks.suite.sweep "$@"
