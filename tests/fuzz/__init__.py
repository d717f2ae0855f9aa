"""Fuzzing of everything that reads files which somebody else wrote."""
