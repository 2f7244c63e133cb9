# Everything is installed into .venv from hashed locks, and every cache lies in it: `make clean` leaves no trace.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin

# The newest that really starts: version managers leave commands for versions they do not have.
SUITABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	"$$p" -c "$(SUITABLE)" >/dev/null 2>&1 && { echo "$$p"; break; }; done)

# From PyPI, plain `pip install torch` is a CUDA build of several GB. TORCH_PIP= (empty) takes what pip finds itself.
TORCH ?= 2.13.0
TORCH_PIP ?= --index-url https://download.pytorch.org/whl/cpu
TRITON ?= 3.6.0

UV ?= uv
SWEEP ?= quickstart

# Tools write beside the sources or into the home directory unless told otherwise.
CACHE := $(CURDIR)/$(VENV)/cache
test test-slow lint format notebooks: export XDG_CACHE_HOME := $(CACHE)
notebooks notebooks-sync: export IPYTHONDIR := $(CACHE)/ipython
notebooks notebooks-sync: export JUPYTER_DATA_DIR := $(CACHE)/jupyter
export PYTHONPYCACHEPREFIX := $(CACHE)/pycache
export RUFF_CACHE_DIR := $(CACHE)/ruff
export HYPOTHESIS_STORAGE_DIRECTORY := $(CACHE)/hypothesis
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Neither a folder of the caller's nor his own packages may stand in for what the lock names.
unexport PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE := 1
# Images set this one for layers without bytecode; here it lies in .venv, and without it every process compiles anew.
unexport PYTHONDONTWRITEBYTECODE

# A stamp carries the hash of what it was made from, so an edited lock installs again and an unchanged one never does.
hash = $(shell cat $(1) 2>/dev/null | sha256sum | cut -c1-16)
CORE := $(VENV)/core-$(call hash,locks/build.lock locks/core.lock pyproject.toml)
TOOLS := $(VENV)/tools-$(call hash,locks/build.lock locks/core.lock locks/test.lock pyproject.toml)
NVRTC := $(VENV)/nvrtc-$(call hash,locks/nvrtc.lock)
PIP = $(BIN)/python -m pip install --quiet --no-input

# `alone` tests keep the cores busy or measure time; the rest share them. A file is one worker's, so that what its tests
# share is made once, and files go in their order, whose last are short.
PYTEST := $(BIN)/python -m pytest -o cache_dir=$(CACHE)/pytest

# Another interpreter than the one .venv was made with: make it anew.
version = $(shell $(1) -c 'import sys; print(sys.version)' 2>/dev/null)
ifneq ($(filter command environment,$(origin PYTHON)),)
ifneq ($(wildcard $(BIN)/python),)
ifneq ($(call version,$(PYTHON)),$(call version,$(BIN)/python))
.PHONY: $(BIN)/python $(CORE) $(TOOLS) $(NVRTC)
endif
endif
endif

.PHONY: help quickstart setup kernels prebuild env-deepep_v1 env-deepep_v2 env-nccl_ep env-deepgemm lock-envs test test-slow gpu-check prove bench notebooks notebooks-sync evidence lint format torch triton nvrtc lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9_-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quickstart: setup kernels ## install, build the CPU kernels, run sweeps/quickstart.yaml; prints a table and the run's path
	@$(BIN)/epcross run sweep=$(SWEEP)

setup: $(CORE) ## create .venv from the hashed lock (PYTHON=... chooses the interpreter)

$(BIN)/python:
	@python='$(PYTHON)'; \
	if [ -z "$$python" ]; then \
	  for p in python3.13 python3.12 python3.11 python3; do \
	    if "$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; then \
	      echo "$$($$p -V) has no venv or ensurepip module. Install it (Debian, Ubuntu: apt install python3-venv)," \
	        "or name another interpreter: make PYTHON=/path/to/python3" >&2; exit 1; fi; done; \
	  echo "No Python 3.11, 3.12 or 3.13 on PATH. Install one," \
	    "or name it: make PYTHON=/path/to/python3" >&2; exit 1; fi; \
	"$$python" -c '$(SUITABLE)' >/dev/null 2>&1 || { \
	  echo "PYTHON=$$python does not start, is not Python 3.11 to 3.13, or has no venv and ensurepip modules." \
	    "Name another, or leave PYTHON out to take the newest on PATH." >&2; exit 1; }; \
	echo "Creating $(VENV) with $$("$$python" -V)"; \
	rm -rf $(VENV); \
	"$$python" -m venv $(VENV)

