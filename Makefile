# Every target works from a fresh clone: `.venv` is made once and again only when a
# pyproject.toml or the pins change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PACKAGES := packages/hp-platform packages/hp-dtensor packages/hp-planner packages/hp-fsdp packages/hp-muon integration
EDITABLE := $(foreach package,$(PACKAGES),-e $(package))
# Test processes at once; each may start a group of ranks beside itself.
JOBS ?= 2
# Ranks compute with one thread each; more would only fight over the same cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# What is imported is compiled once and kept. pip would compile everything it installs, ten times
# as much, on one core.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile

.PHONY: help demo test test-slow check format wheels bench clean install
.DEFAULT_GOAL := help

help:
	@echo "demo       train a small Qwen3-MoE on four local ranks (sets up .venv first)"
	@echo "test       run every test (sets up .venv first)"
	@echo "test-slow  run the tests that are too long for every day (sets up .venv first)"
	@echo "check      ruff, mypy --strict on src, import rules"
	@echo "format     let ruff format and fix"
	@echo "wheels     build all packages into dist/"
	@echo "bench      run every benchmark in its quick form"
	@echo "clean      remove .venv, build results and caches"

install: $(STAMP)

$(STAMP): requirements-dev.txt $(addsuffix /pyproject.toml,$(PACKAGES))
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or later is needed, found " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements-dev.txt
	$(PIP) --no-build-isolation $(EDITABLE)
	touch $@

demo: $(STAMP)
	$(BIN)/torchrun --standalone --nproc-per-node=4 -m hp_integration.train --mesh dp_shard=2,tp=2 --out runs/demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

# The long runs: the catalogue of model families, whole training runs, wheels of torch_npu.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow --timeout 3600 $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --config-file pyproject.toml $(addsuffix /src,$(PACKAGES))
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheels: $(STAMP)
	rm -rf dist
	for package in $(PACKAGES); do $(BIN)/python -m build --wheel --no-isolation --outdir dist $$package || exit 1; done

bench: $(STAMP)
	for name in fsdp muon host-overhead redistribution; do $(BIN)/python -m hp_integration.bench $$name --quick || exit 1; done

clean:
	rm -rf $(VENV) dist build runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
