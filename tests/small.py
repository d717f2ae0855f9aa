"""A small conversion that most tests vary: four ranks to two, three parameters.

======== ======= ============================== =========================
name     shape   source (2 x 2)                 target (2)
======== ======= ============================== =========================
w        (8, 6)  rows over the last axis        columns
v        (4,)    replicated                     replicated
m.w      (8, 6)  as w, optimizer-sharded        rows
======== ======= ============================== =========================

Ranks 0 and 2 hold one half of ``w``, ranks 1 and 3 the other; every rank holds a quarter of ``m.w``
of its own, so tests of lost ranks use `PLAIN`, which lacks it.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.reference import Strategy
from tests.running import Argument, Result, done, fails, reshard
from tests.trees import Value, cut_ranks, layout, read_tree, scalar, single, subset, value, write_strategy, write_tree

SOURCE = single({"w": layout([2, 2], [0, -1]), "v": layout([2, 2], [-1]), "m.w": layout([2, 2], [0, -1], -1, 2)})
TARGET = single({"w": layout([2], [-1, 0]), "v": layout([2], [-1]), "m.w": layout([2], [0, -1])})


def without(strategy: Strategy, *names: str) -> Strategy:
    return [
        {
            **stage,
            "layouts": {name: layout_record for name, layout_record in stage["layouts"].items() if name not in names},
        }
        for stage in strategy
    ]


PLAIN = without(SOURCE, "m.w")
PLAIN_TARGET = without(TARGET, "m.w")
SHAPES = {"w": (8, 6), "v": (4,), "m.w": (8, 6)}
COPIED = {"global_step": scalar(41, shape=(1,))}


def tensors(label: str = "", names: list[str] | None = None) -> dict[str, Value]:
    """The full tensors, with other values for every label."""
    return {name: value(label + name, shape) for name, shape in SHAPES.items() if names is None or name in names}


class World:
    """A directory with `src`, `old` and `new` strategies and a `dst` to write."""

    def __init__(self, root: Path, source: Strategy, target: Strategy) -> None:
        self.root, self.source, self.target = root, source, target
        self.src, self.dst = root / "src", root / "dst"
        self.old = write_strategy(root / "strategies" / "old", source)
        self.new = write_strategy(root / "strategies" / "new", target)

    def save(
        self,
        full: Mapping[str, Value],
        pattern: str = "rank_{rank}/net-1_10.ckpt",
        ranks: list[int] | None = None,
        copied: Mapping[str, Value] | None = None,
        **options: Any,
    ) -> None:
        """Save a checkpoint on all source ranks, or on some."""
        listing = {name for stage in self.source for name in stage["layouts"]}
        slices_of_rank = cut_ranks(self.source, subset(full, sorted(listing)), COPIED if copied is None else copied)
        write_tree(
            self.src,
            {rank: slices_of_rank[rank] for rank in slices_of_rank if ranks is None or rank in ranks},
            pattern,
            **options,
        )

    def save_step(self, step: str, full: Mapping[str, Value], ranks: list[int] | None = None) -> None:
        """Save a step such as 1_10."""
        self.save(full, f"rank_{{rank}}/net-{step}.ckpt", ranks)

    def words(self, *options: Argument, command: str = "transform-dir") -> list[Argument]:
        return [
            command, *([] if command != "by-rank" else [options[0]]), self.src, self.dst,
            "--src-strategy", self.old, "--dst-strategy", self.new,
            *(options if command != "by-rank" else options[1:]),
        ]  # fmt: skip

    def needs(self, rank: int, *options: Argument) -> list[Argument]:
        """The command that lists the source ranks that a target rank needs."""
        return ["rank-list", rank, "--src-strategy", self.old, "--dst-strategy", self.new, *options]

    def rank_list(self, rank: int, *options: Argument) -> list[int]:
        return [int(word) for word in done(*self.needs(rank, *options)).out.split()]

    def convert(self, *options: Argument) -> Result:
        return done(*self.words(*options))

    def verify(self, *options: Argument) -> Result:
        strategies = ("--src-strategy", self.old, "--dst-strategy", self.new)
        return reshard("verify", self.dst, "--src", self.src, *strategies, *options)

    def by_rank(self, rank: int, *options: Argument) -> Result:
        return done(*self.words(rank, *options, command="by-rank"))

    def run(self, *options: Argument) -> Result:
        return reshard(*self.words(*options))

    def refuses(self, status: int, *texts: Argument, options: tuple[Argument, ...] = ()) -> Result:
        """The conversion fails with this status and these texts, and leaves no target."""
        result = fails(status, *self.words(*options), texts=texts)
        assert not list(self.dst.glob("rank_*/*")) if self.dst.is_dir() else True
        return result

    def found(self, prefix: str = "checkpoint_") -> dict[int, dict[str, Value]]:
        return read_tree(self.dst, prefix)

    def expected(
        self, full: Mapping[str, Value], copied: Mapping[str, Value] | None = None
    ) -> dict[int, dict[str, Value]]:
        return cut_ranks(self.target, full, COPIED if copied is None else copied)


@contextlib.contextmanager
def world_of(source: Strategy, target: Strategy) -> Iterator[World]:
    """A separate world for each of hypothesis' examples, which share pytest's fixtures."""
    with tempfile.TemporaryDirectory() as directory:
        yield World(Path(directory), source, target)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, SOURCE, TARGET)


@pytest.fixture
def saved(world: World) -> World:
    """Its source is saved."""
    world.save(tensors())
    return world


@pytest.fixture
def plain(tmp_path: Path) -> World:
    """Without the optimizer-sharded parameter: ranks 0 and 2, and 1 and 3, are replicas."""
    return World(tmp_path, PLAIN, PLAIN_TARGET)
