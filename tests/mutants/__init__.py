"""Conversions by a `reshard` with one changed operator: verification must find every wrong output."""
