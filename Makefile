# `make` runs the course, `make test` checks the repository. `make help` lists everything.
#
# Variables: PYTHON (the interpreter that makes the environment), VENV (its folder; an activated conda environment
# works too: make VENV="$CONDA_PREFIX"), NOTEBOOKS (names or numbers, all by default), ARGS (handed to the runner
# or to JupyterLab), PYTEST_ARGS. Package index settings are pip's own (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...).

PYTHON ?= python3
VENV ?= .venv
NOTEBOOKS ?=
ARGS ?=
PYTEST_ARGS ?= -n 2 --dist worksteal

PY := $(VENV)/bin/python
STAMP := $(VENV)/.jfa-installed

# The kernels of two processes share the machine; none of them needs a thread pool of its own.
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1

.DEFAULT_GOAL := notebooks
.PHONY: notebooks write test lint lab figures readme check install clean help

notebooks: $(STAMP) ## execute every notebook into build/notebooks/ and print the table (what plain `make` does)
	$(PY) -m jfa.lab.runner $(ARGS) $(NOTEBOOKS)

write: $(STAMP) ## execute the notebooks and write them back, with outputs, to notebooks/
	$(PY) -m jfa.lab.runner --write $(ARGS) $(NOTEBOOKS)

test: lint ## ruff, pytest, and every notebook in its quick parameters (what CI runs)
	$(PY) -m pytest $(PYTEST_ARGS)

lint: $(STAMP) ## ruff check and ruff format --check, notebooks included
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

lab: $(STAMP) ## open JupyterLab on notebooks/
	$(PY) -m jupyter lab --notebook-dir=notebooks $(ARGS)

figures: $(STAMP) ## redraw every figure of figures/ from its CSV
	$(PY) -m jfa.lab.figures

readme: $(STAMP) ## rewrite the generated table of README.md from the CSVs in figures/
	$(PY) -m jfa.lab.figures --readme

check: $(STAMP) ## print what is installed and assert that TLX imports
	$(PY) -m jfa.lab.pins

install: $(STAMP) ## make the environment and nothing else

clean: ## remove build/ (the environment stays)
	rm -rf build

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { \
	  echo "jfa needs Python 3.11, 3.12 or 3.13, and '$(PYTHON)' is not one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml | $(PY)
	@echo "Installing what pyproject.toml pins; a few minutes, quietly."
	$(PY) -m pip install --quiet --editable '.[course]'
	$(PY) -m jfa.lab.pins --install
	@touch $(STAMP)
