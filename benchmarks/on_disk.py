"""Once on a disk, for the record: against `cp -r` and `sync`.

usage: python -m benchmarks.on_disk [DIRECTORY on the disk to measure]
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.measure import Run, Section, directory_in, pairs, remove, reshard, run
from benchmarks.synthetic import Model, wrong_slices
from benchmarks.throughput import COLUMNS_CUT, SHARDS, prepare
from reshard.storage.local import file_system_of

MODEL = Model(layers=8, matrices=8, rows=2304, columns=2304)
PAIRS = 2
BUILD = Path(__file__).resolve().parent.parent / "build"


def measure(base: Path = BUILD) -> Section:
    """Measure a contiguous kind and one whose inner axis moves."""
    section = Section("How fast on a disk?")
    base.mkdir(exist_ok=True)
    section.say(
        f"{MODEL.nbytes / 1e9:.1f} GB on {file_system_of(str(base)) or 'an unknown file system'}, sources "
        f"cached, against `cp -r` and `sync`, {PAIRS} pairs. Times depend on the disk."
    )
    for claim in (SHARDS, COLUMNS_CUT):
        with directory_in(str(base)) as place:
            words = reshard("transform-dir", place / "src", place / "made", *prepare(place, MODEL, claim))
            run(words)
            (place / "made").rename(place / "pattern")
            run(["sync", "-f", place])

            def ours(place: Path = place, words: list[object] = words) -> Run:
                remove(place / "made")
                run(["sync", "-f", place])
                return run(words)

            def copy(place: Path = place) -> Run:
                remove(place / "copied")
                run(["sync", "-f", place])
                script = 'cp -r "$1" "$2" && sync -f "$2"'
                return run(["sh", "-c", script, "sh", place / "pattern", place / "copied"])

            section.row({"kind": claim.name, **pairs(ours, copy, PAIRS).row()})
            assert wrong_slices(place / "made", MODEL, claim.new) == 0
    return section


if __name__ == "__main__":
    measure(*map(Path, sys.argv[1:2]))
