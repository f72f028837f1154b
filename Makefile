# Two commands do all of their set-up: make demo, make test. Running either again is quick.
#
#   make demo                  generate, compile, prove, import and train with the default kernel
#   make test                  the tests, under ten minutes on two cores
#   make demo SYSTEM=1         with the interpreter at hand (PYTHON=...) and nothing installed: for a GPU machine
#   make test SYSTEM=1         that reaches no registry but has torch, jinja2, typer, rich and pytest
#   make lint | slow | pycuda  what CI runs beside the tests; make long: what nobody waits for
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
# The release whose CPU build is taken where there is no GPU.
TORCH_CPU := torch==2.13.0
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
HAS_NVCC := $(shell { nvcc --version || /usr/local/cuda/bin/nvcc --version; } >/dev/null 2>&1 && echo yes)

ifdef SYSTEM
  RUN := PYTHONPATH=$(CURDIR)/gen$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON)
  READY :=
  READY_DEV :=
else
  RUN := $(VENV)/bin/python
  READY := $(VENV)/.ready
  READY_DEV := $(VENV)/.ready-dev
endif
EXTRAS := $(if $(HAS_NVCC),,[nvcc])

.PHONY: demo test slow long lint pycuda clean
demo: $(READY)
	$(RUN) examples/demo.py

test: $(READY_DEV)
	$(RUN) -m pytest -m "not slow and not long and not gpu" $(if $(SYSTEM),,-n 2 --dist worksteal) $(PYTEST_ARGS)

slow: $(READY_DEV)
	$(RUN) -m pytest -m "slow and not gpu" $(if $(SYSTEM),,-n 2 --dist worksteal) $(PYTEST_ARGS)

long: $(READY_DEV)
	$(RUN) -m pytest -m "long and not gpu" $(if $(SYSTEM),,-n 2 --dist worksteal) $(PYTEST_ARGS)

lint: $(READY_DEV)
	$(RUN) -m ruff format --check gen tests tools examples
	$(RUN) -m ruff check gen tests tools examples
	$(RUN) -m mypy

pycuda: $(READY_DEV)
	bash tools/install_pycuda.sh $(RUN)
	$(RUN) -m pytest tests/test_compile.py -k pycuda

$(VENV)/.ready: pyproject.toml | $(VENV)/bin/python host-compiler
	$(if $(HAS_GPU),,$(VENV)/bin/python -m pip install --quiet "$(TORCH_CPU)")
	$(VENV)/bin/python -m pip install --quiet numpy -e ".$(EXTRAS)"
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(VENV)/bin/python -m pip install --quiet -e ".[dev]"
	touch $@

# $(call apt_install,what is missing,the packages that bring it)
apt_install = { echo "$(1) is missing: apt-get install $(2)"; \
  if [ $$(id -u) = 0 ]; then apt-get -qq update && apt-get -qq install -y --no-install-recommends $(2) >/dev/null; \
  else echo "type: sudo apt-get install $(2)"; exit 1; fi; }

# Debian's python3 makes no venv without a package of its own.
$(VENV)/bin/python:
	@$(PYTHON) -c "import ensurepip" 2>/dev/null || $(call apt_install,ensurepip,python3-venv)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip

# nvcc preprocesses with g++.
.PHONY: host-compiler
host-compiler:
	@command -v g++ >/dev/null || $(call apt_install,g++,g++ libc6-dev)

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
