"""Reading tensors where they lie: one rank's slices, everything, statistics and differences."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.against_mindspore import mindspore_python, quietly
from benchmarks.measure import MIB, Cell, Run, Section, memory_backed, mib, pairs, remove, reshard, run
from benchmarks.synthetic import Model, Scheme, write_checkpoint, write_strategy

MANY = Model(layers=48, matrices=42, rows=4096, columns=4096)
MODEL = Model(layers=12, matrices=8, rows=2304, columns=2304)
OLD = Scheme(model=8)
TARGETS = (("rows, 8 ranks to 4", Scheme(model=4)), ("rows of 8 ranks to columns of 4", Scheme(model=4, cut=1)))
RANK = 3
PAIRS = 5
# Of statistics and differences: so many elements, as trained weights are distributed.
ELEMENTS = 1 << 28
MATRICES = 8

_OPEN = """
import sys, reshard
src, old, new, rank = sys.argv[1:]
with reshard.open(reshard.Source(src, strategy=old), dst_strategy=new, rank=int(rank)) as tensors:
    held = dict(tensors.read_all())
"""
_OPEN_ONLY = """
import sys, reshard
src, old, new, rank = sys.argv[1:]
reshard.open(reshard.Source(src, strategy=old), dst_strategy=new, rank=int(rank))
"""
_NAMES = """
import sys, reshard
src, old, new, rank = sys.argv[1:]
with reshard.open(reshard.Source(src, strategy=old), dst_strategy=new, rank=int(rank)) as tensors:
    len(tensors)
"""
_OPEN_ALL = """
import sys, reshard
src, old = sys.argv[1:]
with reshard.open(reshard.Source(src, strategy=old)) as tensors:
    for name, array in tensors.read_all():
        pass
"""
_LOAD = """
import glob, sys, mindspore
src, old, new, rank = sys.argv[1:]
for needed in mindspore.rank_list_for_transform(int(rank), old, new):
    held = mindspore.load_checkpoint(glob.glob(f"{src}/rank_{needed}/*.ckpt")[0])
