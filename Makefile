# The two commands of the README are `make demo` and `make test`; both install what they need first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs
ALL_STAMP := $(VENV)/.all

.DEFAULT_GOAL := help
.PHONY: help install demo recipes notebooks docs test test-all test-p2p beside lint unit integration all-pairs all-modules bench bench-start bench-memory bench-profiler bench-network bench-scaling bench-planner faults fuzz gpu clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# Two thirds of what is installed are never imported: the rest is compiled when it is, and kept.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch numpy
	# compat: the clone itself is importable, with the recipes, which the wheel does not hold.
	$(PIP_INSTALL) --config-settings editable_mode=compat --editable '.[recipes,plots,wandb,serve,tune,data,dev]'
	touch $@

install: $(STAMP)  ## Make .venv with everything

demo: install  ## Train a byte-level GPT on two pipeline stages with stashed weights
	$(BIN)/python -m recipes.train fit --config recipes/configs/gpt_pipedream.yaml

recipes: install  ## Run each recipe whole and compare its result with the documented one; RECIPES= names some
	$(BIN)/python -m recipes check $(RECIPES)

notebooks: install  ## Run the lessons and store their outputs
	$(BIN)/python -m tests.helpers.notebooks

test: install $(DOCS_STAMP)  ## Run the checks and the tests, of most matrices the telling cells
	$(MAKE) --no-print-directory --jobs=2 beside integration

# The rest fills the time in which ranks wait for each other. Its output comes when it has ended.
beside: install $(DOCS_STAMP)
	@nice -n 10 $(MAKE) --no-print-directory --output-sync=target lint docs unit

$(ALL_STAMP): $(STAMP)
	# Whose tests take long.
	$(PIP_INSTALL) bitsandbytes onnx onnxruntime onnxscript mlflow-skinny
	touch $@

test-all: $(ALL_STAMP)  ## As `test`, with all cells of all tests; hours
	$(MAKE) --no-print-directory test ALL=--all

$(DOCS_STAMP): $(STAMP)
	$(PIP_INSTALL) furo myst-nb sphinx
	touch $@

docs: $(DOCS_STAMP)  ## Build the site, docs/_build/html/index.html, with warnings as errors
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --conf-dir docs \
	  --doctree-dir docs/_build/doctrees . docs/_build/html

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.helpers.words

P2P_TESTS := tests/integration/pipeline/parity tests/integration/pipeline/rebalance \
  tests/integration/pipeline/test_outputs_and_logs.py tests/integration/pipeline/test_checkpoints.py \
  tests/integration/mesh/test_parity.py tests/integration/mesh/test_tied.py \
  tests/integration/mesh/test_dropout.py tests/integration/mesh/test_sharded_stages.py

unit: install
	$(BIN)/python -m pytest tests/unit $(ALL)

integration: install
	$(if $(ALL),WORKERS_START_BY=spawn )$(BIN)/python -m pytest tests/integration tests/differential tests/faults \
	  --durations=40 $(ALL)

test-p2p: install  ## Run the tests of parity with tensors sent point to point between stages
	$(BIN)/python -m pytest $(P2P_TESTS) --transport p2p $(ALL)

all-pairs: install  ## Let each layout resume each other's checkpoint, where the tests have some pairs
	$(BIN)/python -m pytest tests/integration/conformance/states/test_checkpoints.py --all

all-modules: install  ## Train each ordinary module under each strategy, where the tests have some
	$(BIN)/python -m pytest tests/integration/first_hour --all

SECONDS ?= 600
fuzz: install  ## Compare random runs with one device; SECONDS=, RUNS= and SEED= say how long and which
	WORKERS_START_BY=spawn $(BIN)/python -m tests.differential --seconds $(SECONDS) $(if $(RUNS),--runs $(RUNS)) $(if $(SEED),--seed $(SEED))

faults: install  ## Train while processes are killed, stopped, fail; RUNS= and SEED= say how often and which
	$(BIN)/python -m tests.faults $(if $(RUNS),--runs $(RUNS)) $(if $(SEED),--seed $(SEED))

bench: install  ## Print the tables of throughput and bubbles
	$(BIN)/python -m tests.benchmarks.pipeline

bench-start: install  ## Print the time from the launch of two ranks to the end of a step
	$(BIN)/python -m tests.benchmarks.first_step

bench-memory: install  ## Print each strategy's peak memory of a rank beside the formula
	$(BIN)/python -m tests.benchmarks.memory

bench-profiler: install  ## Print what StepProfiler costs a batch
	$(BIN)/python -m tests.benchmarks.profiler

bench-network: install  ## The same model on two hosts of namespaces with a limited link (root, iproute2)
	$(BIN)/python -m tests.benchmarks.network

# An interpreter whose torch is built for CUDA. Its torch stays as it is: what else is needed goes into
# a second environment, which sees the interpreter's packages.
GPU_PYTHON ?= $(PYTHON)
GPU_VENV := .venv-gpu
GPU_BIN := $(GPU_VENV)/bin
GPU_STAMP := $(GPU_VENV)/.installed

$(GPU_STAMP): pyproject.toml
	$(GPU_PYTHON) -c 'import torch'
	$(GPU_PYTHON) -m venv --clear $(GPU_VENV)
	# Not --system-site-packages: of an interpreter in an environment that means the one outside.
	$(GPU_PYTHON) -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' \
	  > $$($(GPU_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/gpu_python.pth
	$(GPU_BIN)/python -c 'import torch; print("torch==" + torch.__version__)' > $(GPU_VENV)/torch.txt
	$(GPU_BIN)/python -m pip install --quiet --constraint $(GPU_VENV)/torch.txt \
	  --config-settings editable_mode=compat --editable '.[plots]' rich pytest pytest-timeout hypothesis
	touch $@

gpu: $(GPU_STAMP)  ## Find out on a GPU what is untested there; GPU_PYTHON= has torch, OPTIONS= go on
	$(GPU_BIN)/python -m tests.gpu $(OPTIONS)

bench-scaling: install  ## Print how messages, memory and start-up grow with the number of ranks
	$(BIN)/python -m tests.benchmarks.scaling

bench-planner: install  ## Print plans beside what they take, for four models on 2 and 4 ranks
	$(BIN)/python -m tests.benchmarks.planner

clean:  ## Remove .venv, the site and caches
	rm -rf $(VENV) $(GPU_VENV) docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
