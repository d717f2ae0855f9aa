"""Columns that are joined: pieces of one contiguous read, each at its place in a row of the target."""

from __future__ import annotations

import itertools
import math
import os
import tempfile
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoints import FileHandles
from reshard.execute import Budget, reader
from reshard.execute.reader import BoxReader
from reshard.execute.runs import runs_of_box
from reshard.layout import Box, boxes_of_range, inside, intersection, volume_of
from reshard.plan.pieces import Piece, StoredSlice, TargetTensor
from reshard.storage import between
from reshard.storage.store import LOCAL
from tests.layouts import examples
from tests.running import fails
from tests.small import world_of
from tests.trees import layout, same_ranks, single, value

# Rows of these tensors are cut into pieces of 2 to 16 KiB by 8 ranks.
SHAPES = {"w": (96, 4096), "wide": (5, 33 * 1024), "half": (64, 8192), "deep": (3, 7, 4096), "narrow": (64, 256)}
DTYPES = {"half": "BFloat16", "narrow": "Int8"}
FULL = {name: value(name, shape, DTYPES.get(name, "Float32")) for name, shape in SHAPES.items()}


def columns(ranks: int, replicas: int = 1) -> Any:
    return single({name: layout([replicas, ranks], [*[-1] * (len(shape) - 1), 0]) for name, shape in SHAPES.items()})


@st.composite
def joined(draw: st.DrawFn, directory: Path) -> tuple[TargetTensor, npt.NDArray[np.uint8]]:
    """A target tensor that joins slices, and its bytes: cut along one axis or two, each slice in a file of its own."""
    item_size = draw(st.sampled_from([1, 2, 4, 16]))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    full = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, (*shape, item_size), dtype=np.uint8)
    cut_axes = draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=2))
    cells: list[Box] = [()]
    for axis, size in enumerate(shape):
        cuts = draw(st.lists(st.integers(0, size), max_size=3)) if axis in cut_axes else []
        edges = sorted({0, size, *cuts})
        cells = [(*cell, interval) for cell in cells for interval in itertools.pairwise(edges)]
    box: Box = tuple((0, size) for size in shape)
    if draw(st.booleans()):
        low = draw(st.integers(0, shape[0] - 1))
        box = ((low, draw(st.integers(low + 1, shape[0]))), *box[1:])
    pieces = []
    place = Path(tempfile.mkdtemp(dir=directory))
    for number, cell in enumerate(cells):
        stored = full[tuple(slice(*interval) for interval in cell)].tobytes()
        # A file contains the slice in one or more runs, with other bytes around them.
        cut = draw(st.integers(0, len(stored)))
        extents, content = [], b""
        for part in (stored[:cut], stored[cut:]) if draw(st.booleans()) else (stored,):
            content += b"\xee" * draw(st.integers(0, 9))
            extents.append((len(content), len(part)))
            content += part
        path = place / f"{number}"
        path.write_bytes(content + b"\xee")
        region = intersection(cell, box)
        if region is not None:
            pieces.append(Piece(StoredSlice(str(path), number, tuple(extents), cell), region))
    return TargetTensor("w", item_size, box, tuple(pieces)), full[tuple(slice(*interval) for interval in box)]


