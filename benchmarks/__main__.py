"""Run every benchmark and write docs/benchmarks.md."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

from benchmarks import many_ranks, throughput
from benchmarks.measure import HEADER

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"


def main() -> None:
    """Measure, print and write."""
    print(HEADER)
    table = []
    for row in throughput.rows():
        table.append(row.markdown())
        print(table[-1], flush=True)
    many = many_ranks.lines()
    print("\n".join(many))
    size = throughput.MODEL.nbytes / 2**30
    where = "memory-backed files" if Path("/dev/shm").is_dir() else "the disk's cache"
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(
        "# Benchmarks\n\n"
        f"Written by `make bench` on {datetime.date.today()}: Python {platform.python_version()}, "
        f"{len(os.sched_getaffinity(0))} cores, {where}, checkpoints of {size:.1f} GiB. Ratios are times over\n"
        "times of what is named, geometric means over alternating pairs after a warm-up; below 1 is faster.\n"
        "Single times vary with the machine by a factor of two.\n\n"
        + "\n".join([HEADER, *table])
        + "\n\n"
        + "\n".join(f"* {line}" for line in many)
        + "\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
