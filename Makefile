# make setup | train | quick | test | slice | test-all | check | bench | pages | docs | wheel | pictures
#
#   make setup TORCH=keep   uses the PyTorch that is already installed (vendor containers)
#   make train RECIPE=my.toml ARGS="train.steps=50"

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
RECIPE ?= examples/language.toml
ARGS   ?=
SITE   ?= site

ifeq ($(TORCH),keep)
VENV_FLAGS := --system-site-packages
PIP_FLAGS  :=
else
VENV_FLAGS :=
PIP_FLAGS  := -c constraints.txt
endif

PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

BROWSER ?= chromium

.PHONY: setup setup-dev train quick test slice test-all check bench pages docs wheel pictures clean

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Espalier needs Python 3.11 or newer; this is $$($(PYTHON) --version). Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml accelerators/pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -e '.[dev]' -e ./accelerators
	@touch $@ $(VENV)/.installed $(VENV)/.installed-docs

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -e '.[docs]'
	@touch $@ $(VENV)/.installed

train: setup
	$(BIN)/espalier train $(RECIPE) $(ARGS)

quick: setup-dev # the tests that start no process
	$(PYTEST) --quick $(ARGS)

test: setup-dev # all but those marked slow or soak
	$(PYTEST) $(ARGS)

test-all: setup-dev
	$(PYTEST) -m "" $(ARGS)

check: setup-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python .ci/lines.py
	@$(BIN)/python .ci/arrows.py
	@$(BIN)/python .ci/slice.py --oldest

slice: setup-dev # of the slow tests; SLICE=K another than that of this commit
	$(BIN)/python .ci/slice.py $(SLICE)

bench: setup-dev
	$(BIN)/python bench/language.py $(ARGS)
	$(BIN)/python bench/buff.py $(ARGS)
	$(BIN)/python bench/processors.py $(ARGS)
	$(BIN)/python bench/amsp.py $(ARGS)

pages: setup-dev # those that are made from the code, its records, measured tables and plans
	$(BIN)/python bench/systems.py docs
	$(BIN)/python bench/reference_pages.py docs
	NPY_DISABLE_CPU_FEATURES='X86_V3 X86_V4 AVX512_ICL AVX512_SPR' $(BIN)/python bench/advice.py > docs/advice.md
	$(BIN)/python bench/papers.py > docs/papers.md

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --site-dir $(SITE)
	@echo "Open $(SITE)/index.html"

wheel: setup-dev
	$(BIN)/python -m hatchling build --target wheel
	$(BIN)/python -m twine check --strict dist/*.whl
	$(BIN)/python -m check_wheel_contents dist

pictures: setup # trains the run that README describes; on a machine with nothing else to do
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python bench/pictures.py docs/images $(BROWSER)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
