# Needs Python 3.11 or newer with venv, pip, and make; the rest is installed into .venv on first use.
#
#   make demo     four workers calling each other, with a table at the end; then three that learn something
#                 (ARGS=--watch shows the four in the dashboard, and goes on until Ctrl-C)
#   make test     lint, types, tests                       (ARGS="tests/wire -k tensor" narrows the tests; JOBS=1: one by one)
#   make test-long the tests in full (REMORA_THOROUGH=1): more repetitions, more examples; before a release
#   make coverage the tests, and which branches of the package they take; takes half as long again
#   make docs     the lists in docs/ that are made from the source (layers, locks, errors, settings); a test says when they are stale
#   make screenshots the pictures in docs/dashboard, by the tests of the dashboard in a real browser
#   make lint     ruff and mypy --strict
#   make paths    the tests of calls once more for each fast path, with that one turned off
#   make chaos    five workers, killed, frozen and cut off (ARGS="--seconds 300 --seed 7"); thousands of fault plans; test-long
#   make fuzz     damaged bytes for half an hour (ARGS="--seconds 300 --seed 7"); what is found can be done again by its file
#   make gpu-test tests on a CUDA device, PyTorch's own for it too; installs nothing, torch and pytest must be there
#   make bench    side by side with torch.distributed.rpc  (ARGS="--quick --only noop"), or with another revision of
#                 Remora: ARGS="--against REV" alternates the two trees, and tells ratios and their spread;
#                 ARGS=--paths does so with each fast path and without it
#   make clean    what the above left behind, .venv and benchmark results excepted (make distclean: those too)

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
ARGS ?=
# Tests wait for processes and deadlines half of the time: three files at a time keep two processors busy.
JOBS ?= 3

BIN := $(VENV)/bin
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
INSTALLED := $(VENV)/.installed
LINTED := src tests benchmarks examples
PATH_TESTS := tests/agent tests/rref tests/transport tests/wire tests/processes tests/autograd tests/optim

.DEFAULT_GOAL := help
.PHONY: help demo test test-long coverage docs screenshots lint paths chaos fuzz gpu-test bench clean distclean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(INSTALLED)
	@$(BIN)/python examples/demo.py $(ARGS)
	@$(if $(findstring --watch,$(ARGS)),:,$(BIN)/python examples/pipeline.py --steps 40)

# mypy keeps one processor busy and tests wait half of the time: both at once take less.
test: $(INSTALLED)
	@$(MAKE) --no-print-directory lint & lint=$$!; status=0; \
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS) || status=$$?; \
	wait $$lint || { echo "make lint failed: see above" >&2; status=1; }; exit $$status

# What is only long: the same promises with more repetitions, larger numbers and other random examples (tests/thorough.py).
test-long: export REMORA_THOROUGH = 1
test-long: $(INSTALLED)
	@$(BIN)/python -m pytest --timeout 3600 -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

# The exit code is pytest's, whatever the report says.
coverage: $(INSTALLED)
	@$(BIN)/coverage erase
	@status=0; $(BIN)/coverage run -m pytest $(ARGS) || status=$$?; \
	$(BIN)/coverage combine --quiet; $(BIN)/coverage report; exit $$status

docs: $(INSTALLED)
	@$(BIN)/python -m tests.docs_lists

screenshots: $(INSTALLED)
	@SCREENSHOTS=docs/dashboard $(BIN)/python -m pytest -q tests/dashboard/test_browser.py -k "drawn or dark or phone or 200"

lint: $(INSTALLED)
	$(BIN)/ruff check $(LINTED)
	$(BIN)/mypy --strict -p remora -p benchmarks
	$(BIN)/mypy --strict examples

# Each field of `remora.options.FastPaths` has a switch, and nothing but speed may depend on it.
paths: $(INSTALLED)
	@switches=$$($(BIN)/python -m tests.switches) || exit 1; for switch in $$switches; do \
	  echo "== $$switch"; env $$switch $(BIN)/python -m pytest -q -p no:cacheprovider $(or $(ARGS),$(PATH_TESTS)) || exit 1; done

chaos: $(INSTALLED)
	@$(BIN)/python -m tests.chaos $(ARGS)
	@$(BIN)/python -m tests.faults
	@$(MAKE) --no-print-directory test-long ARGS=

fuzz: $(INSTALLED)
	@$(BIN)/python -m tests.damage $(ARGS)

# Both parts, whatever becomes of the first. Without a GPU the second says so, and fails.
gpu-test:
	@status=0; export PYTHONPATH=$(CURDIR)/src; $(GPU_PYTHON) -m pytest tests/gpu $(ARGS) || status=$$?; \
	$(GPU_PYTHON) -m tests.conformance --cuda --jobs 8 --quiet || status=$$?; exit $$status

bench: $(INSTALLED)
	@$(BIN)/python -m benchmarks $(ARGS)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Remora needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	       "Name another with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Installing into $(VENV) (first time only; torch is large) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_FLAGS) -e '.[dev]' -c constraints.txt || { \
	  echo "pip could not install what pyproject.toml and constraints.txt name. Without a network, point pip at a" \
	       "folder of wheels: make PIP_FLAGS='--no-index --find-links DIR' ..." >&2; exit 1; }
	@touch $@

clean:
	rm -rf .coverage .coverage.* htmlcov .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find $(LINTED) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) benchmarks/results
