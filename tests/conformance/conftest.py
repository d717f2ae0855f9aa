"""Comparisons with other libraries are collected by `make conformance` only: they need environments of their own."""

import os

collect_ignore_glob = [] if "RESHARD_CONFORMANCE" in os.environ else ["test_*.py"]
