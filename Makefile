# Every target makes what it needs: the first call builds .venv with pip, later calls reuse it.
# `make PYTHON=python3.13 ...` chooses another Python; PIP_ARGS goes to pip as it is.

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# One process per core, as long as memory is sure to hold them: each takes about 1 GB.
WORKERS ?= -n auto --maxprocesses 4 --dist loadgroup
TYPED := $(wildcard src benchmarks examples tests)
PAGES := $(BIN)/sphinx-build -W --keep-going -n -q docs build/docs

.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help demo test test-pure test-gpu test-simulated-gpu bench-cpu bench-gpu docs check format clean

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/.stamp-demo  ## train ResNet-50 inside 40 % of its memory; ARGS="--budget 50%" etc.
	$(BIN)/outcore demo $(ARGS)

test: $(VENV)/.stamp-dev  ## all tests, on all cores; those that need a GPU are skipped where there is none
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

test-pure: $(VENV)/.stamp-dev  ## the tests that need no torch, in minutes
	$(BIN)/python -m pytest tests/pure $(ARGS)

test-gpu: $(VENV)/.stamp-dev  ## the tests that need a CUDA device
	@# pytest exits 5 when it found no test
	@$(BIN)/python -m pytest tests/gpu tests/simulated_gpu $(ARGS) || { [ $$? -eq 5 ] && echo "no tests in tests/gpu"; }

test-simulated-gpu: $(VENV)/.stamp-dev  ## tests/gpu on a machine without one, for torch built for CUDA
	$(BIN)/python -m tests.simulated_gpu -m pytest tests/gpu tests/simulated_gpu $(ARGS)

bench-cpu: $(VENV)/.stamp-dev  ## measure on this machine; writes benchmarks/results/
	$(BIN)/python -m benchmarks.cpu $(ARGS)

bench-gpu: $(VENV)/.stamp-dev  ## measure on one GPU, in under nine minutes; writes benchmarks/results/
	$(BIN)/python -m benchmarks.gpu $(ARGS)

docs: $(VENV)/.stamp-dev  ## build the pages into build/docs; a warning is an error
	$(PAGES)

check: $(VENV)/.stamp-dev  ## format, lint, types, import contracts, pages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(TYPED)
	$(BIN)/lint-imports --no-logo
	$(PAGES)

format: $(VENV)/.stamp-dev  ## rewrite the code in the common format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# `venv` on an existing folder mends it and keeps what is installed; pip then adds what is missing.
define install
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "outcore needs Python 3.11 or newer; try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
@echo "installing outcore[$(1)] into $(VENV) (torch is large: this can take minutes) ..."
@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
  --constraint constraints.txt --editable '.[$(1)]'
@touch $@
endef

$(VENV)/.stamp-demo: pyproject.toml constraints.txt
	$(call install,demo)

$(VENV)/.stamp-dev: pyproject.toml constraints.txt
	$(call install,dev)
