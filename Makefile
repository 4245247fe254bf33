# On a fresh machine: `make demo` and `make test`. Each sets up .venv first; each may be repeated.
# The first of these that is Python 3.11, 3.12 or 3.13 and has venv; `make PYTHON=...` names another.
PYTHONS := python3 python3.13 python3.12 python3.11
PYTHON ?= $(shell for each in $(PYTHONS); do \
	$$each -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && \
	echo $$each && break; done)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo quick quick-compiled test test-plain test-commands coverage check setup compile docs reference vllm-versions package lock clean help
LOCKS  := $(wildcard locks/*.txt) locks/install.sh

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## the virtual environment: what locks/ names, each file by its hash

$(STAMP): pyproject.toml $(LOCKS)
	@test -x $(BIN)/python || { python="$(PYTHON)"; \
	test "$$python" || { echo "make: found no Python 3.11, 3.12 or 3.13 with venv (tried $(PYTHONS)); install one, or name it: make PYTHON=..." >&2; exit 2; }; \
	command -v "$$python" >/dev/null || { echo "make: $$python is not installed; leave PYTHON= out for the first that fits" >&2; exit 2; }; \
	echo "setting up $(VENV) with $$("$$python" --version)"; "$$python" -m venv $(VENV); }
	LLMCTL_COMPILED=0 sh locks/install.sh $(BIN)/python -e
	@$(BIN)/python hatch_build.py & LLMCTL_COMPILED=0 sh locks/install.sh $(BIN)/python -e dev; installed=$$?; \
	wait $$! && exit $$installed
	@touch $(STAMP)

compile: $(STAMP)  ## compile the scheduler and the simulator, where a C compiler is; again after a change of them
	@$(BIN)/python hatch_build.py

demo: $(STAMP)  ## profile, fit, tune, serve and check a tiny model on this CPU (TRACE=file for a trace of yours)
	$(BIN)/python examples/demo.py --out demo-out $(if $(TRACE),--trace $(TRACE))

# How many processes run tests: auto is one more than there are processors, 0 runs them in pytest's own.
JOBS   ?= auto
OPTIONS ?=  # more of pytest's
PYTEST := -m pytest -n $(JOBS) $(OPTIONS)
TESTS  ?=  # files of tests; none: all
# Whole commands and searches, which simulate for minutes in plain Python: `make test` runs these tests with
# compiled code where there is some, as users do. All other tests are of plain Python.
COMMANDS := $(wildcard tests/test_cli_*.py tests/test_tuning*.py tests/test_public_*.py) $(addprefix tests/, \
	test_backends.py test_demo.py test_newcomer.py test_scaling.py test_shipped_targets.py)

# Each process of a run would compile every module again where the shell sets this.
quick quick-compiled test-plain test-commands coverage: export PYTHONDONTWRITEBYTECODE =

quick: $(STAMP)  ## the tests that start no process and take less than half a second, for every change
	$(BIN)/python $(PYTEST) -m "not slow"

quick-compiled: export LLMCTL_COMPILED = 1
quick-compiled: compile  ## the same with compiled code (TESTS="tests/..."); the other targets test plain Python
	$(BIN)/python $(PYTEST) -m "not slow" $(TESTS)

test: $(STAMP)  ## the tests: offline, no GPU
	@$(MAKE) --no-print-directory -k test-plain test-commands

test-plain: $(STAMP)  ## the tests that run plain Python
	$(BIN)/python $(PYTEST) $(addprefix --ignore=,$(COMMANDS))

test-commands: $(STAMP)  ## the tests of whole commands: with compiled code where there is some
	LLMCTL_COMPILED= $(BIN)/python $(PYTEST) $(COMMANDS)

coverage: $(STAMP)  ## the tests, and which lines of toolkit/ they run
	$(BIN)/coverage erase
	$(BIN)/coverage run $(PYTEST)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered --skip-empty

check: $(STAMP)  ## everything CI checks: lint, format, types, tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(MAKE) --no-print-directory test

docs: $(STAMP)  ## the pages are checked, and the site is built, in build/site: offline
	LLMCTL_COMPILED=0 $(BIN)/python -m docs.make_reference --check
	$(BIN)/python -m docs.check_pages
	LLMCTL_COMPILED=0 $(BIN)/python -m sphinx -W --keep-going -q -b html docs build/site

reference: $(STAMP)  ## make the recipes, pages and pictures that follow from the code again
	LLMCTL_COMPILED=0 $(BIN)/python -m docs.make_recipes
	LLMCTL_COMPILED=0 $(BIN)/python -m docs.make_reference
	$(BIN)/python -m docs.make_pictures

vllm-versions: $(STAMP)  ## compare the simulator with the newest releases of vLLM (VLLM_PYTHON=a Python that has any; VERSIONS="0.33.0 ...")
	$(BIN)/python -m benchmarks.engines.vllm_versions --base $(VLLM_PYTHON) $(VERSIONS)

package: $(STAMP)  ## sdist, wheel and SBOM in dist/: reproducible, and tried in an empty environment
	PYTHON=$(BIN)/python sh .ci/package

lock: $(STAMP)  ## make locks/ again, after a change of pyproject.toml's dependencies or of constraints.txt
	$(BIN)/python -m venv --clear $(VENV)/lock
	$(VENV)/lock/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r locks/tools.txt
	$(BIN)/python locks/make.py $(VENV)/lock/bin/uv

clean:  ## remove what the demo and the tests leave behind (not .venv)
	rm -rf demo-out build dist .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis
