"""Start-up, against Python with NumPy: whole processes, with compiled modules, in turns."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from benchmarks.measure import Cell, Section, memory_backed, reshard, times
from benchmarks.synthetic import Model, Scheme, write_strategy

TURNS = 20
MODEL = Model(layers=25, matrices=12, rows=4096, columns=4096)
OLD = Scheme(data=8, model=8, sharded=True)
NEW = Scheme(data=4, model=8, sharded=True)


def measure() -> Section:
    """Measure `--help` and `rank-list`."""
    section = Section("How long does a start take?")
    section.say(f'Against `python -c "import numpy"`, medians of {TURNS} runs.')
    script = Path(sys.executable).parent / "reshard"
    program: list[object] = [script] if script.exists() else reshard()
    with memory_backed() as place:
        write_strategy(place / "old", MODEL, OLD)
        write_strategy(place / "new", MODEL, NEW)
        strategies = ["--src-strategy", place / "old", "--dst-strategy", place / "new"]
        commands: list[list[object]] = [
            [sys.executable, "-c", "import numpy"],
            [*program, "--help"],
            [*program, "rank-list", 5, *strategies],
        ]
        numpy, showing, listing = times(commands, TURNS)
    names = ("`reshard --help`", f"`reshard rank-list`, {MODEL.layers * MODEL.matrices} parameters")
    for name, aim, seconds in zip(names, (1.3, 2.0), (showing, listing)):
        ratio = statistics.median(seconds) / statistics.median(numpy)
        section.row({"command": name, "aim": aim, "ratio": round(ratio, 2), **quartiles(seconds)})
    section.row({"command": "Python with NumPy", "ratio": 1, **quartiles(numpy)})
    return section


def quartiles(seconds: list[float]) -> dict[str, Cell]:
    low, median, high = (round(each * 1000) for each in statistics.quantiles(seconds, n=4))
    return {"median, ms": median, "lower quartile, ms": low, "upper quartile, ms": high}
