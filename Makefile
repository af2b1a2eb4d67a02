PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-fast test-gpu gpu-check lint api docs site clean

demo: .venv/installed-run  ## plan and train a small GPT in eight processes and sample from it
	$(BIN)/fourfold demo

test: .venv/installed-dev  ## run the tests
	$(BIN)/python -m pytest -n 3 --dist worksteal

test-fast: .venv/installed-dev  ## run the tests for the edit loop: all but whole training runs, plan searches and benchmarks
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow"

# with the Python at hand where there is no .venv: nothing is installed on a machine with a GPU
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

test-gpu:  ## run the tests of one NVIDIA GPU, and verify over NCCL; under ten minutes, with a summary
	$(GPU_PYTHON) -m tests.gpu tests

gpu-check:  ## print the figures of one NVIDIA GPU: the life of a run of 1.2 B parameters, killed and stopped ranks over NCCL
	$(GPU_PYTHON) -m tests.gpu check

lint: .venv/installed-dev  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

api: .venv/installed-dev  ## write the API reference from docstrings to api.md
	$(BIN)/python docs/make_api.py > api.md

docs: .venv/installed-dev  ## build the documentation to site/docs; warnings are errors
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/python docs/make_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

site: .venv/installed-run  ## build the planner's page in site/planner, for any web server; needs npm, which gets Pyodide
	$(BIN)/python -m fourfold.site.static site/planner

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
