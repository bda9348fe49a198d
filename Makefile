# make train ARGS="..."   set up .venv if needed, then train
# make test               set up .venv if needed, then everything that a change must pass
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FAST := not slow and not gpu

.PHONY: train test test-slow lint format clean

train: $(STAMP)
	$(BIN)/python examples/pretrain.py $(ARGS)

test test-slow: export OMP_NUM_THREADS = 1

test: lint
	$(BIN)/pytest -q -n 2 -m "$(FAST)" fmeg tests $(ARGS)

test-slow: $(STAMP)
	$(BIN)/pytest -q -n 2 -m "slow and not gpu" tests $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@
