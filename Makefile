# Everything a person runs. `make` alone lists it.

PY ?= python3
PYTHON := .venv/bin/python
TOPOLOGY ?= two-regions

.DEFAULT_GOAL := help
.PHONY: help demo up test check format proto doctor setup clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

demo: ## two edges, two regions, a real model: the idea in one minute
	@$(PY) -m deploy.doctor
	@$(PY) -m deploy.setup_env
	@$(PYTHON) -m deploy.demo

up: ## the same world at http://127.0.0.1:8787 until Ctrl-C (TOPOLOGY=local ARGS=…)
	@$(PY) -m deploy.doctor --quiet
	@$(PY) -m deploy.setup_env
	@$(PYTHON) -m deploy.cli up --topology "$(TOPOLOGY)" $(ARGS)

test: ## the whole suite (ARGS=… goes to pytest)
	@$(PY) -m deploy.doctor --quiet
	@$(PY) -m deploy.setup_env --test
	@$(PYTHON) -m pytest $(ARGS)

check: ## format, lint, types, layering, sizes
	@$(PY) -m deploy.setup_env --test
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m mypy
	@$(PYTHON) -m pytest -q tests/test_layering.py

format: ## rewrite the sources in the house's format
	@$(PY) -m deploy.setup_env --test
	@$(PYTHON) -m ruff check --fix .
	@$(PYTHON) -m ruff format .

proto: ## regional/pb from regional/node.proto
	@$(PY) -m deploy.setup_env --test
	@$(PYTHON) -m grpc_tools.protoc -Iregional --python_out=regional/pb --pyi_out=regional/pb \
		regional/node.proto

doctor: ## is this machine fit?
	@$(PY) -m deploy.doctor

setup: ## only .venv
	@$(PY) -m deploy.setup_env

clean: ## remove .venv, .skerry and everything that was built
	@rm -rf .venv .skerry build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