class Reads:
    """Reads into several buffers, from now to the end of the test.

    Attributes:
        scattered: buffers of each read that had several.
        most: bytes that a read returns; None for all.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scattered: list[int] = []
        self.most: int | None = None
        self._read = os.preadv
        monkeypatch.setattr(os, "preadv", self._preadv)

    def _preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if len(buffers) > 1:
            self.scattered.append(len(buffers))
        if self.most is not None:
            buffers = between(buffers, 0, self.most)
        return self._read(fd, buffers, offset)


@examples(200)
@given(st.data())
def test_pieces_of_a_box_are_its_elements(data: st.DataObject) -> None:
    box: list[tuple[int, int]] = []
    part: list[tuple[int, int]] = []
    for _ in range(data.draw(st.integers(0, 4), "axes")):
        first = data.draw(st.integers(0, 3))
        low = data.draw(st.integers(first, first + 3))
        high = data.draw(st.integers(low + 1, first + 4))
        part.append((low, high))
        box.append((data.draw(st.sampled_from([first, low])), data.draw(st.sampled_from([first + 4, high]))))
    cell, whole, item_size = tuple(part), tuple(box), data.draw(st.sampled_from([1, 2, 16]), "bytes")
    numbers = np.arange(volume_of(whole) * item_size).reshape(*(high - low for low, high in whole), item_size)
    expected = numbers[inside(cell, whole)].reshape(-1).tolist()
    source = StoredSlice("a", 0, ((0, len(expected)),), cell)
    tensor = TargetTensor("w", item_size, whole, (Piece(source, cell),))

    runs = runs_of_box(tensor, tuple((0, high - low) for low, high in whole), lambda source: 1)

    if runs is None:
        # More than one step between pieces.
        assert len(set(np.diff(expected)) - {1}) > 1
        return
    ((_, _, places),) = runs
    starts = [places.offset + number * places.stride for number in range(places.number)]
    assert [byte for start in starts for byte in range(start, start + places.length)] == expected
    assert runs_of_box(tensor, tuple((0, high - low) for low, high in whole), lambda source: places.length) == runs
    assert places.number == 1 or runs_of_box(tensor, tuple((0, high - low) for low, high in whole)) is None


@pytest.mark.parametrize("window", [16 << 10, 1])
def test_a_tensor_is_the_same_through_scattered_and_short_reads(
    window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker fills equal rooms of its block, so places of one box must not be used for another."""
    reads = Reads(monkeypatch)
    monkeypatch.setattr(reader, "MIN_PIECE", 1)
    options = Budget.of(jobs=1, costs=LOCAL._replace(small=window))

    @examples(150)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        rooms: dict[int, memoryview] = {}
        with FileHandles() as handles:
            worker = BoxReader(handles, options).new_reader()
            for _ in range(data.draw(st.integers(1, 3), "tensors")):
                tensor, expected = data.draw(joined(tmp_path))
                reads.most = data.draw(st.sampled_from([None, 1, 3, 7, 64]), "bytes of a read")
                most = max(1, data.draw(st.sampled_from([1, 16, 64, 1 << 20])) // tensor.item_size)
                out = b""
                for block in boxes_of_range(tensor.shape, 0, math.prod(tensor.shape), most):
                    count = volume_of(block) * tensor.item_size
                    room = rooms.setdefault(count, worker.block[:count])
                    room[:] = b"\xaa" * count
                    worker.fill(tensor, block, room)
                    out += room
                assert out == expected.tobytes()

    check()
    assert reads.scattered or window > 1


@pytest.mark.parametrize("memory", [2 << 20, 8 << 20, 18 << 20])
def test_places_of_a_block_count_as_memory(memory: int, tmp_path: Path) -> None:
    options = Budget.of(jobs=1, max_memory=memory)
    rows = options.block_bytes >> 11
    pieces = []
    for first in (0, 1024):
        path = tmp_path / f"{first}"
        path.write_bytes(bytes(rows << 10))
        box: Box = ((0, rows), (first, first + 1024))
        pieces.append(Piece(StoredSlice(str(path), 0, ((0, rows << 10),), box), box))
    tensor = TargetTensor("w", 1, ((0, rows), (0, 2048)), tuple(pieces))
    with FileHandles() as handles:
        worker = BoxReader(handles, options).new_reader()
        buffers = options.block_bytes + options.scratch_bytes + options.window_bytes
        worker.fill(tensor, ((0, 1), (0, 2048)), worker.block[:2048])
        tracemalloc.start()
        try:
            worker.fill(tensor, tensor.box, worker.block[: rows << 11])
            places, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert places > (2 * rows) << 7
    assert buffers + places <= memory


def test_more_buffers_than_a_read_may_have_are_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    monkeypatch.setattr(reader, "MIN_PIECE", 1)
    full = np.random.default_rng(1).integers(0, 256, (5000, 8), dtype=np.uint8)
    pieces = []
    for first in (0, 4):
        path = tmp_path / f"{first}"
        path.write_bytes(full[:, first : first + 4].tobytes())
        box: Box = ((0, 5000), (first, first + 4))
        pieces.append(Piece(StoredSlice(str(path), 0, ((0, 20_000),), box), box))
    out = bytearray(40_000)
    with FileHandles() as handles:
        tensor = TargetTensor("w", 1, ((0, 5000), (0, 8)), tuple(pieces))
        BoxReader(handles, Budget.of(jobs=1)).read(tensor, ((0, 5000), (0, 8)), memoryview(out))
    assert out == full.tobytes()
    assert max(reads.scattered) == 1024


@pytest.mark.parametrize(
    ("jobs", "name", "most"),
    [(1, "net-1_10.safetensors", None), (2, "net-1_10.ckpt", None), (4, "net-1_10.safetensors", 5001)],
)
@pytest.mark.parametrize("targets", [1, 2, 3])
def test_columns_are_joined_in_any_form_of_run(
    targets: int, jobs: int, name: str, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into ranks whose edges are those of source ranks, or not."""
    full = {name: FULL[name] for name in FULL if FULL[name].array.shape[-1] % targets == 0}
    source, target = ([{**stage, "layouts": {n: stage["layouts"][n] for n in full}} for stage in each]
                      for each in (columns(8, 2), columns(targets)))  # fmt: skip
    with world_of(source, target) as world:
        world.save(full, f"rank_{{rank}}/{name}")
        reads = Reads(monkeypatch)
        reads.most = most
        world.convert("--jobs", jobs, "--checksum", "crc32", "--verify")
        same_ranks(world.found(), world.expected(full))
        assert reads.scattered or targets == 3
        monkeypatch.undo()


@pytest.mark.parametrize("io", ["pread", "mmap"])
def test_each_rank_of_joined_columns_is_the_same(io: str) -> None:
    with world_of(columns(8), columns(2)) as world:
        world.save(FULL)
        for rank in (0, 1):
            world.by_rank(rank, "--io", io, "--max-memory", "1M")
        same_ranks(world.found(), world.expected(FULL))


def test_a_source_that_ends_within_the_pieces_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with world_of(columns(8), columns(1)) as world:
        world.save({"w": FULL["w"], **FULL}, "rank_{rank}/net-1_10.ckpt")
        read = os.preadv

        def shrinking(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            path = os.readlink(f"/proc/self/fd/{fd}")
            if len(buffers) > 1 and "rank_3" in path:
                os.truncate(path, offset + 5000)
            return read(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", shrinking)
        fails(1, *world.words(0, command="by-rank"), texts=["rank_3/net-1_10.ckpt", "shorter"])
        assert not [path for path in world.dst.rglob("checkpoint_*")]
