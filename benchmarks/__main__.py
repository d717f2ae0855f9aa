"""Run every benchmark and write docs/benchmarks.md."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks import (
    against_mindspore,
    growth,
    io,
    many_ranks,
    memory,
    on_disk,
    planning,
    slow_storage,
    start_up,
    throughput,
)
from reshard.checkpoints.storage import file_system_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
SCRIPTS = [
    throughput,
    against_mindspore,
    memory,
    io,
    slow_storage,
    many_ranks,
    planning,
    start_up,
    growth,
    on_disk,
]


def main() -> None:
    """Measure, print and write."""
    load = os.getloadavg()[0]
    started = perf_counter()
    sections = [script.measure() for script in SCRIPTS]
    minutes = (perf_counter() - started) / 60
    where = file_system_of("/dev/shm") if Path("/dev/shm").is_dir() else "the directory for temporary files"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    machine = f"Linux {platform.release()}, {cores} cores, {memory:.0f} GiB of memory"
    head = f"""# Benchmarks

Written by `make bench` on {datetime.date.today()} in {minutes:.0f} minutes: {machine},
Python {platform.python_version()}, NumPy {np.__version__}. Unless a section says otherwise, files lie in memory:
{where}.

Ratios are our time over the other's: below 1 is faster. They are geometric means over pairs of runs whose
order alternates; the spread is that of single pairs. Single runs vary by a factor of four where the machine
has to find fresh pages for what is written, so the ratio of the medians stands beside. `cp` keeps one core
busy and `reshard` all of them, so whatever else the machine does slows it more: the load average before the
first run was {load:.1f}, and the ratio of processor times tells what a quiet machine would. What conversions wrote
was compared with what it must be.
"""
    PAGE.parent.mkdir(exist_ok=True)
    text = "\n".join("\n".join(section.lines).strip("\n") + "\n" for section in sections)
    PAGE.write_text(f"{head}\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
