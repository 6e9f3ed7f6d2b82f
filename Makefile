# Two commands matter: `make demo` and `make test`. Each sets up what it needs, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test check format budget sweep drill bench clean

demo: $(VENV)/.train
	$(BIN)/phalanx train examples/demo.toml --prove 1

# Tests run side by side, one process for each of two cores, each with rank processes of its own.
# Whoever is done first takes over what the other has not begun.
WORKERS ?= 2
test: check
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

# For an hour or a night: what `make test` has no time for, and layouts that nobody thought of.
SAMPLE ?= 100
sweep: $(VENV)/.dev
	$(BIN)/python -m pytest -m sweep
	$(BIN)/phalanx verify --pairs
	$(BIN)/phalanx verify --sample $(SAMPLE)

# Every fault, and 300 kills at random instants, against the run that was left alone: an hour or so.
# Kept in drill-*-SEED.jsonl: a drill that was ended goes on where it was.
KILLS ?= 300
SEED ?= 0
drill: $(VENV)/.train
	$(BIN)/phalanx drill examples/drill.toml --faults kill,crash,hang,preempt,corrupt --seed $(SEED) --log drill-faults-$(SEED).jsonl
	$(BIN)/phalanx drill examples/drill.toml --faults random --kills $(KILLS) --steps 100 --seed $(SEED) --log drill-kills-$(SEED).jsonl

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/budget.py

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

budget: $(VENV)/.dev
	$(BIN)/python tools/budget.py --all

$(VENV)/.train: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Phalanx needs Python 3.11 or newer; this is %d.%d. Set PYTHON=python3.11" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train]'
	touch $@

$(VENV)/.dev: $(VENV)/.train
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
