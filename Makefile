# Everything is set up inside the checkout: .venv for treewire, .venv-proto for the generator of treewire/v1, .venv-sglang for
# the tests that run SGLang.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTO_OUT ?= .
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip
# So many processes run the tests, each whole files, the long ones first (tests/conftest.py); WORKERS=0 runs them in this one.
WORKERS ?= 2
PYTEST_FLAGS := -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 15
.DEFAULT_GOAL := help

.PHONY: help install demo test test-browser chromium iproute2 test-sglang gpu-check gpu-check-sglang lint format proto conformance-reference compose-test bench peers simulator-check docs-benchmarks bench-micro bench-overhead bench-adaptive bench-split bench-memory soak soak-sessions bench-ablation bench-structures bench-seeded docs-reference chaos load clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## set up .venv with everything, developer tools included

$(VENV)/.installed: pyproject.toml constraints.txt constraints-xgrammar.txt
	@command -v $(PYTHON) >/dev/null || { echo "python 3.11 or newer is needed: set PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit("python %d.%d is too old, treewire needs 3.11" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo "setting up $(VENV); PyTorch is the large part of it"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@$(PIP) install --quiet --no-deps --requirement constraints-xgrammar.txt
	@touch $@

.venv-proto/.installed: protos/requirements.txt
	@test -x .venv-proto/bin/python || $(PYTHON) -m venv .venv-proto
	@PIP_DISABLE_PIP_VERSION_CHECK=1 .venv-proto/bin/python -m pip install --quiet --requirement protos/requirements.txt
	@touch $@

conformance-reference: .venv-conformance/.installed ## fetch the public DFlash reference that the drafter is tested against

.venv-conformance/.installed: tests/conformance/requirements.txt | install
	@$(PIP) install --quiet --no-deps --target .venv-conformance --upgrade --requirement $<
	@touch $@

demo: install ## start the stack with the default model, stream an answer, show how speculation went
	@$(BIN)/treewire demo

test: install .venv-proto/.installed .venv-conformance/.installed chromium iproute2 ## lint, then run every test on the real small model and the simulated one
	@$(MAKE) --no-print-directory lint
	@$(BIN)/python -m treewire.weights smollm2-135m
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

# Without dependencies: SGLang's own would bring CUDA. torch is the build that pip finds; one for CPUs is wanted.
.venv-sglang/.installed: constraints-sglang.txt $(wildcard tests/sglang_platform/*.toml tests/sglang_platform/*/*.py)
	@command -v $(PYTHON) >/dev/null || { echo "python 3.11 is needed: set PYTHON=/path/to/python3"; exit 1; }
	@echo "setting up .venv-sglang: SGLang, PyTorch and Triton, 0.6 GB to fetch"
	@test -x .venv-sglang/bin/python || $(PYTHON) -m venv .venv-sglang
	@PIP_DISABLE_PIP_VERSION_CHECK=1 .venv-sglang/bin/python -m pip install --no-deps --requirement constraints-sglang.txt
	@PIP_DISABLE_PIP_VERSION_CHECK=1 .venv-sglang/bin/python -m pip install --quiet --no-deps --no-build-isolation tests/sglang_platform
	@.venv-sglang/bin/python -c 'import torch' || { echo "this torch needs CUDA packages: let pip find a CPU build of it"; exit 1; }
	@touch $@

test-sglang: .venv-sglang/.installed ## run the target engine on SGLang against its contract, and our Triton kernel, on this CPU
	@.venv-sglang/bin/python -m treewire.weights smollm2-135m
	.venv-sglang/bin/python -m pytest tests/sglang -v $(PYTEST_FLAGS)

gpu-check: install ## try this GPU: graphs against eager runs, attention, step times, then SGLang where it is installed
	$(BIN)/python -m tests.gpu.check $(if $(OUTPUT),--output $(OUTPUT))
	@$(MAKE) --no-print-directory gpu-check-sglang

gpu-check-sglang: ## try tree backends and graphs of SGLang on this GPU, with the python of SGLANG_PYTHON
	$(or $(SGLANG_PYTHON),$(BIN)/python) -m tests.gpu.sglang_check

test-browser: install chromium ## drive the playground in headless Chromium
	$(BIN)/python -m pytest -m browser

chromium:
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null; } || \
		{ echo "the playground's tests need chromium on the PATH: install it, or run this as root where apt-get is"; exit 1; }
	@command -v chromium >/dev/null || { echo "installing chromium"; apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; }

# Tests of several machines make network namespaces with `ip`; they skip where it is not, unless TREEWIRE_NO_SKIPS is 1.
iproute2:
	@command -v ip >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || { echo "installing iproute2"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends iproute2 >/dev/null; }

lint: install ## check style, types, imports and protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/buf lint

format: install ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format -w

