# Everything runs in environments made here, from nothing but make and a Python 3.9 or newer.
# Another Python: make test PYTHON=python3.12

PYTHON ?= python3
VENV = .venv
CONFORMANCE = .venv-conformance
PACKAGE = .venv-package
MINDSPORE = 2.7.0

.PHONY: help demo test test-all check conformance package matrix bench docs clean

help:
	@echo 'make demo          convert a bundled checkpoint and show what happened (takes a minute the first time)'
	@echo 'make test          the tests, without the long suites'
	@echo 'make test-all      all tests'
	@echo 'make check         ruff and mypy'
	@echo 'make conformance   the tests against a real MindSpore $(MINDSPORE), in an environment of its own'
	@echo 'make package       build wheel and source distribution, and use them in environments with nothing else (a minute)'
	@echo 'make matrix        the tests on Python 3.9, 3.11 and 3.13 with the oldest and the newest dependencies (15 minutes)'
	@echo 'make bench         speed and memory against cp -r; writes docs/benchmarks.md (20 minutes, 16 GB of memory)'
	@echo 'make docs          write docs/commands.md and the output of the examples in the pages anew'
	@echo 'make clean         remove environments, caches and what the demo wrote'
	@echo
	@echo 'PYTHON=python3.x   the Python to use (now: $(PYTHON))'
	@echo 'MATRIX="3.9 3.13"  what make matrix tests; --skip-absent before it leaves out Pythons that are not here'

demo:
	@.ci/venv $(VENV) $(PYTHON) -
	@PATH="$$(pwd)/$(VENV)/bin:$$PATH" fixtures/demo.sh build/demo

test:
	@.ci/venv $(VENV) $(PYTHON) test
	@$(VENV)/bin/python -m pytest

test-all:
	@.ci/venv $(VENV) $(PYTHON) test
	@RESHARD_LONG=1 $(VENV)/bin/python -m pytest

check:
	@.ci/venv $(VENV) $(PYTHON) dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

conformance:
	@python=$$(.ci/conformance-python $(PYTHON)) && .ci/venv $(CONFORMANCE) "$$python" test mindspore==$(MINDSPORE)
	@$(CONFORMANCE)/bin/python -m pytest -W default tests/conformance

package:
	@.ci/venv $(PACKAGE) $(PYTHON) dev build pipx twine
	@$(PACKAGE)/bin/python -m pytest -W default tests/packaging

matrix:
	@.ci/matrix $(MATRIX)

bench:
	@.ci/venv $(VENV) $(PYTHON) test
	@$(VENV)/bin/python -m benchmarks

docs:
	@.ci/venv $(VENV) $(PYTHON) test
	@$(VENV)/bin/python -m docs.tools

clean:
	rm -rf out out-* mine pp2 dp2 merged survivors local_*
	rm -rf $(VENV) $(CONFORMANCE) $(PACKAGE) .venv-matrix build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find reshard tests fixtures docs -name __pycache__ -prune -exec rm -rf {} +
