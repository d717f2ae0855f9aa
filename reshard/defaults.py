"""Numbers and names that the command line needs without loading what uses them."""

from __future__ import annotations

import os

# Devices of all stages together; more than any cluster has, and little enough to compute with.
MOST_DEVICES = 1 << 20

# Devices times different layouts, of all stages together: arrays with a number per device and layout stay below some
# hundred MB, and commands that read strategies alone below some seconds. MindSpore compiles tens of different layouts.
MOST_SLICE_NUMBERS = 1 << 22

# Pipeline stages; likewise.
MOST_STAGES = 1 << 10

# Converted files are named so, and the number of the rank.
DEFAULT_PREFIX = "checkpoint_"


def usable_cpus() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


# The smallest with which no kind of conversion was slower; see `benchmarks/memory.py` and `benchmarks/cores.py`.
MAX_MEMORY = max(64 << 20, usable_cpus() * (8 << 20))
