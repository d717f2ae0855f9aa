"""Many ranks with many small parameters, and few files open at a time."""

from __future__ import annotations

import statistics

from benchmarks.measure import Section, memory_backed, mib, reshard, run
from benchmarks.synthetic import Model, Scheme, write_checkpoint, write_strategy, wrong_slices

MODEL = Model(layers=45, matrices=8, rows=3072, columns=4)
OLD = Scheme(data=128, model=8, sharded=True)
NEW = Scheme(data=96, model=8, sharded=True)
OPEN_FILES = 1024
TURNS = 2


def measure() -> Section:
    """Convert every rank."""
    section = Section("How long do many ranks take?")
    parameters = MODEL.layers * MODEL.matrices
    section.say(
        f"{OLD.ranks:,} ranks to {NEW.ranks}, {parameters} small parameters each, at most {OPEN_FILES:,} "
        "open files. Aims: 30 s, 500 MiB."
    )
    with memory_backed() as place:
        write_checkpoint(place / "src", MODEL, OLD)
        write_strategy(place / "old", MODEL, OLD)
        write_strategy(place / "new", MODEL, NEW)
        strategies = ["--src-strategy", place / "old", "--dst-strategy", place / "new", "--quiet"]
        words = reshard("transform-dir", place / "src", place / "made", *strategies, "--overwrite")
        runs = [run(["sh", "-c", f'ulimit -n {OPEN_FILES}; exec "$@"', "sh", *words]) for _ in range(TURNS)]
        assert wrong_slices(place / "made", MODEL, NEW) == 0
    seconds = statistics.median(one.seconds for one in runs)
    section.row(
        {
            "reshard, s": round(seconds, 1),
            "a file read or written, ms": round(seconds / (OLD.ranks + NEW.ranks) * 1000, 1),
            "memory, MiB": mib(max(one.anonymous for one in runs)),
            "resident, MiB": mib(max(one.resident for one in runs)),
        }
    )
    return section
