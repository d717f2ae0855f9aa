"""Converting a checkpoint against copying the result: time over that of `cp -r` of the output."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.measure import Cell, Compared, Run, Section, against_copy, memory_backed, pairs, remove, reshard, run
from benchmarks.synthetic import Model, Scheme, write_checkpoint, write_strategy, wrong_slices

PAIRS = 6
PAIRS_OF_ONE_RANK = 8
_PAGE = 4096
_WRITE = """
import os, sys
block = memoryview(os.urandom(1 << 20))
fd, size = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT, 0o600), int(sys.argv[2])
for start in range(0, size, len(block)):
    os.pwrite(fd, block[:size - start], start)
"""


class Claim(NamedTuple):
    """A kind of conversion and the ratio that it must not exceed."""

    name: str
    most: float
    old: Scheme
    new: Scheme
    ending: str = "ckpt"


MODEL = Model(layers=16, matrices=8, rows=2304, columns=2304)
# One of two ranks is as large as all of `MODEL`.
TWICE = Model(layers=32, matrices=8, rows=2304, columns=2304)
# Of 16 and 24 ranks every parameter is there several times.
SEVERAL_COPIES = Model(layers=5, matrices=8, rows=2304, columns=2304)
WHOLE = Scheme()
SHARDS = Claim("optimizer shards joined", 0.8, Scheme(data=2, model=4, sharded=True), Scheme(model=4))
COLUMNS_JOINED = Claim("8 column slices to 2", 1.0, Scheme(model=8, cut=1), Scheme(model=2, cut=1))
COLUMNS_CUT = Claim("full to 8 column slices", 1.0, WHOLE, Scheme(model=8, cut=1))
COLUMNS_TO_FULL = Claim("8 column slices to full", 1.0, Scheme(model=8, cut=1), WHOLE)
FORMAT = Claim(".ckpt to .safetensors", 0.8, Scheme(model=4), Scheme(model=4), "safetensors")
CLAIMS = [
    SHARDS,
    Claim("2 pipeline stages to 1", 0.8, Scheme(stages=2, model=4), Scheme(model=4)),
    FORMAT,
    COLUMNS_JOINED,
    COLUMNS_CUT,
    COLUMNS_TO_FULL,
    Claim("16 to 24 ranks, columns", 1.0, Scheme(data=4, model=4, cut=1), Scheme(data=3, model=8, cut=1)),
]
BY_RANK = [
    Claim("optimizer shards joined", 0.8, Scheme(data=2, model=2, sharded=True), Scheme(model=2)),
    Claim("2 pipeline stages to 1", 0.8, Scheme(stages=2, model=2), Scheme(model=2)),
    COLUMNS_JOINED,
    Claim("full to 2 column slices", 1.0, WHOLE, Scheme(model=2, cut=1)),
]


def prepare(place: Path, model: Model, claim: Claim) -> list[object]:
    """Write a source and its strategies; the options that name them."""
    write_checkpoint(place / "src", model, claim.old)
    write_strategy(place / "old", model, claim.old)
    write_strategy(place / "new", model, claim.new)
    strategies = ["--src-strategy", place / "old", "--dst-strategy", place / "new"]
    return [*strategies, "--format", claim.ending, "--quiet"]


def transform_dir(place: Path, model: Model, claim: Claim, count: int = PAIRS) -> Compared:
    """Measure `transform-dir` against `cp -r` of its output."""
    options = prepare(place, model, claim)
    target = place / "made"
    measured = against_copy(reshard("transform-dir", place / "src", target, *options), target, count)
    assert wrong_slices(target, model, claim.new, claim.ending) == 0
    return measured


def by_rank(place: Path, model: Model, claim: Claim, count: int = PAIRS_OF_ONE_RANK) -> tuple[Compared, int]:
    """Measure `by-rank` of the last rank against `cp` of as many bytes as it must touch; and those bytes."""
    rank = claim.new.ranks - 1
    words = reshard("by-rank", rank, place / "src", place / "made", *prepare(place, model, claim))
    copied, pattern = place / "copied", place / "pattern"
    touched = bytes_touched(model, claim, rank)
    _fill(pattern, touched)

    def ours() -> Run:
        remove(place / "made")
        return run(words)

    def copy() -> Run:
        remove(copied)
        return run(["cp", pattern, copied])

    return pairs(ours, copy, count), touched


def floor(place: Path, size: int) -> Compared:
    """Measure writing a file of so many bytes out of one block in memory, nothing read, against `cp` of it."""
    pattern, copied, written = place / "pattern", place / "copied", place / "written"
    _fill(pattern, size)

    def write() -> Run:
        remove(written)
        return run([sys.executable, "-S", "-c", _WRITE, written, size])

    def copy() -> Run:
        remove(copied)
        return run(["cp", pattern, copied])

    return pairs(write, copy, PAIRS_OF_ONE_RANK)


def _fill(path: Path, size: int) -> None:
    block = bytes(range(256)) * 4096
    with open(path, "wb") as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])


def bytes_touched(model: Model, claim: Claim, rank: int) -> int:
    """Source bytes that one target rank cannot do without.

    As many as it writes, but where its columns lie in wider rows: then the memory pages they lie in.
    """
    low, high = claim.new.layout().slice_box((model.rows, model.columns), rank)[1]
    columns = model.columns if claim.old.cut == 0 else model.columns // claim.old.model
    if high - low >= columns:
        return model.nbytes // claim.new.model
    rows = np.arange(model.rows, dtype=np.int64) * columns * 4
    pages = np.unique(np.concatenate([rows + 4 * low + step for step in range(0, 4 * (high - low), 64)]) // _PAGE)
    return len(pages) * _PAGE * model.layers * model.matrices


def measure() -> Section:
    """Measure every kind."""
    section = Section("Is a conversion as fast as a copy?")
    section.say(f"`transform-dir` of {MODEL.nbytes / 1e9:.1f} GB against `cp -r` of its own output, {PAIRS} pairs.")
    for claim in CLAIMS:
        with memory_backed() as place:
            model = SEVERAL_COPIES if claim.new.data > 1 else MODEL
            section.row({"kind": claim.name, "aim": claim.most, **transform_dir(place, model, claim).row()})
    section.say("`by-rank` of one rank against `cp` of as many bytes as it touches.", detail=True)
    for claim in BY_RANK:
        with memory_backed() as place:
            measured, touched = by_rank(place, TWICE, claim)
            record: dict[str, Cell] = {"kind": claim.name, "touched, GB": round(touched / 1e9, 2), "aim": claim.most}
            section.row({**record, **measured.row()})
    with memory_backed() as place:
        size = TWICE.nbytes // 2
        name = "the floor: one file written, nothing read"
        section.row({"kind": name, "touched, GB": round(size / 1e9, 2), **floor(place, size).row()})
    return section
