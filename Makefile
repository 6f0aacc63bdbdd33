# `make demo` shows the main job, `make test` proves it, `make lint` keeps it clean. Each sets up what it needs, and no more.
PYTHON ?= python3
# Any build will do, also one for the CPU alone; to choose, install torch into .venv first or set TORCH.
TORCH ?= torch==2.13.0
# For one test and for nothing else to see: tests/helpers/torchvision_transforms.py says why.
TORCHVISION ?= torchvision==0.28.0
# As well: torchtitan asks for an older `datasets`. Of what it needs only that which its data-loader contract imports.
TORCHTITAN ?= torchtitan==0.3.0 docstring_parser==0.18.0 spmd_types==0.2.3 typeguard==4.6.1 tyro==1.0.17
# An interpreter that is asked for by PYTHON=python3.12 has an environment of its own.
VENV ?= .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
# pip says what fails; its warnings are shown only then.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check 2>$(VENV)/pip.log
OR_WHY := || { cat $(VENV)/pip.log >&2; exit 1; }
# What an extra of pyproject.toml asks for, for pip: with the package itself it would compile the C modules again.
WANTED = $(BIN)/python -c "import sys, tomllib; wanted = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
	print(*(line for name in sys.argv[1:] for line in wanted[name]), sep='\n')"
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

.PHONY: venv demo test integration docs sanitize prove lint format peers gpu gpu-bundle clean

$(VENV)/.demo: pyproject.toml $(wildcard loaderkit/native/csrc/*)
	@echo "1 of 3: an environment in $(VENV), by $(PYTHON)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "2 of 3: $(TORCH), unless a torch is installed there"
	@$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) "$(TORCH)" $(OR_WHY)
	@echo "3 of 3: loaderkit, its C modules, and what the demo shows"
	@$(PIP) --editable ".[demo]" $(OR_WHY)
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@echo "what the tests need"
	@$(WANTED) s3 dali webdataset parquet volumes media fsspec metrics profile test >$(VENV)/test.txt
	@$(PIP) -r $(VENV)/test.txt $(OR_WHY)
	@touch $@

$(VENV)/.integration: $(VENV)/.test
	@echo "the frameworks that loaderkit works with"
	@$(WANTED) ray integration docs >$(VENV)/integration.txt
	@$(PIP) -r $(VENV)/integration.txt $(OR_WHY)
	@$(PIP) --no-deps --upgrade --target $(VENV)/torchvision "$(TORCHVISION)" $(OR_WHY)
	@$(PIP) --no-deps --upgrade --target $(VENV)/torchtitan $(TORCHTITAN) $(OR_WHY)
	@touch $@

$(VENV)/.docs: $(VENV)/.demo
	@echo "what builds the site"
	@$(WANTED) docs >$(VENV)/docs.txt
	@$(PIP) -r $(VENV)/docs.txt $(OR_WHY)
	@touch $@

$(VENV)/.lint: $(VENV)/.test $(VENV)/.docs
	@echo "the linters"
	@$(WANTED) lint >$(VENV)/lint.txt
	@$(PIP) -r $(VENV)/lint.txt $(OR_WHY)
	@touch $@

# All of it.
venv: $(VENV)/.integration $(VENV)/.lint

demo: $(VENV)/.demo
	$(BIN)/loaderkit demo

# All of them, or those of TESTS="tests/engine tests/cli".
test: $(VENV)/.test
	$(PYTEST) -m "not prove and not integration" --durations=10 $(TESTS)

# Needs Chromium and Prometheus, too; it says so where they are missing.
integration: $(VENV)/.integration
	$(PYTEST) -m "integration and not prove" --durations=10

# New cases each time; the report's first lines say which seed draws them again. Needs Slurm, too; it says so where it is missing.
prove: SHELL := bash
prove: export LOADERKIT_SEED := $(or $(LOADERKIT_SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))
prove: $(VENV)/.integration sanitize
	set -o pipefail; { $(PYTEST) -m "not alone" --durations=20 \
	&& $(BIN)/python -m pytest -m alone --durations=20; } 2>&1 | tee "profiles/results/prove-$$(nproc)cpu-$$(date +%F).txt"

# The C modules built with AddressSanitizer and UBSan, below build/, and what goes through them: damaged files, pixels, ranges, the clocks of workers.
# DALI, whose code is not ours, does not start below ASan.
SANITIZED := build/sanitized
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g
LIBRARY = $(shell gcc -print-file-name=$(1).so)
SANITIZER_TESTS := tests/test_mutations.py tests/native tests/connectors/test_ranges.py tests/connectors/test_file.py tests/sources \
	tests/stages/image tests/checkpoint/formats tests/engine/metrics/test_sums.py tests/engine/metrics/test_worker_clock.py

sanitize: $(VENV)/.test
	rm -rf $(SANITIZED)
	CC=gcc CFLAGS="$(SANITIZE)" LDFLAGS="-fsanitize=address,undefined" $(BIN)/python -c "from setuptools import setup; setup()" \
		--quiet build --build-lib $(SANITIZED) --build-temp $(SANITIZED).o
	LD_PRELOAD="$(call LIBRARY,libasan) $(call LIBRARY,libubsan)" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
		UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 PYTHONPATH=$(abspath $(SANITIZED)) PYTHONMALLOC=malloc \
		$(BIN)/python -m pytest -p no:cacheprovider -o pythonpath="$(SANITIZED) tests/helpers" -m "not prove and not alone and not integration" -k "not dali" $(SANITIZER_TESTS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(MAKE) docs

# The documentation as a site, in build/site: a link or an anchor that leads nowhere is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Against other loaders, each in an environment of its own below .peers/; CONTESTANTS=a,b takes only those.
WORK ?= all
ROUNDS ?= 5
peers: $(VENV)/.test
	-$(BIN)/python -m profiles.peers.environments
	$(BIN)/python -m profiles.peers --work $(WORK) --rounds $(ROUNDS) $(if $(CONTESTANTS),--contestants $(CONTESTANTS)) --out profiles/results

# What needs a GPU, in ten minutes: docs/gpu.md. Without one, TINY=1 rehearses it.
gpu: $(VENV)/.test
	$(BIN)/python -m profiles.gpu_session $(if $(PART),--part $(PART)) $(if $(TINY),--tiny) $(if $(ONLY),--only $(ONLY))

# What is carried to a machine with a GPU and without a network; GPU_PYTHON is of the version that it has.
GPU_PYTHON ?= python3.12
gpu-bundle:
	$(GPU_PYTHON) -m profiles.gpu_bundle

clean:
	rm -rf .venv .venv-* .peers .gpu-bundle build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
