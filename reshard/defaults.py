"""Limits and defaults for the command line, without imports of other modules."""

from __future__ import annotations

import os

# Devices of all stages: more than any cluster has, and few enough for arrays.
MAX_DEVICES = 1 << 20

# Devices times different layouts of all stages: limits arrays with a number per device and layout to some hundred MB,
# and commands that only read strategies to some seconds. MindSpore compiles tens of different layouts.
MAX_SLICE_NUMBERS = 1 << 22

# Pipeline stages.
MAX_STAGES = 1 << 10

# Prefix of converted files; the rank follows.
DEFAULT_PREFIX = "checkpoint_"

# The values of options that take one of a few words; the first is the default.
CHOICES = {
    "format": ("same", "ckpt", "safetensors"),
    "io": ("auto", "mmap", "pread"),
    "crc": ("auto", "never"),
    "check_replicas": ("auto", "all", "never"),
    "checksum": ("none", "crc32"),
}


def usable_cpus() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


# The smallest with which no kind of conversion was slower; see `benchmarks/memory.py` and `benchmarks/cores.py`.
MAX_MEMORY = max(64 << 20, usable_cpus() * (8 << 20))
