"""Tests against a real MindSpore; they skip where it is not installed. `make conformance` runs them."""
