# One front door. Every recipe makes its own set-up; nothing but Python 3.11+ and make is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench docs clean

help:  ## list the recipes
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check "torch==2.13.0" || true
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[dev]"
	touch $@

setup: $(STAMP)  ## make the virtual environment with everything that tests need

demo: $(STAMP)  ## show what Penstock does, in under a minute
	$(BIN)/penstock demo

test: $(STAMP)  ## run the tests
	$(BIN)/python -m pytest

check: $(STAMP)  ## formatting, lint, types, imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .venv-peers build dist
