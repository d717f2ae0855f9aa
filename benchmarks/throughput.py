"""Converting a checkpoint against copying the result: time over that of `cp -r` of the output."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

from benchmarks.measure import HEADER, Row, memory_backed, pairs, reshard, run
from benchmarks.synthetic import Model, Scheme, write_checkpoint, write_strategy, wrong_slices

MODEL = Model(layers=16, matrices=8, rows=2304, columns=2304)
# Three copies of 24 ranks and the source have to fit in memory.
SMALL = Model(layers=4, matrices=8, rows=2304, columns=2304)
WHOLE = Scheme()
CLAIMS: list[tuple[str, Scheme, Scheme, Optional[str]]] = [
    ("optimizer shards joined: dp2 x mp4 to mp4", Scheme(data=2, model=4, sharded=True), Scheme(model=4), None),
    ("2 pipeline stages to 1", Scheme(stages=2, model=4), Scheme(model=4), None),
    (".ckpt to .safetensors", Scheme(model=4), Scheme(model=4), "safetensors"),
    ("8 column slices to 2", Scheme(model=8, cut=1), Scheme(model=2, cut=1), None),
    ("full to 8 column slices", WHOLE, Scheme(model=8, cut=1), None),
    ("8 column slices to full", Scheme(model=8, cut=1), WHOLE, None),
    ("16 to 24 ranks, columns", Scheme(data=4, model=4, cut=1), Scheme(data=3, model=8, cut=1), None),
]


def rows(count: int = 4) -> Iterator[Row]:
    """Measure every claim."""
    for claim, old, new, ending in CLAIMS:
        with memory_backed() as place:
            model = SMALL if new.data > 1 else MODEL
            write_checkpoint(place / "src", model, old)
            write_strategy(place / "old", model, old)
            write_strategy(place / "new", model, new)
            yield measure(place, claim, model, new, ending or "ckpt", count)


def measure(place: Path, claim: str, model: Model, new: Scheme, ending: str, count: int) -> Row:
    made, copied, pattern = place / "made", place / "copied", place / "pattern"
    words = reshard("transform-dir", place / "src", made, "--src-strategy", place / "old")
    words += ["--dst-strategy", place / "new", "--format", ending, "--quiet"]
    run(words)
    made.rename(pattern)

    def ours() -> tuple[float, int]:
        shutil.rmtree(made, ignore_errors=True)
        return run(words)

    def copy() -> float:
        shutil.rmtree(copied, ignore_errors=True)
        return run(["cp", "-r", pattern, copied])[0]

    row = pairs(claim, ours, copy, "cp -r", count)
    assert wrong_slices(made, model, new, ending) == 0
    return row


if __name__ == "__main__":
    print(HEADER)
    for found in rows():
        print(found.markdown(), flush=True)
