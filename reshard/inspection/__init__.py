"""Inspection of checkpoints, one file or a whole tree, from names, sizes and headers alone."""
