"""Storage with latency: a delay before every read, with requests as for local files and as for remote ones."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.measure import MIB, Run, Section, memory_backed, remove, run
from benchmarks.synthetic import Model, Scheme
from benchmarks.throughput import COLUMNS_CUT, SHARDS, Claim, prepare

DELAYS = (0, 1, 5)
LARGE = Model(layers=6, matrices=8, rows=2304, columns=2304)
SMALL = Model(layers=30, matrices=12, rows=64, columns=48)
KINDS: list[tuple[str, Model, Claim, list[object]]] = [
    (SHARDS.name, LARGE, SHARDS, ["transform-dir"]),
    (COLUMNS_CUT.name, LARGE, COLUMNS_CUT, ["transform-dir"]),
    (f"{COLUMNS_CUT.name}, one rank", LARGE, COLUMNS_CUT, ["by-rank", 3]),
    (
        f"{SMALL.layers * SMALL.matrices} small parameters, 64 ranks to 32",
        SMALL,
        Claim("", 1, Scheme(data=8, model=8, sharded=True), Scheme(data=4, model=8, sharded=True)),
        ["transform-dir"],
    ),
]


def measure() -> Section:
    """Measure all kinds at all delays."""
    section = Section("Storage with latency")
    section.say(
        f"A delay before every read, in milliseconds; {LARGE.nbytes / 1e9:.2f} GB, and small parameters. *Local* is "
        "what a program does that knows of no latency: one request per CPU, as small as they come. *Remote* is what "
        "`--io auto` does on network file systems: more and larger ones. Shorter of two runs."
    )
    section.table("kind", "delay", "local", "remote", "remote over local", "anonymous, remote")
    for name, model, claim, command in KINDS:
        with memory_backed() as place:
            options = prepare(place, model, claim)
            for delay in DELAYS:
                local, remote = (
                    slowed(place, delay, kind, [*command, place / "src", place / "made", *options, "--io", "pread"])
                    for kind in ("ext4", "nfs")
                )
                ratio = f"{remote.seconds / local.seconds:.2f}"
                seconds = (f"{local.seconds:.2f} s", f"{remote.seconds:.2f} s")
                section.row(name, f"{delay} ms", *seconds, ratio, f"{remote.anonymous / MIB:.0f} MiB")
    return section


def slowed(place: Path, delay: int, file_system: str, words: list[object]) -> Run:
    """The shorter of two runs with a delay before every read."""
    runs = []
    for _ in range(2):
        remove(place / "made")
        runs.append(run([sys.executable, "-m", "benchmarks.slow_reads", delay, file_system, *words]))
    return min(runs, key=lambda one: one.seconds)


if __name__ == "__main__":
    measure()
