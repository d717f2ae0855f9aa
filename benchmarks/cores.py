"""How a conversion uses many cores: GB/s by `--jobs`, beside as many `cp` at once as there are target files.

    python -m benchmarks.cores [GB] [CASE ...]

writes nothing but what it prints; it runs on any machine and needs three times GB of memory-backed files.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, Optional

from benchmarks.measure import Run, Section, memory_backed, remove, reshard, run
from benchmarks.synthetic import Model, Scheme, write_checkpoint, write_strategy, wrong_slices

GIGABYTES = 0.9
TURNS = 2
SIDE = 4096
"""Matrices are square and of Float32: 64 MiB each, rows of 16 KiB."""


class Case(NamedTuple):
    """A kind of conversion."""

    name: str
    old: Scheme
    new: Scheme


CASES = {
    "rows": Case("8 row slices to 4", Scheme(model=8), Scheme(model=4)),
    "split": Case("one file to 8 column slices", Scheme(), Scheme(model=8, cut=1)),
    "merge": Case("8 column slices to 2", Scheme(model=8, cut=1), Scheme(model=2, cut=1)),
    "full": Case("8 column slices to one file", Scheme(model=8, cut=1), Scheme()),
}


def measure(gigabytes: float = GIGABYTES, names: Optional[list[str]] = None) -> Section:
    """Measure some cases, by default all."""
    model = Model(layers=max(1, round(gigabytes * 1e9 / (4 * SIDE * SIDE))), matrices=1, rows=SIDE, columns=SIDE)
    cores = len(os.sched_getaffinity(0))
    jobs = sorted({1, 2, 4, 8, 16, cores})
    section = Section("Many cores")
    section.say(
        f"`convert` of {model.nbytes / 1e9:.1f} GB in matrices of {SIDE} x {SIDE}, with as many `--jobs` as the "
        f"columns name, on {cores} cores: GB/s written, best of {TURNS} runs in turns; below "
        "it the user time of all processes in seconds per GB. *cp* copies all target files at once."
    )
    section.table("kind", *(f"{number}" for number in jobs), "cp")
    for name in names or CASES:
        with memory_backed() as place:
            _measure_case(section, place, CASES[name], model, jobs)
    return section


def _measure_case(section: Section, place: Path, case: Case, model: Model, jobs: list[int]) -> None:
    made = place / "made"
    write_checkpoint(place / "src", model, case.old, "safetensors")
    write_strategy(place / "old", model, case.old)
    write_strategy(place / "new", model, case.new)
    words = reshard("convert", place / "src", made, "--src-strategy", place / "old", "--dst-strategy", place / "new")
    found: dict[int, list[Run]] = {number: [] for number in jobs}
    copies: list[float] = []
    for _ in range(TURNS):
        for number, runs in found.items():
            remove(made)
            # What is the default where there are so many.
            runs.append(run([*words, "--quiet", "--jobs", number, "--max-memory", f"{max(64, 8 * number)}M"]))
        copies.append(_copies_at_once(made, place / "copied"))
    assert wrong_slices(made, model, case.new, "safetensors") == 0
    size = model.nbytes / 1e9
    speeds = (f"{size / min(one.seconds for one in runs):.1f}" for runs in found.values())
    section.row(case.name, *speeds, f"{size / min(copies):.1f}")
    user = (f"{min(one.user for one in runs) / size:.2f} s" for runs in found.values())
    section.row("... user time per GB", *user, "")


def _copies_at_once(made: Path, copied: Path) -> float:
    """Seconds that as many `cp` take as there are target files."""
    remove(copied)
    files = [path for path in made.glob("rank_*/*")]
    for path in files:
        (copied / path.parent.name).mkdir(parents=True)
    begun = perf_counter()
    running = [subprocess.Popen(["cp", str(path), str(copied / path.relative_to(made))]) for path in files]
    if any([one.wait() for one in running]):
        raise RuntimeError("cp failed")
    seconds = perf_counter() - begun
    remove(copied)
    return seconds


if __name__ == "__main__":
    measure(float(sys.argv[1]) if len(sys.argv) > 1 else GIGABYTES, sys.argv[2:])
