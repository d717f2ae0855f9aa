"""Programs that run in the environments of other libraries: a request as JSON in, a result as JSON out.

Each runs as ``python -m tests.conformance.workers.NAME`` from the top of the repository and imports what its
environment has, nothing of `reshard`. `tests/conformance/oracles.py` asks them.
"""
