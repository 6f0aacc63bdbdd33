# `make demo` shows the main job, `make test` proves it, `make lint` keeps it clean. Each sets up all it needs.
PYTHON ?= python3
# Any build will do, also one for the CPU alone; to choose, install torch into .venv first or set TORCH.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete

.PHONY: venv demo test prove lint format peers clean

venv: $(STAMP)

$(STAMP): pyproject.toml $(wildcard loaderkit/csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[s3,dali,webdataset,profile,demo,dev]"
	touch $(STAMP)

demo: venv
	$(BIN)/loaderkit demo

test: venv
	$(BIN)/python -m pytest -m "not prove" -n auto --maxprocesses 8 --dist worksteal

prove: SHELL := bash
prove: venv
	set -o pipefail; { $(BIN)/python -m pytest -m "not alone" -n auto --maxprocesses 8 --dist worksteal --durations=20 \
	&& $(BIN)/python -m pytest -m alone --durations=20; } 2>&1 | tee "profiles/prove-$$(nproc)cpu-$$(date +%F).txt"

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Against other loaders, each in an environment of its own below .peers/; CONTESTANTS=a,b takes only those.
WORK ?= all
ROUNDS ?= 5
peers: venv
	-$(BIN)/python -m profiles.peers.environments
	$(BIN)/python -m profiles.peers --work $(WORK) --rounds $(ROUNDS) $(if $(CONTESTANTS),--contestants $(CONTESTANTS)) --out profiles

clean:
	rm -rf $(VENV) .peers build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
