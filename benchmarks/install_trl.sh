#!/usr/bin/env bash
# Installs TRL in a separate virtual environment (.venv-trl) for benchmarks/vs_trl.py,
# benchmarks/trl_script_time.py and `make test-bench`.
# torch is installed and pinned first, so that TRL's dependencies cannot change its version.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
venv=.venv-trl
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

pip "torch==2.13.0"
# transformers is pinned as well: newer versions add arguments that tests/bench does not know.
printf 'torch==2.13.0\ntransformers==5.19.0\n' > "$venv/constraints.txt"
pip -c "$venv/constraints.txt" "trl==1.16.*"
"$venv/bin/python" - <<'PY'
import torch
import transformers
import trl

for module in (trl, transformers, torch):
    print(module.__name__, module.__version__)
PY
