"""Costs of a conversion, counted: opened files, parsed headers, read bytes, requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from reshard.checkpoints.formats import headers as opening
from reshard.checkpoints.formats import safetensors_index
from reshard.execute import budget, reader
from reshard.storage import ReadableFile, fill, scatter
from reshard.storage.local import LocalStore
from reshard.storage.store import LOCAL
from tests.counting import count_opened
from tests.reference import Strategy
from tests.running import Argument, done
from tests.trees import Value, cut_ranks, layout, read_tree, same_ranks, single, value, write_strategy, write_tree

NAMES = [f"layer{number}.weight" for number in range(6)]
SHAPE = (96, 480)
FULL = {name: value(name, SHAPE) for name in NAMES}
SIZE = len(NAMES) * math.prod(SHAPE) * 4


class Costs:
    """What was counted since the last `clear`.

    Attributes:
        opened: times that each source file was opened.
        parsed: files whose header was parsed.
        compared: files whose header was compared with those of known structures.
        reads: (path, bytes) of every request for tensor contents.
    """

    def __init__(self, opened: Counter[str]) -> None:
        self.opened = opened
        self.clear()

    def clear(self) -> None:
        self.opened.clear()
        self.parsed: list[str] = []
        self.compared: list[str] = []
        self.reads: list[tuple[str, int]] = []

    @property
    def bytes_read(self) -> int:
        return sum(size for _, size in self.reads)


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Costs:
    counted = Costs(count_opened(monkeypatch))
    find = opening.KnownStructures.find

    def counting_find(self: Any, file: ReadableFile, format: str, size: int) -> Any:
        counted.compared.append(file.path)
        return find(self, file, format, size)

    def counting_fill(file: ReadableFile, offset: int, out: memoryview, *rank: int | None) -> None:
        counted.reads.append((file.path, len(out)))
        fill(file, offset, out, *rank)

    def counting_scatter(
        file: ReadableFile, offset: int, outs: Sequence[memoryview], nbytes: int, *rank: int | None
    ) -> None:
        counted.reads.append((file.path, nbytes))
        scatter(file, offset, outs, nbytes, *rank)

    monkeypatch.setattr(opening.KnownStructures, "find", counting_find)
    monkeypatch.setattr(reader, "fill", counting_fill)
    monkeypatch.setattr(reader, "scatter", counting_scatter)
    for module, name in ((opening, "read_ckpt_index"), (safetensors_index, "read_safetensors_index")):
        parse = getattr(module, name)

        def counting_parse(file: ReadableFile, size: int, parse: Any = parse) -> Any:
            counted.parsed.append(file.path)
            return parse(file, size)

        monkeypatch.setattr(module, name, counting_parse)
    return counted


def rows(data: int, model: int, sharded: bool = False) -> Strategy:
    return alike_cut(layout([data, model], [0, -1], *((-1, model) if sharded else ())))


def columns(data: int, model: int) -> Strategy:
    return alike_cut(layout([data, model], [-1, 0]))


def alike_cut(cut: dict[str, Any]) -> Strategy:
    return single({name: cut for name in NAMES})


def stages(count: int, model: int) -> Strategy:
    """Pipeline stages that hold equally many parameters, in order."""
    share = len(NAMES) // count
    return [
        {"devices": model, "layouts": {name: layout([model], [0, -1]) for name in NAMES[n * share : (n + 1) * share]}}
        for n in range(count)
    ]


class Kind(NamedTuple):
    """A kind of conversion.

    Attributes:
        old: source strategy.
        new: target strategy.
        format: of the target.
        copies: how often the target holds every tensor.
    """

    old: Strategy
    new: Strategy
    format: str = "same"
    copies: int = 1


# What is compared before a conversion is counted in test_source_replicas.py.
ALONE = ("--check-replicas", "never")

KINDS = {
    "optimizer shards joined": Kind(rows(2, 4, sharded=True), rows(1, 4)),
    "stages joined": Kind(stages(2, 2), stages(1, 2)),
    "format changed": Kind(rows(1, 4), rows(1, 4), "safetensors"),
    "columns joined": Kind(columns(1, 8), columns(1, 2)),
    "full to columns": Kind(rows(1, 1), columns(1, 8)),
    "columns to full": Kind(columns(1, 8), rows(1, 1)),
    "16 to 24 ranks": Kind(columns(4, 4), columns(3, 8), copies=3),
}


def convert(place: Path, kind: Kind, *options: Argument) -> dict[int, dict[str, Value]]:
    """Write a source, convert it and compare the result; returns the source's ranks."""
    ranks = cut_ranks(kind.old, FULL)
    write_tree(place / "src", ranks)
    old, new = write_strategy(place / "old", kind.old), write_strategy(place / "new", kind.new)
    words: list[Argument] = ["--src-strategy", old, "--dst-strategy", new, "--format", kind.format, *options]
    done("transform-dir", place / "src", place / "dst", *words)
    same_ranks(read_tree(place / "dst"), cut_ranks(kind.new, FULL))
    return ranks


