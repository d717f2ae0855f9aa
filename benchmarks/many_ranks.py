"""Many ranks with many small parameters, and few files open at a time."""

from __future__ import annotations

import statistics

from benchmarks.measure import MIB, Section, memory_backed, reshard, run
from benchmarks.synthetic import Model, Scheme, write_checkpoint, write_strategy, wrong_slices

MODEL = Model(layers=45, matrices=8, rows=3072, columns=4)
OLD = Scheme(data=128, model=8, sharded=True)
NEW = Scheme(data=96, model=8, sharded=True)
OPEN_FILES = 1024
TURNS = 2


def measure() -> Section:
    """Convert every rank."""
    section = Section("Many ranks")
    parameters = MODEL.layers * MODEL.matrices
    section.say(
        f"{OLD.ranks:,} source ranks to {NEW.ranks} target ranks, {parameters} small parameters each, at most "
        f"{OPEN_FILES:,} open files; aims: 30 s and 500 MiB. Median of {TURNS} runs."
    )
    with memory_backed() as place:
        write_checkpoint(place / "src", MODEL, OLD)
        write_strategy(place / "old", MODEL, OLD)
        write_strategy(place / "new", MODEL, NEW)
        strategies = ["--src-strategy", place / "old", "--dst-strategy", place / "new", "--quiet"]
        words = reshard("transform-dir", place / "src", place / "made", *strategies, "--overwrite")
        runs = [run(["sh", "-c", f'ulimit -n {OPEN_FILES}; exec "$@"', "sh", *words]) for _ in range(TURNS)]
        assert wrong_slices(place / "made", MODEL, NEW) == 0
    section.table("time", "per file read or written", "anonymous", "resident")
    seconds = statistics.median(one.seconds for one in runs)
    section.row(
        f"{seconds:.1f} s",
        f"{seconds / (OLD.ranks + NEW.ranks) * 1000:.1f} ms",
        f"{max(one.anonymous for one in runs) / MIB:.0f} MiB",
        f"{max(one.resident for one in runs) / MIB:.0f} MiB",
    )
    return section


if __name__ == "__main__":
    measure()
