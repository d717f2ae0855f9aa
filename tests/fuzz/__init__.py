"""Fuzzing of all readers of files."""
