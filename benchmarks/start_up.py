"""Start-up, against Python with NumPy: whole processes, with compiled modules, in turns."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from benchmarks.measure import Section, memory_backed, reshard, times
from benchmarks.synthetic import Model, Scheme, write_strategy

TURNS = 20
MODEL = Model(layers=25, matrices=12, rows=4096, columns=4096)
OLD = Scheme(data=8, model=8, sharded=True)
NEW = Scheme(data=4, model=8, sharded=True)


def measure() -> Section:
    """Measure `--help` and `rank-list`."""
    section = Section("Start-up")
    section.say(f'Against `python -c "import numpy"`: medians of {TURNS} runs in turns.')
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
    section.table("command", "at most", "ratio", "time", "quartiles")
    names = ("`reshard --help`", f"`reshard rank-list`, {MODEL.layers * MODEL.matrices} parameters")
    for name, most, seconds in zip(names, ("1.3", "2.0"), (showing, listing)):
        ratio = statistics.median(seconds) / statistics.median(numpy)
        section.row(name, most, f"{ratio:.2f}", f"{statistics.median(seconds) * 1000:.0f} ms", quartiles(seconds))
    section.row("Python with NumPy", "", "1", f"{statistics.median(numpy) * 1000:.0f} ms", quartiles(numpy))
    return section


def quartiles(seconds: list[float]) -> str:
    low, _, high = statistics.quantiles(seconds, n=4)
    return f"{low * 1000:.0f} to {high * 1000:.0f} ms"


if __name__ == "__main__":
    measure()
