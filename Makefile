# make demo    train a small model in BF16 and in FP8 on this machine and compare them
# make test    style, types and all tests
# make lint    style and types only
# make clean   remove the environment and what the tools left behind
#
# Every target first sets up $(VENV), once. PyTorch comes from the first of these that exists:
#   1. $(VENV) itself, or the Python that makes it, when either already has PyTorch 2.11 or newer
#   2. TORCH=…, any arguments of `pip install`: make test TORCH="torch==2.11.0 --index-url …"
#   3. without a GPU, the CPU build (200 MB); with one, the newest CUDA build (some GB)

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
TORCH ?=

BIN := $(VENV)/bin
READY := $(VENV)/.octavo-ready
HAS_TORCH := -c "import torch; assert tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 11)" 2>/dev/null
CPU_TORCH := torch==2.13.0+cpu
CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: demo test lint clean
.DEFAULT_GOAL := test

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
		$$($(PYTHON) $(HAS_TORCH) && echo --system-site-packages)
	$(BIN)/python $(HAS_TORCH) || $(MAKE) --no-print-directory torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.PHONY: torch
torch:
ifneq ($(TORCH),)
	$(BIN)/python -m pip install --quiet $(TORCH)
else ifeq ($(shell uname -s)$(shell command -v nvidia-smi),Linux)
	$(BIN)/python -m pip install --quiet '$(CPU_TORCH)' || \
		$(BIN)/python -m pip install --quiet '$(CPU_TORCH)' --extra-index-url $(CPU_INDEX)
else
	$(BIN)/python -m pip install --quiet 'torch>=2.11'
endif

demo: $(READY)
	OMP_WAIT_POLICY=passive $(BIN)/octavo demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist *.egg-info
