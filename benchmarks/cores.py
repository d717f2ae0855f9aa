"""How a conversion uses many cores: GB/s by `--jobs`, and substitutes on machines with few cores.

    python -m benchmarks.cores [GB] [CASE ...]

runs on any machine, writes nothing but what it prints, and needs three times GB of memory-backed files.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from benchmarks.measure import Cell, Run, Section, memory_backed, remove, reshard, reshard_as_if, run
from benchmarks.synthetic import Model, Scheme, write_checkpoint, write_strategy, wrong_slices
from benchmarks.throughput import Claim, by_rank

GIGABYTES = 0.7
TURNS = 2
PAIRS = 6
SIDE = 4096
"""Matrices are square and of Float32: 64 MiB each, rows of 16 KiB."""
FEW, MANY = 2, 16
"""Jobs whose user time is compared."""
ONE_RANK = Model(layers=8, matrices=1, rows=SIDE, columns=SIDE)
AT_MOST = 1.3


class Case(NamedTuple):
    """A kind of conversion."""

    name: str
    old: Scheme
    new: Scheme


CASES = {
    "split": Case("one file to 8 column slices", Scheme(), Scheme(model=8, cut=1)),
    "merge": Case("8 column slices to 2", Scheme(model=8, cut=1), Scheme(model=2, cut=1)),
    "rows": Case("8 row slices to 4", Scheme(model=8), Scheme(model=4)),
    "full": Case("8 column slices to one file", Scheme(model=8, cut=1), Scheme()),
}
BY_RANK = [
    Claim("row slices", AT_MOST, Scheme(model=8), Scheme(), "safetensors"),
    Claim("column slices", AT_MOST, Scheme(model=8, cut=1), Scheme(), "safetensors"),
]


def measure(gigabytes: float = GIGABYTES, names: list[str] | None = None) -> Section:
    """Measure some cases, by default all."""
    model = Model(layers=max(1, round(gigabytes * 1e9 / (4 * SIDE * SIDE))), matrices=1, rows=SIDE, columns=SIDE)
    cores = len(os.sched_getaffinity(0))
    jobs = sorted({1, FEW, 4, 8, MANY, cores})
    section = Section("Do more jobs cost more?")
    section.say(
        f"GB/s of `convert` by `--jobs`, {model.nbytes / 1e9:.1f} GB on {cores} cores; user time of {MANY} jobs over "
        f"that of {FEW}, and the same *as if* there were {MANY} CPUs. The aim is 1.2."
    )
    details: list[dict[str, Cell]] = []
    for name in names or CASES:
        with memory_backed() as place:
            details += _measure_case(section, place, CASES[name], model, jobs)
    section.say("The same by job, and system calls that write.", detail=True)
    for record in details:
        section.row(record)
    section.say(
        f"`by-rank` of the only rank of {ONE_RANK.nbytes / 1e9:.2f} GB, joined from 8 ranks, against `cp` of its file."
    )
    for claim in BY_RANK:
        with memory_backed() as place:
            compared, _ = by_rank(place, ONE_RANK, claim, PAIRS)
            section.row({"kind": claim.name, "aim": claim.most, **compared.row()})
    return section


def _measure_case(section: Section, place: Path, case: Case, model: Model, jobs: list[int]) -> list[dict[str, Cell]]:
    """Add a row, and return its details by job."""
    target = place / "dst"
    write_checkpoint(place / "src", model, case.old, "safetensors")
    write_strategy(place / "old", model, case.old)
    write_strategy(place / "new", model, case.new)
    words = ["convert", place / "src", target, "--src-strategy", place / "old", "--dst-strategy", place / "new"]
    runs: dict[int, list[Run]] = {number: [] for number in jobs}
    as_if: dict[int, list[Run]] = {number: [] for number in jobs}
    copies: list[float] = []
    for _ in range(TURNS):
        for number in jobs:
            # The default of --max-memory on a machine of so many cores.
            effort = ["--quiet", "--jobs", number, "--max-memory", f"{max(64, 8 * number)}M"]
            for command, done in ((reshard(*words), runs), (reshard_as_if(number, *words), as_if)):
                remove(target)
                done[number].append(run([*command, *effort], sampled=False))
        copies.append(_copies_at_once(target, place / "copied"))
    assert wrong_slices(target, model, case.new, "safetensors") == 0
    size = model.nbytes / 1e9
    speeds = {f"-j{number}": round(size / min(one.seconds for one in runs[number]), 1) for number in jobs}
    user, supposed = (
        {number: min(one.user for one in done[number]) / size for number in jobs} for done in (runs, as_if)
    )
    ratios = {"user": round(user[MANY] / user[FEW], 2), "as if": round(supposed[MANY] / user[FEW], 2)}
    section.row({"kind": case.name, **speeds, "cp, GB/s": round(size / min(copies), 1), **ratios})
    return [
        {
            "kind": case.name,
            "jobs": number,
            "user, s per GB": round(user[number], 2),
            "as if, s per GB": round(supposed[number], 2),
            "writes per GB": round(min(one.writes for one in runs[number]) / size),
        }
        for number in jobs
    ]


def _copies_at_once(target: Path, copied: Path) -> float:
    """Seconds of one `cp` per target file."""
    remove(copied)
    files = [path for path in target.glob("rank_*/*")]
    for path in files:
        (copied / path.parent.name).mkdir(parents=True)
    begun = perf_counter()
    running = [subprocess.Popen(["cp", str(path), str(copied / path.relative_to(target))]) for path in files]
    if any([one.wait() for one in running]):
        raise RuntimeError("cp failed")
    seconds = perf_counter() - begun
    remove(copied)
    return seconds


if __name__ == "__main__":
    measure(float(sys.argv[1]) if len(sys.argv) > 1 else GIGABYTES, sys.argv[2:])
