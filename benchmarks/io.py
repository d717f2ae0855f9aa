"""Memory maps against explicit reads, on local files: the basis of `--io auto`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.measure import Compared, Run, Section, memory_backed, pairs, remove, reshard, run
from benchmarks.synthetic import Model
from benchmarks.throughput import COLUMNS_CUT, COLUMNS_JOINED, COLUMNS_TO_FULL, SHARDS, Claim, prepare

MODEL = Model(layers=6, matrices=8, rows=2304, columns=2304)
PAIRS = 6


def measure() -> Section:
    """Measure every kind, and a single rank of a full tensor's columns."""
    section = Section("Memory maps or explicit reads?")
    section.say(f"`--io mmap` over `--io pread`, {MODEL.nbytes / 1e9:.1f} GB, {PAIRS} pairs; `auto` takes the second.")
    for claim in (SHARDS, COLUMNS_JOINED, COLUMNS_CUT, COLUMNS_TO_FULL):
        with memory_backed() as place:
            section.row({"kind": claim.name, **both(place, claim, ["transform-dir"]).row("mmap", "pread")})
    with memory_backed() as place:
        measured = both(place, COLUMNS_CUT, ["by-rank", 3])
        section.row({"kind": f"{COLUMNS_CUT.name}, one rank", **measured.row("mmap", "pread")})
    return section


def both(place: Path, claim: Claim, command: list[object]) -> Compared:
    """Measure one kind."""
    words = reshard(*command, place / "src", place / "made", *prepare(place, MODEL, claim))

    def through(io: str) -> Run:
        remove(place / "made")
        return run([*words, "--io", io])

    return pairs(lambda: through("mmap"), lambda: through("pread"), PAIRS)
