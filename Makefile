# `make` lists the targets. Works with GNU make 3.81 and later.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Options of the targets below, for example `make up WORKERS=4` or `make demo SEED=1 STEPS=50`.
WORKERS ?=
SERVER_PORT ?=
MODEL ?=
SEED ?=
DURATION ?=
STEPS ?=
NAME ?=
LINES ?=
# Test processes; the tests wait more than they compute.
JOBS ?= 3
FOLLOW ?=
RUN ?=
ARGS ?=

ifneq ($(RUN),)
export FOREBAY_EXPERIMENT_NAME := $(word 1,$(subst /, ,$(RUN)))
export FOREBAY_TRIAL_NAME := $(or $(word 2,$(subst /, ,$(RUN))),trial0)
endif

# The examples may be imported by workers; name your own packages instead, separated by commas.
export FOREBAY_IMPORT_ALLOWLIST ?= examples

SAY := @printf '==> %s\n'
CREATED := $(VENV)/.created
DEMO := $(VENV)/.installed-demo
DEV := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help up down status logs scale demo demo-text test lint types bench chaos clean distclean

help: ## List the targets
	@printf 'Targets (each installs what it needs, once, into $(VENV)):\n\n'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' Makefile
	@printf '\nVariables: PYTHON, RUN=experiment/trial, ARGS (further options), and those named above.\n'

up: $(DEMO) ## Start Redis, inference server, collector and workers here; Ctrl-C stops them (WORKERS, SERVER_PORT, MODEL)
	$(SAY) 'starting the local processes'
	@$(BIN)/forebay up $(if $(WORKERS),--workers $(WORKERS)) $(if $(SERVER_PORT),--server-port $(SERVER_PORT)) $(if $(MODEL),--model $(MODEL)) $(ARGS)

down: ## Stop them
	@if [ -x $(BIN)/forebay ]; then $(BIN)/forebay down; else echo 'nothing is installed, so nothing is up'; fi

status: $(DEMO) ## Show what runs, and the run's counters (RUN)
	@$(BIN)/forebay status $(ARGS) || test $$? -eq 3 # 3: nothing is up

logs: $(DEMO) ## Show the logs (NAME=worker-0, LINES=50, FOLLOW=1)
	@$(BIN)/forebay logs $(NAME) $(if $(LINES),--lines $(LINES)) $(if $(FOLLOW),--follow) $(ARGS)

scale: $(DEMO) ## Change the number of workers (WORKERS)
	@if [ -z '$(WORKERS)' ]; then echo 'say how many: make scale WORKERS=4' >&2; exit 2; fi
	@$(BIN)/forebay scale --workers $(WORKERS) $(ARGS)

demo: $(DEMO) ## Train a tiny policy on CPU through the whole pipeline (SEED, STEPS, WORKERS)
	$(SAY) 'running examples.grpo'
	@$(BIN)/python -m examples.grpo $(if $(SEED),--seed $(SEED)) $(if $(STEPS),--steps $(STEPS)) $(if $(WORKERS),--workers $(WORKERS)) $(ARGS)

demo-text: $(DEMO) ## Roll out a small text model on CPU (SEED, STEPS, WORKERS)
	$(SAY) 'running examples.text'
	@$(BIN)/python -m examples.text $(if $(SEED),--seed $(SEED)) $(if $(STEPS),--steps $(STEPS)) $(if $(WORKERS),--workers $(WORKERS)) $(ARGS)

test: lint types ## Run linters, type checkers and all tests (ARGS='-k name', JOBS=0 for one process)
	$(SAY) 'pytest, in $(JOBS) processes'
	@$(BIN)/pytest -n $(JOBS) --dist worksteal $(ARGS)

lint: $(DEV) ## Check style and the layering of the packages
	$(SAY) 'ruff check'
	@$(BIN)/ruff check .
	$(SAY) 'ruff format --check'
	@$(BIN)/ruff format --check .
	$(SAY) 'lint-imports'
	@$(BIN)/lint-imports

types: $(DEV) ## Check types
	$(SAY) 'mypy'
	@$(BIN)/mypy
	$(SAY) 'pyright'
	@$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(DEMO) ## Run the benchmarks
	$(SAY) 'running the benchmarks'
	@$(BIN)/python -m benchmarks $(ARGS)

chaos: $(DEMO) ## Kill processes at random for five minutes and prove that nothing is lost, doubled or stale (DURATION, SEED)
	$(SAY) 'running chaos'
	@$(BIN)/python -m chaos $(if $(DURATION),--duration $(DURATION)) $(if $(SEED),--seed $(SEED)) $(if $(WORKERS),--workers $(WORKERS)) $(ARGS)

clean: down ## Stop what runs; remove its data (.forebay) and caches
	$(SAY) 'removing .forebay and caches'
	@rm -rf .forebay .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	@find . -path ./$(VENV) -prune -o -path ./.git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## As clean, and remove the virtual environment
	$(SAY) 'removing $(VENV)'
	@rm -rf $(VENV)

# A stamp of its own: an environment whose creation was interrupted holds a python too.
$(CREATED):
	@command -v $(PYTHON) >/dev/null || { echo '$(PYTHON) is not installed: install Python 3.11 or later, or name one: make PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "Python 3.11 or later is needed, but $(PYTHON) is %d.%d: name another one, for example make PYTHON=python3.12" % v[:2])'
	$(SAY) 'creating $(VENV) (once)'
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(DEMO): $(CREATED) pyproject.toml constraints.txt
	$(SAY) 'installing forebay with what the local processes and demos need (once; torch is large)'
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[demo]'
	@touch $@

$(DEV): $(CREATED) pyproject.toml constraints.txt
	$(SAY) 'installing forebay with its development tools (once; torch is large)'
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@ $(DEMO)
