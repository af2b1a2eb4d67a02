PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint clean

demo: .venv/installed-run  ## train a small GPT in four processes and sample from it
	$(BIN)/fourfold demo

test: .venv/installed-dev  ## run the tests
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: .venv/installed-dev  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed-run: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

.venv/installed-dev: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@ .venv/installed-run
