# Everything a person runs. `make` alone lists it.

PY ?= python3
PYTHON := .venv/bin/python
TOPOLOGY ?= two-regions
# A file stays in one process of these.
SHARED ?= -n auto --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo up test soak load scenarios bench-load bench-admission bench-cold bench-engine bench-text bench-edge bench-kv bench-region bench-routing bench-sharding bench-workers bench-peers bench-kernels check format proto doctor setup clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

demo: ## two edges, two regions, a real model: the idea in one minute
	@$(PY) -m deploy.doctor
	@$(PY) -m deploy.setup_env
	@$(PYTHON) -m deploy.demo

up: ## the same world at http://127.0.0.1:8787 until Ctrl-C (TOPOLOGY=local ARGS=…)
	@$(PY) -m deploy.doctor --quiet
	@$(PY) -m deploy.setup_env
	@$(PYTHON) -m deploy.cli up --topology "$(TOPOLOGY)" $(ARGS)

test: ## the whole suite, shared by the cores (ARGS=… goes to pytest; SHARED= keeps one process)
	@$(PY) -m deploy.doctor --quiet
	@$(PY) -m deploy.setup_env --test
	@$(PYTHON) -m pytest $(SHARED) $(ARGS)

bench-engine: ## our engine beside vLLM CPU, llama.cpp, transformers (ARGS="--quick", "--native off", …)
	@$(PY) -m deploy.setup_env
	@$(PYTHON) -m loadtest.bench $(ARGS)

bench-text: ## time per token with a JSON Schema against without, sixteen answers at once
	@$(PY) -m deploy.setup_env
	@$(PYTHON) -m loadtest.text $(ARGS)

bench-kernels: ## the Triton kernels beside the card's own copy and matmul rates; needs a GPU
	@$(PY) -m deploy.setup_env
	@$(PYTHON) -m kernels.bench_triton $(ARGS); kernels=$$?; \
	$(PYTHON) -m core.engine.gpu.bench && exit $$kernels

bench-routing: ## routing judged on public traces in virtual time, beside four other policies
	@$(PY) -m deploy.setup_env
	@$(PYTHON) -m loadtest.simulator $(ARGS)

bench-region: ## a region's router: turns that find their cache, splitting, tokens a second (ARGS="--quick")
	@$(PY) -m deploy.setup_env
	@$(PYTHON) -m loadtest.region $(ARGS)

bench-sharding: ## what splitting the model over processes costs: bytes, bubbles, loading (ARGS="--quick")
	@$(PY) -m deploy.setup_env
	@$(PYTHON) -m loadtest.sharding $(ARGS)

bench-kv: ## how KV travels: shared memory, TCP, Mooncake, exposed time, restart (ARGS="--only transfers")
	@$(PY) -m deploy.setup_env --test
	@$(PYTHON) -m loadtest.kv $(ARGS)

bench-edge: ## what an edge adds to a stream, beside vLLM's router (ARGS="--quick", …)
	@$(PY) -m deploy.setup_env
	@$(PYTHON) -m loadtest.edge $(ARGS)

bench-peers: ## those engines, in .peers: 3.5 GB, and llama.cpp compiles for a quarter of an hour
	@$(PY) -m deploy.setup_env
	@$(PYTHON) -m loadtest.bench.make_peers $(ARGS)

load: ## two minutes of Locust users against two-regions.toml: a report, and an exit code (ARGS="--users 20", …)
	@$(PY) -m deploy.doctor --quiet
	@$(PY) -m deploy.setup_env --load
	@$(PYTHON) -m loadtest.users $(ARGS)

scenarios: ## a spike, a lost region, a rolling deploy, a cold model, each with a verdict (ARGS="spike --seconds 60")
	@$(PY) -m deploy.setup_env --load
	@$(PYTHON) -m loadtest.users.scenarios $(ARGS)

bench-load: ## the load generator itself: 300 streams on one process, beside 20
	@$(PY) -m deploy.setup_env --load
	@$(PYTHON) -m loadtest.users.capacity $(ARGS)

bench-admission: ## keys, limits, usage: 10,000 requests, 3 edges × 2 processes, Redis, kills
	@$(PY) -m deploy.setup_env
	@$(PYTHON) -m loadtest.admission $(ARGS)

bench-cold: ## a request for a model whose node is off; a killed node; two models in one place (ARGS="--quick")
	@$(PY) -m deploy.setup_env
	@$(PYTHON) -m loadtest.cold $(ARGS)

bench-workers: ## what Workers cost: a call through one, a cold start, a neighbour that loops (ARGS="--quick")
	@$(PY) -m deploy.setup_env
	@$(PYTHON) -m loadtest.workers $(ARGS)

soak: ## the long runs that make test leaves out (ARGS=… goes to pytest)
	@$(PY) -m deploy.doctor --quiet
	@$(PY) -m deploy.setup_env --test
	@$(PYTHON) -m pytest -m soak $(ARGS)

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

clean: ## remove .venv, .peers, .skerry and everything that was built
	@rm -rf .venv .peers .skerry build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
