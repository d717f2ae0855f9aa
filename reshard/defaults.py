"""Defaults that the command line shows without loading what uses them."""

# The smallest with which no kind of conversion was slower; see `benchmarks/memory.py`.
MAX_MEMORY = 64 << 20
