# `make demo` shows the main job, `make test` proves it, `make lint` keeps it clean. Each sets up all it needs.
PYTHON ?= python3
# Any build will do, also one for the CPU alone; to choose, install torch into .venv first or set TORCH.
TORCH ?= torch==2.13.0
# For one test and for nothing else to see: tests/helpers/torchvision_transforms.py says why.
TORCHVISION ?= torchvision==0.28.0
VENV := .venv
BIN := $(VENV)/bin
# pip says what it does; its warnings are shown only if it fails.
PIP := $(BIN)/pip install --disable-pip-version-check 2>$(VENV)/pip.log
OR_WHY := || { cat $(VENV)/pip.log >&2; exit 1; }
STAMP := $(VENV)/.complete

.PHONY: venv demo test sanitize prove lint format peers gpu gpu-bundle clean

venv: $(STAMP)

$(STAMP): pyproject.toml $(wildcard loaderkit/native/csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) "$(TORCH)" $(OR_WHY)
	$(PIP) --editable ".[s3,dali,webdataset,profile,demo,dev,dev-integrations]" $(OR_WHY)
	$(PIP) --no-deps --upgrade --target $(VENV)/torchvision "$(TORCHVISION)" $(OR_WHY)
	touch $(STAMP)

demo: venv
	$(BIN)/loaderkit demo

test: venv
	$(BIN)/python -m pytest -m "not prove" -n auto --maxprocesses 8 --dist worksteal --durations=10

prove: SHELL := bash
prove: venv sanitize
	set -o pipefail; { $(BIN)/python -m pytest -m "not alone" -n auto --maxprocesses 8 --dist worksteal --durations=20 \
	&& $(BIN)/python -m pytest -m alone --durations=20; } 2>&1 | tee "profiles/results/prove-$$(nproc)cpu-$$(date +%F).txt"

# The C modules built with AddressSanitizer and UBSan, below build/, and what goes through them: damaged files, pixels, ranges, the clocks of workers.
# DALI, whose code is not ours, does not start below ASan.
SANITIZED := build/sanitized
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g
LIBRARY = $(shell gcc -print-file-name=$(1).so)
SANITIZER_TESTS := tests/test_mutations.py tests/native tests/connectors/test_ranges.py tests/connectors/test_file.py tests/sources \
	tests/stages/image tests/checkpoint/formats tests/engine/metrics/test_sums.py tests/engine/metrics/test_worker_clock.py

sanitize: venv
	rm -rf $(SANITIZED)
	CC=gcc CFLAGS="$(SANITIZE)" LDFLAGS="-fsanitize=address,undefined" $(BIN)/python -c "from setuptools import setup; setup()" \
		--quiet build --build-lib $(SANITIZED) --build-temp $(SANITIZED).o
	LD_PRELOAD="$(call LIBRARY,libasan) $(call LIBRARY,libubsan)" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
		UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 PYTHONPATH=$(SANITIZED) PYTHONMALLOC=malloc \
		$(BIN)/python -m pytest -p no:cacheprovider -o pythonpath=$(SANITIZED) -m "not prove and not alone" -k "not dali" $(SANITIZER_TESTS)

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
	$(BIN)/python -m profiles.peers --work $(WORK) --rounds $(ROUNDS) $(if $(CONTESTANTS),--contestants $(CONTESTANTS)) --out profiles/results

# What needs a GPU, in ten minutes: docs/gpu.md. Without one, TINY=1 rehearses it.
gpu: venv
	$(BIN)/python -m profiles.gpu_session $(if $(PART),--part $(PART)) $(if $(TINY),--tiny) $(if $(ONLY),--only $(ONLY))

# What is carried to a machine with a GPU and without a network; GPU_PYTHON is of the version that it has.
GPU_PYTHON ?= python3.12
gpu-bundle:
	$(GPU_PYTHON) -m profiles.gpu_bundle

clean:
	rm -rf $(VENV) .peers .gpu-bundle build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
