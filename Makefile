# Everything here only calls scripts/setup.py and the command line; see `make help`.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin

export PATH := $(BIN):$(PATH)
export TORCH_EXTENSIONS_DIR := $(VENV)/torch_extensions
export TOKENIZERS_PARALLELISM := false

# only variables that are set are passed on; the defaults are the command line's
run_flags = $(if $(MODEL),--model "$(MODEL)") $(if $(HEAD),--head "$(HEAD)") $(if $(RUN),--run "$(RUN)")
train_flags = $(run_flags) $(if $(RECIPE),--recipe "$(RECIPE)") $(if $(DATA),--data "$(DATA)") \
	$(if $(MINUTES),--minutes "$(MINUTES)") $(if $(GPUS),--gpus "$(GPUS)") $(if $(NNODES),--nnodes "$(NNODES)") \
	$(if $(NODE_RANK),--node-rank "$(NODE_RANK)") $(if $(MASTER),--master "$(MASTER)")

.PHONY: help setup train eval bench test lint gate clean no-push

help: ## show this
	@echo "make TARGET [VARIABLE=value ...]"
	@echo
	@grep -hE '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z]+):.*## (.*)/  \1	\2/' | expand -t 12
	@echo
	@echo "variables of train (eval takes MODEL, HEAD, RUN):"
	@echo "  MODEL       a short name (configs/models/), a hub id or a folder   [smollm2-135m]"
	@echo "  HEAD        the kind of draft head (configs/heads/)                [eagle3]"
	@echo "  RECIPE      where prompts come from (configs/recipes/)             [the model's own]"
	@echo "  DATA        a file or folder of your own conversations"
	@echo "  MINUTES     budget of the whole run                                [15]"
	@echo "  GPUS        devices on this machine                                [all visible]"
	@echo "  NNODES, NODE_RANK, MASTER   several machines: how many, which one this is, host of the first"
	@echo "  RUN         name of the run, to keep several heads of one kind"

setup: ## create .venv and install everything (nothing to do the second time)
	@$(PYTHON) scripts/setup.py

train: no-push setup ## train, measure and report a draft head: make train MODEL=Qwen3-8B HEAD=eagle3
	@$(BIN)/draftsmith run $(train_flags)

eval: setup ## measure a trained head on all held-out prompts
	@$(BIN)/draftsmith eval $(run_flags)

test: setup ## run the test suite
	@$(BIN)/pytest -q

lint: setup ## formatting, style, types, import floors
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	cd .venv/link && $(BIN)/mypy --config-file draftsmith/pyproject.toml --cache-dir draftsmith/.mypy_cache -p draftsmith
	$(BIN)/mypy scripts
	PYTHONPATH=.venv/link $(BIN)/lint-imports

bench: setup ## measure the decoder against transformers.generate: make bench BENCH=decoder (a quarter of an hour)
	@$(BIN)/draftsmith bench $(or $(BENCH),decoder) $(if $(MODEL),--model "$(MODEL)")

gate: setup ## overfit the default target: the gate for changes to training or decoding (minutes)
	@$(BIN)/pytest -q -m gate

clean: ## remove caches and build leftovers; .venv and runs/ stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -not -path './runs/*' -prune -exec rm -rf {} +

no-push:
ifdef PUSH
	@echo "PUSH=$(PUSH): pushing to a hub is not part of this version; leave PUSH out" >&2; exit 2
endif
