# Everything from the repository root; each target installs what it needs first. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
PYTHON := .venv/bin/python

.PHONY: help setup build demo test test-asan test-tsan test-compiled exactness bench bench-memory-limit bench-observer bench-startup bench-doors bench-ecosystem bench-policy bench-tasks bench-twins package lint clean

help: ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-20s %s\n", $$1, $$2}' Makefile

setup: ## install packages and .venv, only what is missing
	@tools/setup.sh

build: setup ## binaries in build/bin, the Python package in .venv
	@tools/build.sh release

demo: build ## train a language model in a third of its memory (DEMO_ARGS="--steps 5")
	@$(PYTHON) -m demo $(DEMO_ARGS)

test: build ## every test; the last line is the count (CTEST_ARGS, PYTEST_ARGS)
	@tools/test.sh release

test-asan: setup ## unit tests under the address and undefined-behaviour sanitizers
	@tools/build.sh asan-ubsan
	@tools/test.sh asan-ubsan

test-tsan: setup ## unit tests under the thread sanitizer
	@tools/build.sh tsan
	@tools/test.sh tsan

test-compiled: build ## managed models compiled by Inductor (half a minute of compiling)
	@$(PYTHON) -m pytest tests/python/compiled_graphs.py $(PYTEST_ARGS)

exactness: build ## managed beside plain training: families, optimizers, loops, budgets (EXACTNESS_ARGS)
	@$(PYTHON) -m tests.exactness $(EXACTNESS_ARGS)

bench: bench-memory-limit bench-observer bench-policy bench-tasks bench-twins bench-doors ## every benchmark, reports in out/bench

bench-memory-limit: build ## training under a memory limit beside swap and memory-mapped files (BENCH_ARGS)
	@$(PYTHON) -m tests.bench.memory_limit $(BENCH_ARGS)

bench-observer: build ## what the touch observer costs (BENCH_ARGS)
	@$(PYTHON) -m tests.bench.observer $(BENCH_ARGS)

bench-startup: build ## what misa.manage takes for a billion parameters, beyond copying them (BENCH_ARGS)
	@$(PYTHON) -m tests.bench.startup $(BENCH_ARGS)

bench-ecosystem: build ## beside Accelerate's disk offload and torch's mapped files, without a GPU (BENCH_ARGS)
	@$(PYTHON) -m tests.bench.ecosystem $(BENCH_ARGS)

bench-policy: build ## the planner beside the bound, cache policies and the exact optimum (BENCH_ARGS)
	@$(PYTHON) -m tests.bench.policy $(BENCH_ARGS)

bench-tasks: build ## several tasks in one trainer beside one trainer a task (BENCH_ARGS)
	@$(PYTHON) -m tests.bench.tasks $(BENCH_ARGS)

package: setup ## the wheel, installed into an empty folder and trained with
	@tools/package.sh

bench-twins: build ## trainings on emulated twins of three GPUs, against the bound and plain training (BENCH_ARGS="--quick")
	@$(PYTHON) -m tests.bench.twins $(BENCH_ARGS)

bench-doors: build ## what raw pointers into managed memory cost (BENCH_ARGS)
	@$(PYTHON) -m tests.bench.doors $(BENCH_ARGS)

lint: ## formatting and syntax
	@tools/setup.sh lint
	@tools/lint.sh

clean: ## remove what was built and reported, keep .venv
	@rm -rf build build-asan build-tsan out .cache
