#!/usr/bin/env bash
# TRL in its own virtual environment (.venv-trl), for benchmarks/vs_trl.py to measure against.
# torch first, then held where it is, so that TRL's dependencies cannot pull in another one.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
venv=.venv-trl
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

pip "torch==2.13.0"
echo "torch==2.13.0" > "$venv/constraints.txt"
pip -c "$venv/constraints.txt" "trl==1.16.*"
"$venv/bin/python" -c "import torch, transformers, trl; print('trl', trl.__version__, 'transformers', transformers.__version__, 'torch', torch.__version__)"
