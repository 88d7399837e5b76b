# Everything runs in .venv, which the first target that needs it makes.
#   make TORCH=torch==2.12.0 test    another torch, in a fresh .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
RANKS ?= 2
WORKERS ?= 2
BIN := .venv/bin
QUICK := tests/test_budget.py tests/house/test_architecture.py tests/plan tests/tiles tests/api/test_pattern.py \
	tests/api/test_layout.py tests/api/test_units.py tests/api/test_attention.py tests/api/test_bad_calls.py \
	tests/engine/test_merge.py tests/engine/test_views.py tests/nn/test_spatial.py

# Python and torch of each cell of `matrix`. Other builds of torch than a local one bring several GB of CUDA packages.
CELLS := 3.10-2.8.0 3.11-2.13.0 3.13-2.15.0

# These take all GPUs, and faults are to be noticed in time: a few at once.
ALL_GPUS := tests/tiles/test_gpu_ranks.py tests/exchange/test_faults.py

.PHONY: run test quick matrix gpu lines lint format build bench verify figures pages docs docs-serve clean

run: .venv/run  ## train a language model on the standard library's sources, on RANKS ranks
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train_longnet.py

test: .venv/installed  ## all tests, WORKERS at a time
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

quick: .venv/installed  ## what nearly every change needs, in less than a minute
	$(BIN)/python -m pytest -q -n 2 -m "not slow" $(QUICK)

matrix:  ## the tests of `quick` on the oldest torch and Python, ours, and the newest release
	$(MAKE) --keep-going $(CELLS:%=matrix-%)

matrix-%: .venv-matrix/%/ready
	.venv-matrix/$*/bin/python -m pytest -q -p no:cacheprovider -m "not gpu and not slow" $(QUICK)

gpu: .venv/installed  ## the tests for CUDA devices, on all that there are
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m gpu -n 8 --dist loadgroup $(ALL_GPUS:%=--ignore=%)
	$(BIN)/python -m pytest -m gpu -n 2 $(ALL_GPUS)

lines: .venv/installed  ## lines and files of each room; SINCE=commit: and what changed since then
	$(BIN)/python tests/support/lines.py $(if $(SINCE),--since $(SINCE))

lint: .venv/installed  ## linter, formatter check, type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed  ## let the linter and the formatter fix what they can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

build: .venv/installed  ## wheel and source distribution in dist/, checked
	$(BIN)/pip install --quiet --group build
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

bench: .venv/installed  ## CPU speed against torch's kernel alone and against gathering
	$(BIN)/rda bench --device cpu --segment-lengths 2K,4K,8K --dilation-rates 1,2,4 \
		--seq-len 16K --heads 8 --repeats 5 --baseline kernel,torchscale

verify: .venv/installed  ## sharded against brute force, on 1 to 4 ranks
	$(BIN)/rda verify

figures: .venv/installed  ## the figures of README and docs, light and dark; no change: no diff
	$(BIN)/python benchmarks/figures.py

pages: .venv/installed  ## what pages repeat of the sources, and the outputs of the notebook
	$(BIN)/python docs/pages.py
	$(BIN)/python docs/notebook.py

# Without --quiet, under which mkdocs counts no warnings and --strict lets everything pass.
docs: .venv/installed  ## the docs site in site/; broken links and references fail
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: .venv/installed  ## the docs site on this machine, built anew when a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean:
	rm -rf .venv .venv-matrix dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PRECIOUS: .venv-matrix/%/ready  # make takes it for an intermediate file
# torch comes first, here and below, so that nothing else picks another build of it.
.venv-matrix/%/ready:
	python$(firstword $(subst -, ,$*)) -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --upgrade pip
	$(@D)/bin/pip install --quiet "torch==$(lastword $(subst -, ,$*))"
	$(@D)/bin/pip install --quiet --group test --editable .
	touch $@

.venv/run: pyproject.toml
	test -e $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[cli]"
	touch $@

.venv/installed: .venv/run
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --group dev
	touch $@
