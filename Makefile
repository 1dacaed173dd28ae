# make run and make test do everything on a fresh machine; what they need is Python 3.10 or newer, or: make PYTHON=python3.12 test
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SETUP  := setup.py setup.cfg pyproject.toml constraints.txt
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SEEDS  ?= 5000
RUNS   ?= 100
MINUTES ?= 10
# Programs that the tests of engines want, and the packages that have them.
ENGINES = sshd slurmd munged prometheus chromium
ENGINE_PACKAGES = openssh-server slurm-wlm munge prometheus chromium
JOBS   ?= 4
# Most tests wait, so more of them run side by side than there are cores. Six take longer: they are in each other's way.
PYTEST  = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# Without compiled files each of the thousands of processes that the tests start compiles all of zmqdist.
unexport PYTHONDONTWRITEBYTECODE
# Packages of another Python, or of another checkout, would go before those of .venv.
unexport PYTHONPATH

.DELETE_ON_ERROR:
.PHONY: help run test test-all test-engines endurance campaign lint types layers wheel-check versions constraints sim protocol machines transcripts clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 22

run: $(VENV)/ready-run ## the main job: train on the digits, on a cluster of this machine
	. $(BIN)/activate && zmqdist launch configs/digits.yaml

test: $(VENV)/ready-dev ## the tests, and the code blocks of README.md and docs/: under five minutes on two cores
	$(PYTEST) --tier test

test-all: $(VENV)/ready-dev ## the rest, too: benchmark programs, full training, planted bugs, long faults; other Pythons
	$(PYTEST) --tier all
	$(PYTHON) .ci/versions.py

test-engines: $(VENV)/ready-dev ## clusters on hosts, by ssh, Slurm, Kubernetes and Ray, as root: it installs what they need with apt-get, and says why it skips
	@(for each in $(ENGINES); do PATH=$$PATH:/usr/sbin command -v $$each > /dev/null || exit 1; done) || apt-get install --quiet --quiet --yes $(ENGINE_PACKAGES) || echo "not installed: $(ENGINE_PACKAGES)"
	$(PIP) -e '.[engines]'
	$(BIN)/python -m pytest tests/engines --timeout 600

endurance: $(VENV)/ready-dev ## the waiting tests again and again under load, in pieces: make endurance RUNS=100 MINUTES=10
	$(BIN)/python -m tests.endurance --runs $(RUNS) --minutes $(MINUTES)

campaign: $(VENV)/ready-dev ## faults made on purpose, in pieces: make campaign MINUTES=10; hosts and cut cables, as root
	$(BIN)/python -m tests.campaigns --minutes $(MINUTES)
	$(BIN)/python -m pytest tests/campaigns --timeout 1200

lint: $(VENV)/ready-dev ## ruff's rules and its format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready-dev ## mypy --strict on the package, the command and the simulations
	@mkdir -p .mypy_cache/path && ln -sfn ../../cli .mypy_cache/path/zmqdist_cli
	MYPYPATH=.mypy_cache/path $(BIN)/mypy -p zmqdist -p zmqdist_cli -p tests.sim.simulations

layers: $(VENV)/ready-dev ## who may import whom (.importlinter)
	$(BIN)/lint-imports

wheel-check: $(VENV)/ready-dev ## build the archive and the wheel; install and import that wheel in a place of its own
	.ci/wheel-check $(BIN)/python

versions: ## the pure tests on Python 3.10, 3.12 and 3.13, with minimum, pinned and newest versions of what zmqdist needs
	$(PYTHON) .ci/versions.py

constraints: ## write constraints.txt anew, with the newest versions; this needs Python 3.10 to 3.13
	$(PYTHON) .ci/constraints.py

sim: $(VENV)/ready-dev ## a long run of the simulated cluster: make sim SEEDS=5000
	$(BIN)/python -m pytest tests/sim --seeds $(SEEDS) --timeout 3600

protocol: $(VENV)/ready-dev ## write the list of docs/protocol.md anew
	$(BIN)/python docs/generate_protocol.py

machines: $(VENV)/ready-dev ## write docs/machines.md anew
	$(BIN)/python docs/generate_machines.py

transcripts: $(VENV)/ready-dev ## write the effects in the folders `transcripts` of tests/ anew; read the difference
	TRANSCRIPTS=write $(BIN)/python -m pytest $(patsubst %/transcripts,%/test_machine.py,$(shell find tests -name transcripts -type d))

clean: ## remove what make, the tests and the example have made
	rm -rf $(VENV) .venvs .editable build dist *.egg-info digits.png
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One environment for all; a stamp tells what is in it, and a change of the packaging installs again.
$(VENV)/ready-run: $(SETUP) | $(BIN)/python
	$(PIP) -e '.[examples]'
	touch $@

$(VENV)/ready-dev: $(SETUP) | $(BIN)/python
	$(PIP) -e '.[dev,examples]'
	@# Else each process of pytest compiles all the tests in its first run.
	$(BIN)/python -m pytest --collect-only -qq --tier all > $(VENV)/collected.txt
	touch $@ $(VENV)/ready-run

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("$(PYTHON) is Python %d.%d and zmqdist needs 3.10: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
