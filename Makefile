# make demo | test | soak | lint | cuda : each sets itself up in .venv first.
PYTHON ?= python3
# Only for the checks of this repository, where the interpreter has no torch of its own; users bring theirs.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)

.PHONY: demo test soak lint cuda clean

demo: $(VENV)/built
	$(BIN)/python examples/generate.py --check $(ARGS)

test: $(VENV)/test
	$(BIN)/python -m pytest $(ARGS)

# The long products: chained pairs and planted mistakes, faults at random moments, and libFuzzer where there is clang++.
soak: $(VENV)/test
	$(BIN)/python tests/soak.py $(ARGS)
	$(BIN)/python tests/test_failures.py --rounds 4
	AFD_FUZZ_SECONDS=60 $(BIN)/python -m pytest -q tests/test_hostile.py -k coverage_guided

lint: $(VENV)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(shell find csrc tests/fuzz -type f)

# Compiles the CUDA half for all its targets; needs nvcc, but neither a GPU nor a CUDA build of torch.
cuda: $(VENV)/built
	mkdir -p build
	AFD_CUDA=1 $(BIN)/python setup.py -q build_ext --build-temp build/cuda --build-lib build/cuda >build/cuda.log 2>&1 \
	|| { cat build/cuda.log; exit 1; }

$(VENV)/python:
	if $(PYTHON) -c "import torch" 2>/dev/null; \
	then $(PYTHON) -m venv --system-site-packages $(VENV); \
	else $(PYTHON) -m venv $(VENV) && $(BIN)/pip install -q "$(TORCH)"; fi
	$(BIN)/pip install -q "setuptools>=77" ninja
	touch $@

$(VENV)/built: $(VENV)/python $(SOURCES)
	$(BIN)/pip install -q --no-build-isolation -e . numpy # numpy: without it torch warns
	touch $@

$(VENV)/test: $(VENV)/built
	$(BIN)/pip install -q --no-build-isolation -e ".[test]"
	touch $@

$(VENV)/lint: $(VENV)/built
	$(BIN)/pip install -q -e ".[lint]" --no-build-isolation
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info afd_ops/*.so