@pytest.fixture
def no_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request goes to the file, as those for large tensors do."""
    monkeypatch.setattr(LocalStore, "costs", lambda self, path: LOCAL._replace(small=0))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("jobs", [1, 3])
def test_each_byte_is_read_at_most_once(name: str, jobs: int, tmp_path: Path, costs: Costs, no_windows: None) -> None:
    """Not even where the inner axis moves, or where the target holds a tensor several times."""
    convert(tmp_path, KINDS[name], "--io", "pread", "--jobs", jobs, *ALONE)
    assert SIZE <= costs.bytes_read <= SIZE * KINDS[name].copies
    if name == "16 to 24 ranks":
        # Not a third of the written bytes, because there are more targets than a group has members.
        assert costs.bytes_read <= 2 * SIZE


@pytest.mark.deep
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_every_source_file_is_opened_once(name: str, io: str, tmp_path: Path, costs: Costs) -> None:
    convert(tmp_path, KINDS[name], "--io", io)
    assert set(costs.opened.values()) == {1}


@pytest.mark.parametrize("name", KINDS)
def test_each_piece_of_a_tensor_takes_one_request(name: str, tmp_path: Path, costs: Costs, no_windows: None) -> None:
    """A tensor that fits the buffers takes one request per source file."""
    outcome = convert(tmp_path, KINDS[name], "--io", "pread", "--jobs", 1, *ALONE)
    targets = sum(len(stage["layouts"]) * stage["devices"] for stage in KINDS[name].new)
    slices = sum(len(checkpoint) for checkpoint in outcome.values())
    # A piece begins where a slice of the source or of the target does.
    assert len(costs.reads) <= max(slices, targets) + min(slices, targets)


@pytest.mark.parametrize("ending", ["ckpt", "safetensors"])
@pytest.mark.parametrize("ranks", [2, 8, 32])
def test_equal_headers_of_ranks_are_parsed_once(ranks: int, ending: str, tmp_path: Path, costs: Costs) -> None:
    old = rows(1, ranks)
    write_tree(tmp_path / "src", cut_ranks(old, FULL), f"rank_{{rank}}/net-1_10.{ending}")
    words: list[Argument] = ["--src-strategy", write_strategy(tmp_path / "old", old), "--dst-strategy", "none"]
    done("transform-dir", tmp_path / "src", tmp_path / "dst", *words)
    assert len(costs.parsed) == 1
    assert sorted(costs.compared) == sorted(set(costs.compared)) and len(costs.compared) == ranks
    same_ranks(read_tree(tmp_path / "dst"), {0: FULL})


def test_headers_are_parsed_once_per_stage(tmp_path: Path, costs: Costs) -> None:
    convert(tmp_path, Kind(stages(3, 4), stages(1, 2)))
    assert len(costs.parsed) == 3


def test_one_rank_reads_only_the_bytes_that_it_needs(tmp_path: Path, costs: Costs, no_windows: None) -> None:
    old, new = rows(2, 8), rows(1, 4)
    write_tree(tmp_path / "src", cut_ranks(old, FULL))
    strategies: list[Argument] = [
        "--src-strategy", write_strategy(tmp_path / "old", old), "--dst-strategy", write_strategy(tmp_path / "new", new)
    ]  # fmt: skip
    ranks = done("rank-list", 1, *strategies, "--json").json["ranks"]
    done("by-rank", 1, tmp_path / "src", tmp_path / "dst", *strategies, "--io", "pread", *ALONE)
    needed = {str(tmp_path / "src" / f"rank_{rank}" / "net-1_10.ckpt") for rank in ranks}
    assert len(needed) == 2
    assert {path for path, _ in costs.reads} == needed <= set(costs.opened)
    # Of the others the header is read, to decide as a run for all ranks does.
    assert set(costs.opened.values()) == {1}
    assert costs.bytes_read == SIZE // 4


@pytest.mark.parametrize("layers", [1, 4, 16])
def test_the_number_of_requests_is_linear_in_the_bytes(
    layers: int, tmp_path: Path, costs: Costs, no_windows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors larger than the buffers: the requests are as large as these allow."""
    monkeypatch.setattr(budget, "MAX_BLOCK_BYTES", 16 << 10)
    full = {f"w{number}": value(f"w{number}", (64, 1024)) for number in range(layers)}
    old, new = (single({name: layout([n], [0, -1]) for name in full}) for n in (4, 2))
    write_tree(tmp_path / "src", cut_ranks(old, full))
    paths = write_strategy(tmp_path / "old", old), write_strategy(tmp_path / "new", new)
    words: list[Argument] = ["--src-strategy", paths[0], "--dst-strategy", paths[1], "--io", "pread", "--jobs", 1]
    # What is sampled before comes on top.
    words += ALONE
    done("transform-dir", tmp_path / "src", tmp_path / "dst", *words)
    written = layers * 64 * 1024 * 4
    assert costs.bytes_read == written
    assert len(costs.reads) == written // (16 << 10)
