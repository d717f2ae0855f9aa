"""Limits and defaults for the command line, without imports of other modules."""

from __future__ import annotations

import functools
import math
import os

# Devices of all stages: more than any cluster has, and few enough for arrays.
MAX_DEVICES = 1 << 20

# Pipeline stages.
MAX_STAGES = 1 << 10

# Prefix of converted files; the rank follows.
DEFAULT_PREFIX = "checkpoint_"


def usable_cpus() -> int:
    """The CPUs that this process may use: those of its affinity, or fewer by the quota of its control groups."""
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas()]))


@functools.cache
def _quotas() -> tuple[int, ...]:
    """CPUs that control groups allow this process to keep busy, rounded up; none without a quota."""
    quotas = []
    for line in _text("/proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
        # A container may see its own group as the root, and none of this path.
        group = f"/sys/fs/cgroup/{controllers}"
        for name in ["", *path.strip("/").split("/")]:
            group = os.path.join(group, name)
            # Microseconds in each period, and the period; "max" or -1 is no quota.
            words = " ".join(_text(f"{group}/{file}") for file in files).split()
            numbers = [int(word) for word in words if word.isdecimal()]
            if len(numbers) == 2 and numbers[1]:
                quotas.append(math.ceil(numbers[0] / numbers[1]))
    return tuple(quotas)


def _text(path: str) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


# The smallest with which no kind of conversion was slower; see `benchmarks/memory.py` and `benchmarks/cores.py`.
MAX_MEMORY = max(64 << 20, usable_cpus() * (8 << 20))
