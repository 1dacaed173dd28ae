# make run and make test do everything on a fresh machine; what they need is Python 3.10 or newer, or: make PYTHON=python3.12 test
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SETUP  := setup.py setup.cfg pyproject.toml
SEEDS  ?= 5000
RERUNS ?= 0

.DELETE_ON_ERROR:
.PHONY: help run test slow lint types layers wheel-check sim protocol clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 22

run: $(VENV)/ready-run ## the main job: train on the digits, on a cluster of this machine
	. $(BIN)/activate && zmqdist launch configs/digits.yaml

test: $(VENV)/ready-dev ## all tests, and the code blocks of README.md and docs/
	$(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart 0 --reruns $(RERUNS) -r aR

slow: $(VENV)/ready-dev ## the tests that take tens of seconds or gigabytes, and are no part of `make test`
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/ready-dev ## ruff's rules and its format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready-dev ## mypy --strict on the package and the command
	@mkdir -p .mypy_cache/path && ln -sfn ../../cli .mypy_cache/path/zmqdist_cli
	MYPYPATH=.mypy_cache/path $(BIN)/mypy -p zmqdist -p zmqdist_cli

layers: $(VENV)/ready-dev ## who may import whom (.importlinter)
	$(BIN)/lint-imports

wheel-check: $(VENV)/ready-dev ## build the archive and the wheel; install and import that wheel in a place of its own
	.ci/wheel-check $(BIN)/python

sim: $(VENV)/ready-dev ## a long run of the simulated cluster: make sim SEEDS=5000
	$(BIN)/python -m pytest tests/sim --seeds $(SEEDS) --timeout 3600

protocol: $(VENV)/ready-dev ## write the table of docs/protocol.md anew
	$(BIN)/python docs/generate_protocol.py

clean: ## remove what make, the tests and the example have made
	rm -rf $(VENV) build dist *.egg-info digits.png
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One environment for all; a stamp tells what is in it, and a change of the packaging installs again.
$(VENV)/ready-run: $(SETUP) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[examples]'
	touch $@

$(VENV)/ready-dev: $(SETUP) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,examples]'
	touch $@ $(VENV)/ready-run

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("$(PYTHON) is Python %d.%d and zmqdist needs 3.10: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
