"""Conversions by a `reshard` with one operator changed: whatever comes out wrong has to be found by verification."""
