"""Tests, whose rooms are those of `reshard`."""

import os
import sys

# Without byte code each of some hundred processes compiles all that it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