"""


def measure() -> Section:
    """Measure all of it."""
    section = Section("How fast is reading without a conversion?")
    python = mindspore_python()
    with memory_backed() as place:
        opening(section, place)
        slices(section, place, python)
        numbers(section, place)
    return section


def opening(section: Section, place: Path) -> None:
    """Opening for a rank of very many, of which no file is looked into, beside `rank-list`."""
    many, others = Scheme(stages=16, data=80, model=8, sharded=True), Scheme(stages=12, data=80, model=8, sharded=True)
    write_strategy(place / "many", MANY, many)
    write_strategy(place / "others", MANY, others)
    write_checkpoint(place / "one", Model(1, 1, 8, 8), Scheme())
    listing = reshard("rank-list", 777, "--src-strategy", place / "many", "--dst-strategy", place / "others")
    words = [place / "one", place / "many", place / "others", 777]
    both = pairs(lambda: run([sys.executable, "-c", _OPEN_ONLY, *words]), lambda: run(listing), PAIRS)
    section.say(
        f"Opening with strategies of {many.ranks:,} and {others.ranks:,} ranks and "
        f"{MANY.layers * MANY.matrices:,} parameters, beside `rank-list`.",
        detail=True,
    )
    section.row({"command": "`reshard.open`", "whole, s": round(both.ours, 2)})
    section.row({"command": "`rank-list`", "whole, s": round(both.theirs, 2)})
    remove(place / "many", place / "others", place / "one")


def slices(section: Section, place: Path, python: str | None) -> None:
    """One rank's slices, by `reshard.open`, by `cp` of as many bytes and by MindSpore, and everything."""
    section.say(
        f"Slices of rank {RANK} of 4 from {MODEL.nbytes / 1e9:.1f} GB of 8 ranks, by `reshard.open`, "
        "start-up included, against `cp` of as many bytes and MindSpore's `load_checkpoint`."
    )
    write_checkpoint(place / "src", MODEL, OLD)
    write_strategy(place / "old", MODEL, OLD)
    old = place / "old" / "ckpt_strategy_rank_0.ckpt"
    pattern, copied = place / "pattern", place / "copied"
    for name, scheme in TARGETS:
        write_strategy(place / "new", MODEL, scheme)
        new = place / "new" / "ckpt_strategy_rank_0.ckpt"
        _fill(pattern, MODEL.nbytes // 4)
        words = [place / "src", old, new, RANK]

        def copy() -> Run:
            remove(copied)
            return run(["cp", pattern, copied])

        command = [sys.executable, "-c", _OPEN, *words]
        measured = pairs(lambda command=command: run(command), copy, PAIRS)  # type: ignore[misc]
        opening = min(run([sys.executable, "-c", _NAMES, *words]).seconds for _ in range(PAIRS))
        record: dict[str, Cell] = {"slices": name, **measured.row("reshard.open"), "opening, s": round(opening, 2)}
        if python is not None:
            record["MindSpore, s"] = round(quietly([python, "-c", _LOAD, *words]).seconds, 1)
        section.row(record)
        remove(pattern, copied)
    files = sorted((place / "src").glob("*/*"))
    words = [place / "src", old]
    measured = pairs(
        lambda: run([sys.executable, "-c", _OPEN_ALL, *words]),
        lambda: run(["sh", "-c", 'for file; do cp "$file" /dev/null; done', "sh", *files]),
        PAIRS,
    )
    section.say(
        f"All full tensors, {MODEL.nbytes / 1e9:.1f} GB, by `read_all`, against `cp` to /dev/null.", detail=True
    )
    memory = mib(measured.anonymous)
    section.row({"command": "`read_all`", "whole, s": round(measured.ours, 2), "memory, MiB": memory})
    section.row({"command": "`cp`", "whole, s": round(measured.theirs, 2)})
    remove(place / "src")


def numbers(section: Section, place: Path) -> None:
    """Bytes that `stats` and `diff` go through in a second of processor time, in whole processes."""
    section.say(f"`stats` and `diff` of {ELEMENTS:,} elements, per second of processor time. The aim is 1.")
    _write(place / "f32", 0)
    _write(place / "f32b", 1)
    (place / "one").mkdir()
    save_file({"w": np.ones(1, np.float32)}, place / "one" / "model.safetensors")
    for name in ("f32", "f32b"):
        narrow = place / name.replace("f32", "bf16")
        run(reshard("convert", place / name, narrow, "--to", "huggingface", "--cast", "BFloat16", "--quiet"))
    rows: list[tuple[str, list[object]]] = [
        ("`stats`", ["stats", "A"]),
        ("`diff`, all the same", ["diff", "A", "A"]),
        ("`diff`, every element another", ["diff", "A", "B"]),
    ]
    for title, words in rows:
        rates: dict[str, Cell] = {}
        for kind, width, column in (("f32", 4, "Float32, GB/s"), ("bf16", 2, "BFloat16, GB/s")):
            sides = {"A": place / kind, "B": place / f"{kind}b"}
            chosen = [sides.get(str(word), word) for word in words]
            small = [place / "one" if str(word) in sides else word for word in words]
            gigabytes = ELEMENTS * width * (2 if words[0] == "diff" else 1) / 1e9
            cpu = _cpu(chosen) - _cpu(small)
            rates[column] = round(gigabytes / cpu, 1)
        section.row({"command": title, **rates})


def _cpu(words: list[object]) -> float:
    return min(run(reshard(*words, "--jobs", 1, "--quiet")).cpu for _ in range(3))


def _write(directory: Path, seed: int) -> None:
    """A model in one file, of numbers as trained weights have them."""
    directory.mkdir()
    some = np.random.default_rng(seed).standard_normal(ELEMENTS // MATRICES // 16, np.float32) * np.float32(0.02)
    shape = (1 << 12, ELEMENTS // MATRICES >> 12)
    full = {f"layers.{number}.w": np.tile(some, 16).reshape(shape) for number in range(MATRICES)}
    save_file(full, directory / "model.safetensors", {"format": "pt"})


def _fill(path: Path, nbytes: int) -> None:
    with path.open("wb") as file:
        for first in range(0, nbytes, MIB):
            file.write(os.urandom(1 << 10) * min(1 << 10, (nbytes - first) >> 10))