# setuptools first, from its own lock: the source-only dependency is then built with it rather than with a fresh download.
$(CORE): | $(BIN)/python
	@echo "Installing locks/core.lock into $(VENV)"
	@rm -f $(VENV)/core-* $(VENV)/tools-* $(VENV)/nvrtc-*
	@$(PIP) --require-hashes -r locks/build.lock
	@$(PIP) --require-hashes --no-build-isolation -r locks/core.lock
	@$(PIP) --no-deps --no-build-isolation --editable .
	@rm -rf src/epcross.egg-info
	@touch $@

$(TOOLS): $(CORE)
	@echo "Installing locks/test.lock into $(VENV)"
	@rm -f $(VENV)/tools-*
	@$(PIP) --require-hashes --no-build-isolation -r locks/test.lock
	@touch $@

kernels: $(CORE) ## build the shared-memory kernels (needs a C++20 compiler)
	@$(BIN)/python -m epcross.kernels.shm.build || { \
	  echo "Repeat the command then. What works without these kernels: $(BIN)/epcross plan sweep=$(SWEEP)," \
	    "$(BIN)/epcross backends, and with torch (make torch) $(BIN)/epcross run sweep=$(SWEEP) backend=gloo" >&2; exit 1; }

test: $(TOOLS) lint ## lint and every test; skips with a sentence what this machine lacks (a failure under CI=true)
	@failed=0; \
	$(PYTEST) -m 'alone and not slow' || [ $$? -eq 5 ] || failed=1; \
	$(PYTEST) -m 'not alone and not slow' -n 2 --dist loadfile --no-loadscope-reorder || failed=1; \
	exit $$failed

test-slow: $(TOOLS) ## the tests left out of `make test` for their length
	@$(PYTEST) -m slow

prove: setup ## check the model of the protocols exhaustively, and find every seeded fault (needs spin and a C compiler)
	@$(BIN)/python -m epcross.kernels.model.check

bench: setup kernels ## judge the speed of the CPU kernels against each other, gloo and the floor (RUN=... an earlier run)
	@$(BIN)/python tests/benchmark/speed.py $(RUN)

notebooks: $(TOOLS) ## execute every notebook; with outputs they lie in build/notebooks (NAME=01_quickstart for one)
	@$(BIN)/python -m epcross.harness.analysis.notebooks $(NAME)

