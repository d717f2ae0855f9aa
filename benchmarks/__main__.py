"""Run every benchmark, or those named, and write docs/benchmarks.md."""

from __future__ import annotations

import datetime
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks import (
    against_mindformers,
    against_mindspore,
    against_others,
    checksums,
    cores,
    dequantize,
    forms,
    growth,
    io,
    many_ranks,
    megatron,
    memory,
    names,
    object_store,
    object_targets,
    on_disk,
    planning,
    pytorch,
    reading,
    slow_storage,
    start_up,
    throughput,
)
from reshard.storage.local import file_system_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
# The sections after this line are written by hand and stay.
BY_HAND = "<!-- by hand -->\n"
SCRIPTS = [
    throughput,
    cores,
    forms,
    checksums,
    against_mindspore,
    against_others,
    against_mindformers,
    names,
    dequantize,
    memory,
    io,
    slow_storage,
    object_store,
    object_targets,
    many_ranks,
    planning,
    pytorch,
    megatron,
    reading,
    start_up,
    growth,
    on_disk,
]


def main(names: Sequence[str]) -> None:
    """Measure, print and write; with names of scripts only their sections are measured anew."""
    chosen = [script for script in SCRIPTS if not names or script.__name__.rpartition(".")[2] in names]
    measured, _, reasons = PAGE.read_text(encoding="utf-8").partition(BY_HAND)
    by_hand = BY_HAND + reasons
    sections = dict(_sections(measured)) if names else {}
    for script in chosen:
        load = os.getloadavg()[0]
        title, *lines = script.measure().lines
        stamp = f"Measured on {datetime.date.today()}; load average before: {load:.1f}."
        sections[title] = "\n".join(["", stamp, *lines]).strip("\n") + "\n"
    where = file_system_of("/dev/shm") if Path("/dev/shm").is_dir() else "the directory for temporary files"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    machine = f"Linux {platform.release()}, {cores} cores, {memory:.0f} GiB of memory"
    head = f"""# Benchmarks

`make bench` writes this page in about half an hour; `python -m benchmarks NAME` measures the section of one script.
{machine}, Python {platform.python_version()},
NumPy {np.__version__}. Unless a section states otherwise, files are in memory: {where}.

Ratios are the time of `reshard` over the other time: below 1 is faster. They are geometric means over pairs of runs
in alternating order; the spread is that of single pairs. Single runs vary by a factor of four if the machine has no
free pages for the output, so the ratio of the medians is given, too. `cp` uses one core and `reshard` all, so other
load slows `reshard` more: load averages are given, and the ratio of processor times does not depend on them. The
output of every conversion was checked. The last sections give reasons: [where the time goes](#where-the-time-goes).
"""
    text = "\n".join(f"{title}\n\n{section}" for title, section in sections.items())
    PAGE.write_text(f"{head}\n{text}\n{by_hand}", encoding="utf-8")


def _sections(page: str) -> Iterator[tuple[str, str]]:
    """The sections of the page as it is: title line, and the rest."""
    for part in re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]:
        title, _, rest = part.partition("\n")
        yield title, rest.strip("\n") + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
