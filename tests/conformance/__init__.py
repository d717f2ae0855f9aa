"""Comparisons with MindSpore and other libraries; `make conformance` runs them."""
