# `make demo` shows the main job, `make test` proves it, `make lint` keeps it clean. Each sets up all it needs.
PYTHON ?= python3
# The CPU build is enough to develop with; install another torch into .venv first to use a GPU.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete

.PHONY: venv demo test prove lint format bench clean

venv: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[s3,dali,webdataset,demo,dev]"
	touch $(STAMP)

demo: venv
	$(BIN)/loaderkit demo

test: venv
	$(BIN)/python -m pytest -m "not prove"

prove: venv
	$(BIN)/python -m pytest --durations=20

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv
	$(BIN)/python profiles/first_look.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
