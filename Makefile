# Two commands: `make demo` trains a model on this machine, `make test` proves that it works.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow test-megatron test-ray test-vllm test-bench lint format clean

demo: $(READY)  ## fully async training on two CPU cores, under three minutes
	$(BIN)/paceline train recipes/fully_async.toml run_dir=runs/demo --fresh

test: $(READY)  ## what the README promises: about 13 minutes on two cores
	$(BIN)/python -m pytest

test-slow: $(READY)  ## every algorithm preset learns, three seeds each: about five minutes
	$(BIN)/python -m pytest -m slow

test-megatron: $(VENV)/.megatron  ## the Megatron engine against one device: real ranks on CPU, a few minutes
	$(BIN)/python -m pytest tests/megatron

test-ray: $(VENV)/.ray  ## workers on Ray: two nodes on this machine, lost calls, killed and stopped workers; a few minutes
	$(BIN)/python -m pytest tests/ray

test-vllm: .venv-vllm/.ready  ## vLLM as the engine, in its own interpreter: contract suite, async and hybrid runs; a few minutes
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/contract/test_rollout_engine.py tests/vllm

test-bench: .venv-trl/.ready  ## our formulas against TRL's own code, in TRL's interpreter
	OMP_NUM_THREADS=1 .venv-trl/bin/python -m pytest tests/bench

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Paceline needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

$(VENV)/.megatron: $(READY)  # without its dependencies: torch, numpy and packaging are here already
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps "megatron-core==0.16.1"
	@touch $@

$(VENV)/.ray: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt "ray==2.60.*"
	@touch $@

$(VENV)/.plots: $(READY)  # for the reports of run_benchmark.sh
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt "matplotlib>=3.9"
	@touch $@

.venv-trl/.ready: benchmarks/install_trl.sh
	PYTHON=$(PYTHON) bash benchmarks/install_trl.sh
	.venv-trl/bin/pip install --quiet --disable-pip-version-check pytest pytest-timeout pydantic typer rich
	@touch $@

.venv-vllm/.ready: benchmarks/install_vllm.sh
	PYTHON=$(PYTHON) bash benchmarks/install_vllm.sh
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check "pytest>=9" "pytest-timeout>=2.4" "psutil>=7" "peft>=0.18" "accelerate>=1.10" "torch==2.13.0"
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

clean:  ## what can be made again; runs stay
	rm -rf $(VENV) .venv-* .mypy_cache .ruff_cache .pytest_cache