notebooks-sync: $(TOOLS) ## make both files of each notebook agree; the newer one wins
	@$(BIN)/jupytext --quiet --sync notebooks/*.py

evidence: setup ## make every figure and number of the documents anew from results/measured (RUN=... commits a run first)
	@$(BIN)/python -m epcross.harness.analysis.evidence $(RUN)

gpu-check: $(TOOLS) ## everything that needs a GPU: tests, smoke, contract (STEPS=one_launch,... takes sweeps; see tests/gpu/check.py)
	@$(BIN)/python tests/gpu/check.py $(if $(STEPS),--steps $(STEPS))

lint: $(TOOLS) ## ruff and pyright
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright --pythonpath $(BIN)/python

format: $(TOOLS) ## apply ruff's fixes and formatting
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

# What is compiled by shape is compiled by running once: each point of the sweep, verified, into build/prebuild.
prebuild: nvrtc ## compile the GPU kernels for every architecture, or those in ARCH=... (sweep=NAME warms vendors' too, on GPUs)
	@$(BIN)/python -m epcross.kernels.onesided.prebuild $(ARCH)
	@$(if $(sweep),$(BIN)/epcross run sweep=$(sweep) timing=warm output_dir=build/prebuild,:)

# A backend whose library wants another NCCL, or shares its import name, has an environment of its own. Wheels are for
# Python 3.12. Dependencies are left to the lock: what torch names may stand there in another version.
ENVS := $(VENV)/envs
ENV_PYTHON ?= python3.12
MACHINE := $(shell uname -m)

env-deepep_v1: $(ENVS)/deepep_v1/.ready ## build the environment of deepep_ll and deepep_normal, and their layers (ENV_PYTHON=python3.12)
env-deepep_v2: $(ENVS)/deepep_v2/.ready ## build the environment of deepep_v2 and deepep_v2_max, and their layer
env-nccl_ep: $(ENVS)/nccl_ep/.ready ## build the environment of nccl_ep and nccl_ep_ht
env-deepgemm: $(ENVS)/deepgemm/.ready ## build the environment of megamoe

$(ENVS)/%/.ready: locks/envs/%.$(MACHINE).lock
	@"$(ENV_PYTHON)" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1 || { \
	  echo "The libraries of $* have wheels for Python 3.12 alone, and $(ENV_PYTHON) does not start, is another version or" \
	    "has no venv and ensurepip modules. Name one: make env-$* ENV_PYTHON=/path/to/python3.12" >&2; exit 1; }
	@echo "Installing $< into $(ENVS)/$*"
	@rm -rf $(ENVS)/$*
	@mkdir -p $(ENVS)
	@"$(ENV_PYTHON)" -m venv $(ENVS)/$*
	@$(ENVS)/$*/bin/python -m pip install --quiet --no-input --no-deps --require-hashes -r $<
	@touch $@

lock-envs: ## write locks/envs anew for x86-64 and aarch64 (needs uv)
	@command -v $(UV) >/dev/null || { \
	  echo "make lock-envs needs uv. Install it (pipx install uv), or name it: make lock-envs UV=/path/to/uv" >&2; exit 1; }
	@export UV_CUSTOM_COMPILE_COMMAND='make lock-envs'; cd locks/envs; \
	for name in deepep_v1 deepep_v2 nccl_ep deepgemm; do for machine in x86_64 aarch64; do \
	  $(UV) pip compile --quiet --upgrade --python-version 3.12 --python-platform $$machine-manylinux_2_28 \
	    --only-binary :all: --generate-hashes $$(if grep -q nvidia-nccl $$name.in; then echo --override nccl.override; fi) \
	    $$name.in -o $$name.$$machine.lock; done; done

nvrtc: $(NVRTC) ## add the compiler of the GPU kernels (needs no GPU)

$(NVRTC): $(CORE)
	@echo "Installing locks/nvrtc.lock into $(VENV)"
	@rm -f $(VENV)/nvrtc-*
	@$(PIP) --require-hashes -r locks/nvrtc.lock
	@touch $@

torch: $(CORE) ## add CPU torch, for the gloo baseline (TORCH=2.13.0, TORCH_PIP=pip's index options)
	@$(PIP) $(TORCH_PIP) torch==$(TORCH)

triton: $(CORE) ## add Triton, whose interpreter runs the experts' kernels on a CPU (TRITON=3.6.0)
	@$(PIP) triton==$(TRITON)

lock: ## write the locks anew from pyproject.toml (needs uv)
	@command -v $(UV) >/dev/null || { \
	  echo "make lock needs uv. Install it (pipx install uv), or name it: make lock UV=/path/to/uv" >&2; exit 1; }
	@lock='$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --upgrade'; \
	export UV_CUSTOM_COMPILE_COMMAND='make lock'; \
	$$lock locks/build.in -o locks/build.lock; \
	$$lock -c locks/build.lock pyproject.toml -o locks/core.lock; \
	$$lock -c locks/core.lock --extra test --extra lint --extra notebooks pyproject.toml -o locks/test.lock; \
	$$lock -c locks/core.lock locks/nvrtc.in -o locks/nvrtc.lock

clean: ## remove .venv and with it every cache
	@rm -rf $(VENV) src/epcross.egg-info build dist
