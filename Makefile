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
model_flag = $(if $(MODEL),--model "$(MODEL)")
push_flag = $(if $(PUSH),--push "$(PUSH)")
run_flags = $(model_flag) $(if $(HEAD),--head "$(HEAD)") $(if $(RUN),--run "$(RUN)")
train_flags = $(run_flags) $(if $(HEAD_INIT),--head-init "$(HEAD_INIT)") \
	$(if $(RECIPE),--recipe "$(RECIPE)") $(if $(DATA),--data "$(DATA)") \
	$(if $(ANSWERS),--answers "$(ANSWERS)") $(if $(SERVER),--server "$(SERVER)") $(if $(MODE),--mode "$(MODE)") \
	$(if $(MINUTES),--minutes "$(MINUTES)") $(if $(GPUS),--gpus "$(GPUS)") $(if $(NNODES),--nnodes "$(NNODES)") \
	$(if $(NODE_RANK),--node-rank "$(NODE_RANK)") $(if $(MASTER),--master "$(MASTER)") $(push_flag)

jobs = $(shell $(PYTHON) -c "import os; print(min(4, os.cpu_count() or 1))")

.PHONY: help setup train eval compare tune load tour export doctor engines serve-check bench test lint gate clean push

help: ## show this
	@echo "make TARGET [VARIABLE=value ...]"
	@echo
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## (.*)/  \1	\2/' | expand -t 12
	@echo
	@echo "variables of train (eval takes MODEL, HEAD, RUN; compare MODEL, HEADS, DRAFT_MODEL; tour MODEL, HEADS, RECIPE,"
	@echo "MINUTES of each head's training, GPUS):"
	@echo "  MODEL       a short name (configs/models/), a hub id or a folder   [smollm2-135m]"
	@echo "  HEAD        the kind of draft head (configs/heads/)                [eagle3]"
	@echo "  HEAD_INIT   a trained head to start from: checkpoint or run folder, hub id, native [the head's own start]"
	@echo "  RECIPE      where prompts come from: configs/recipes/, or a .yaml   [the model's own]"
	@echo "  DATA        your own conversations (file, folder), hf:DATASET, or a name from configs/sources.yaml"
	@echo "  ANSWERS     whose answers to train on: target, dataset             [what the time allows]"
	@echo "  SERVER      OpenAI-compatible servers that answer: URL[,URL]       [this machine]"
	@echo "  MODE        states of the target: offline (stored), online         [offline where the disk allows]"
	@echo "  MINUTES     budget of the whole run                                [15]"
	@echo "  GPUS        devices on this machine                                [all visible]"
	@echo "  NNODES, NODE_RANK, MASTER   several machines: how many, which one this is, host of the first"
	@echo "  RUN         name of the run, to keep several heads of one kind"
	@echo "  PUSH        me/Name: the finished head goes to the Hub (HF_TOKEN)  [nowhere]"
	@echo "  HEADS       names of heads with commas between                     [all]"
	@echo "  DRAFT_MODEL a small model of the same tokenizer, to be compared, too"

setup: ## create .venv and install everything (nothing to do the second time)
	@$(PYTHON) scripts/setup.py

train: setup ## train, measure and report a draft head: make train MODEL=Qwen3-8B HEAD=eagle3
	@$(BIN)/draftsmith run $(train_flags)

eval: setup ## measure a trained head: make eval BENCH=mt-bench,gsm8k PROMPTS=40 AGAINST=earlier/report.json
	@$(BIN)/draftsmith eval $(run_flags) $(if $(BENCH),--bench "$(BENCH)") $(if $(PROMPTS),--prompts "$(PROMPTS)") \
		$(if $(AGAINST),--against "$(AGAINST)")

compare: setup ## measure every trained head and every scheme without training in turns: make compare MODEL=Qwen3-8B
	@$(BIN)/draftsmith compare $(model_flag) $(if $(HEADS),--heads "$(HEADS)") $(if $(BENCH),--bench "$(BENCH)") \
		$(if $(DRAFT_MODEL),--draft-model "$(DRAFT_MODEL)")

load: setup ## speed-up by batch, or of recorded requests: make load BATCHES=1,2,4,8, or REPLAY=requests.jsonl CONCURRENCY=8
	@$(BIN)/draftsmith load $(run_flags) $(if $(BATCHES),--batches "$(BATCHES)") \
		$(if $(REPLAY),--replay "$(REPLAY)") $(if $(CONCURRENCY),--concurrency "$(CONCURRENCY)")

tune: setup ## best setting by batch and temperature, and what engines must be told: make tune BATCHES=1,8 TEMPERATURES=0,1
	@$(BIN)/draftsmith tune $(run_flags) $(if $(BATCHES),--batches "$(BATCHES)") \
		$(if $(TEMPERATURES),--temperatures "$(TEMPERATURES)")

tour: setup ## train every head family for a few minutes on the same answers, then compare them (an hour)
	@$(BIN)/draftsmith tour $(model_flag) $(if $(HEADS),--heads "$(HEADS)") $(if $(RECIPE),--recipe "$(RECIPE)") \
		$(if $(MINUTES),--minutes "$(MINUTES)") $(if $(GPUS),--gpus "$(GPUS)") $(push_flag)

test: setup ## run the test suite, in as many processes as there are cores (4 at most; JOBS=1 for one)
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -q -n $(or $(JOBS),$(jobs)) --dist loadfile

lint: setup ## formatting, style, types, import floors
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	cd .venv/link && $(BIN)/mypy --config-file draftsmith/pyproject.toml --cache-dir draftsmith/.mypy_cache -p draftsmith
	MYPYPATH=.venv/link $(BIN)/mypy scripts
	PYTHONPATH=.venv/link $(BIN)/lint-imports

export: setup ## write a trained head for an engine: make export RUN=runs/smollm2-135m/eagle3 ENGINE=vllm
	@$(BIN)/draftsmith export "$(RUN)" $(if $(ENGINE),--engine "$(ENGINE)") $(model_flag)

doctor: setup ## say what is wrong with a head's directory, per engine: make doctor DIR=folder MODEL=its target
	@$(BIN)/draftsmith doctor "$(DIR)" $(if $(MODEL),--target "$(MODEL)")

push: setup ## send a head to the Hub: make push DIR=runs/MODEL/HEAD PUSH=me/Name (MODEL=its target; PUBLIC=1: for everybody; DRY_RUN=1)
	@$(BIN)/draftsmith push "$(DIR)" "$(PUSH)" $(if $(MODEL),--target "$(MODEL)") $(if $(PUBLIC),--public) \
		$(if $(DRY_RUN),--dry-run) $(if $(LICENSE),--license "$(LICENSE)")

engines: ## install vLLM and speculators into .engines/, for serve-check (a few minutes, 4 GB)
	@$(PYTHON) scripts/engines.py $(ENGINES)

serve-check: setup ## serve the exported head in vLLM: equal outputs, equal acceptance, speed (after make engines)
	@$(BIN)/draftsmith serve-check $(run_flags)

bench: setup ## measure: make bench BENCH=decoder (against transformers.generate, a quarter of an hour), data or train
	@$(BIN)/draftsmith bench $(or $(BENCH),decoder) $(model_flag)

gate: setup ## overfit the default target: the gate for changes to training or decoding (minutes)
	@$(BIN)/pytest -q -m gate

clean: ## remove caches and build leftovers; .venv and runs/ stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -not -path './.engines/*' -not -path './runs/*' -prune -exec rm -rf {} +