proto: .venv-proto/.installed ## generate treewire/v1 from protos/ with the oldest supported generator
	@mkdir -p $(PROTO_OUT)
	@PATH="$(CURDIR)/.venv-proto/bin:$$PATH" python -m grpc_tools.protoc -Iprotos --python_out=$(PROTO_OUT) --grpc_python_out=$(PROTO_OUT) \
		--mypy_out=quiet:$(PROTO_OUT) --mypy_grpc_out=quiet:$(PROTO_OUT) protos/treewire/v1/*.proto

compose-test: install ## bring the compose stack up on a Docker engine, stream through it, kill, pause, restart and cut off its containers
	$(BIN)/python -m tests.compose.stack_check --json benchmarks/results/compose.json --log benchmarks/results/compose_log.txt

chaos: install ## kill, stop and restart processes under load, simulated and real engines, and compare every output
	$(BIN)/python -m tests.chaos.chaos --generations 2000 --json benchmarks/results/chaos.json
	$(BIN)/python -m tests.chaos.chaos --target smollm2-135m --generations 50 --concurrency 4 --distinct 10 --verify 2 --draft 1 \
		--mean-pause-seconds 5 --json benchmarks/results/chaos_real.json

SOAK_SECONDS ?= 900
soak: install ## the same for 15 minutes (SOAK_SECONDS) with light load; resident memory must stay flat
	$(BIN)/python -m tests.chaos.chaos --soak-seconds $(SOAK_SECONDS) --generations 100 --concurrency 6 --step-seconds 0.05 \
		--mean-pause-seconds 10 --spared gateway,verify,draft --json benchmarks/results/soak.json

load: install ## 1,000 streams at one gateway that runs 256 at once
	$(BIN)/python -m benchmarks.load --json benchmarks/results/load.json

bench: install peers ## compare with peers on this machine: same weights, same prompts, one run
	$(BIN)/python -m benchmarks.peers --dtype int8
	$(BIN)/python -m benchmarks.page

# llama-cpp-python comes as source: it gets ten minutes to build, and what it said is kept. xllamacpp is prebuilt.
peers: .venv-peers/.installed ## set up llama.cpp in an environment of its own, for make bench

.venv-peers/.installed:
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@PIP_DISABLE_PIP_VERSION_CHECK=1 .venv-peers/bin/python -m pip install --quiet xllamacpp==2026.10.11549
	@PIP_DISABLE_PIP_VERSION_CHECK=1 timeout $(or $(PEER_BUILD_SECONDS),600) .venv-peers/bin/python -m pip install llama-cpp-python==0.3.36 \
		> .venv-peers/llama-cpp-python.log 2>&1 || echo "llama-cpp-python did not build: .venv-peers/llama-cpp-python.log"
	@touch $@

simulator-check: install ## compare the simulator's predictions with this machine's stack
	$(BIN)/python -m benchmarks.simulator_check
	$(BIN)/python -m benchmarks.page

docs-benchmarks: install ## write docs/benchmarks.md anew from benchmarks/results
	@$(BIN)/python -m benchmarks.page

bench-micro: install ## time the pure core: tree building, noise, visibility, acceptance
	$(BIN)/python -m benchmarks.micro.core

bench-overhead: install ## host time of a round beside the models, and rounds a second of 64 streams
	$(BIN)/python -m benchmarks.micro.overhead --json benchmarks/results/overhead.json

bench-adaptive: install ## the adaptive budget beside fixed ones and plain decoding, 1 to 16 streams
	$(BIN)/python -m benchmarks.adaptive --json benchmarks/results/adaptive.json

bench-split: install ## the price of the split: three processes beside one, on the same model
	$(BIN)/python -m benchmarks.split --json benchmarks/results/split.json

bench-memory: install ## resident memory of each service, with 256 streams open
	$(BIN)/python -m benchmarks.memory --json benchmarks/results/memory.json

soak-sessions: install ## 20,000 rounds of random sessions; pages and memory must be back at the baseline
	TREEWIRE_SOAK_ROUNDS=20000 $(BIN)/python -m pytest tests/engines/test_soak.py

bench-ablation: install ## tokens a round by tree, acceptance rule and temperature; MODEL, DRAFTER
	$(BIN)/python -m benchmarks.ablation.sampling --model $(or $(MODEL),smollm2-135m) --drafter $(or $(DRAFTER),dflash)

bench-structures: install ## answers to 50 prompts in JSON of a schema, at temperatures 0 and 1, and what the schema does to acceptance
	$(BIN)/python -m benchmarks.structures --dtype int8 --json benchmarks/results/structures.json

bench-seeded: install ## seeded answers of the real model, with chains and trees, alone and in company, beside plain sampling
	$(BIN)/python -m benchmarks.seeded --json benchmarks/results/seeded.json

docs-reference: install ## write docs/configuration.md anew from the settings
	@$(BIN)/python -m treewire.runtime.reference > docs/configuration.md

clean: ## remove what install and the tests made
	rm -rf $(VENV) .venv-proto .venv-conformance .venv-sglang .venv-peers .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
