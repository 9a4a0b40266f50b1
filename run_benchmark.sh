#!/usr/bin/env bash
# Measures staleness thresholds, queue sizes, sync intervals, device splits, pause and resume, modes
# and backends. Writes benchmark_results_<time>/: performance_report.md with plots, summary.txt,
# results.json and a log per case.
#
#   ./run_benchmark.sh            30 to 60 minutes on two cores
#   ./run_benchmark.sh --quick    at most 5 minutes
#   NUM_GPUS=4 ACTOR_STRATEGY=fsdp2 ./run_benchmark.sh
#
# Environment variables: those of run_e2e_test.sh, and TARGET_SAMPLES_PER_S (default: the rate of
# hybrid sync on the same machine). The exit code is 0 if no case failed and every required
# criterion holds. summary.txt counts the failed and skipped cases.
set -euo pipefail
cd "$(dirname "$0")"
source benchmarks/suite/setup.sh
[ "$python" != .venv/bin/python ] || make --silent .venv/.plots
exec "$python" -m benchmarks.suite.sweep "$@"
