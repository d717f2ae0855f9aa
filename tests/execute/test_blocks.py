"""Blocks of the executor: any range of any tensor, from any pieces, through any buffer size."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoints import FileHandles
from reshard.errors import RetryableError
from reshard.execute.filling import BlockFiller, put
from reshard.execute.reading import ByteReader, Run, make_reader, runs_of_box
from reshard.layout import Box, boxes_of_range, intersection
from reshard.plan.pieces import Piece, StoredSlice, TargetTensor
from reshard.storage.costs import LOCAL, REMOTE, Storage, file_system_of
from tests.layouts import examples

READERS = pytest.mark.parametrize(("storage", "mapped"), list(itertools.product([LOCAL, REMOTE], [False, True])))
SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_boxes_of_a_range_cover_its_elements_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    most = data.draw(st.integers(1, count + 1))
    numbers = np.arange(count).reshape(shape)
    actual: list[int] = []
    for box in boxes_of_range(shape, start, stop, most):
        part = numbers[tuple(slice(*interval) for interval in box)]
        assert 1 <= part.size <= most
        actual += part.reshape(-1).tolist()
    assert actual == list(range(start, stop))


@given(SHAPES.filter(lambda shape: len(shape) > 0 and math.prod(shape) > 8))
def test_a_range_becomes_few_boxes(shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    # Whole rows wherever they fit: never more than two partial levels per dimension.
    assert len(list(boxes_of_range(shape, 0, count, count))) == 1


@st.composite
def tensors(draw: st.DrawFn, directory: Path) -> tuple[TargetTensor, npt.NDArray[np.uint8]]:
    """A target tensor over stored slices in a file, and its expected contents."""
    item_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    full = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, (*shape, item_size), dtype=np.uint8)
    box: Box = tuple(sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape)  # type: ignore[misc]
    box = tuple((low, max(high, low + 1)) if low < size else (size - 1, size) for (low, high), size in zip(box, shape))
    edges = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    cells: list[Box] = [()]
    for cuts in edges:
        cells = [(*cell, (low, high)) for cell in cells for low, high in zip(cuts, cuts[1:])]
    pieces = []
    path = directory / f"{draw(st.integers(0, 10**9))}.bin"
    content = b""
    for cell in cells:
        stored = full[tuple(slice(*interval) for interval in cell)].tobytes()
        # The file contains the slice in one or more runs, with other bytes between them.
        cut = draw(st.integers(0, len(stored)))
        extents = []
        for part in (stored[:cut], stored[cut:]) if draw(st.booleans()) else (stored,):
            content += b"\xee" * draw(st.integers(0, 9))
            extents.append((len(content), len(part)))
            content += part
        region = intersection(cell, box)
        if region is not None:
            pieces.append(Piece(StoredSlice(str(path), 0, tuple(extents), cell), region))
    path.write_bytes(content + b"\xee")
    return TargetTensor("w", item_size, box, tuple(pieces)), full[tuple(slice(*interval) for interval in box)]


@examples(60)
@given(st.data())
def test_elements_are_placed_correctly_for_any_memory_order(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.sampled_from([1, 2, 5, 17, 140, 300]), min_size=1, max_size=4), "shape")
    while math.prod(shape) > 200_000:
        shape[shape.index(max(shape))] = 2
    words = data.draw(st.sampled_from([1, 2]), "words")
    dtype = data.draw(st.sampled_from(["u1", "u2", "u8"]), "dtype")
    stored = np.random.default_rng(0).integers(0, 250, (*shape, words)).astype(dtype)
    places = data.draw(st.permutations(range(len(shape))), "places")
    out = np.zeros((*(shape[axis] for axis in places), words), dtype)
    view = out.transpose(*np.argsort(places), len(shape))
    step = data.draw(st.sampled_from([1, 2]), "step")
    put(stored[::step], view[::step])
    np.testing.assert_array_equal(view[::step], stored[::step])
    assert step == 1 or not view[1::step].any()


@examples(40)
@given(st.data())
def test_transposed_elements_are_put_in_their_places_and_nowhere_else(data: st.DataObject) -> None:
    """Sides around those of tiles, gaps on both sides, any bits."""
    sides = st.sampled_from([255, 256, 257, 259, 300, 511, 514, 1023, 1025, 1030])
    dtype = data.draw(st.sampled_from(["u1", "u2", "u4", "u8"]), "dtype")
    shape = [*data.draw(st.lists(st.integers(1, 3), max_size=2), "outer"), data.draw(sides), data.draw(sides)]
    while math.prod(shape) > 600_000:
        shape[shape.index(max(shape))] = 257
    places = data.draw(st.permutations(range(len(shape))), "places")
    step = data.draw(st.sampled_from([1, 1, 2]), "step")
    gaps = data.draw(st.lists(st.integers(0, 3), min_size=len(shape), max_size=len(shape)), "gaps")
    random = np.random.default_rng(data.draw(st.integers(0, 9)))
    stored = random.integers(1, 256, (*shape[:-1], shape[-1] * step, np.dtype(dtype).itemsize), dtype=np.uint8)
    source = stored.view(dtype)[..., ::step, :]
    memory = np.zeros([shape[axis] + gaps[axis] for axis in places], dtype)
    view = memory.transpose(np.argsort(places))[tuple(map(slice, shape))]

    put(source, view[..., None])

    np.testing.assert_array_equal(view, source[..., 0])
    assert np.count_nonzero(memory) == math.prod(shape)


def test_only_runs_of_equal_bytes_are_copied() -> None:
    anything: Any = object()
    box = ((0, 4), (0, 8))
    stored = StoredSlice("a", 0, ((100, 64),), box)
    plain = TargetTensor("w", 2, box, (Piece(stored, box),))
    assert runs_of_box(plain, ((1, 3), (0, 8))) == [Run(0, stored, 16, 32)]
    assert runs_of_box(plain, ((1, 3), (0, 4))) is None
    for piece in (Piece(stored, box, dtype="Float32"), Piece(stored._replace(decoding=anything), box)):
        assert runs_of_box(plain._replace(pieces=(piece,)), ((1, 3), (0, 8))) is None
    for changed in (plain._replace(padded=True), plain._replace(added=anything)):
        assert runs_of_box(changed, ((1, 3), (0, 8))) is None


def reader(storage: Storage, mapped: bool, handles: FileHandles) -> ByteReader:
    return make_reader(storage, mapped, handles, window_bytes=1 << 20, most_maps=4)


@READERS
def test_a_tensor_is_the_same_through_any_reader_and_buffer_size(
    storage: Storage, mapped: bool, tmp_path: Path
) -> None:
    @examples(150)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        tensor, expected = data.draw(tensors(tmp_path))
        scratch = memoryview(bytearray(data.draw(st.sampled_from([16, 40, 4096]))))
        most = max(1, data.draw(st.sampled_from([1, 16, 64, 1 << 20])) // tensor.item_size)
        out = b""
        with FileHandles() as handles:
            filler = BlockFiller(reader(storage, mapped, handles), scratch)
            for block in boxes_of_range(tensor.shape, 0, math.prod(tensor.shape), most):
                room = bytearray(math.prod(high - low for low, high in block) * tensor.item_size)
                filler.fill(tensor, block, memoryview(room))
                out += room
        assert out == expected.tobytes()

    check()


@READERS
def test_a_file_that_shrinks_is_an_error_that_names_it(storage: Storage, mapped: bool, tmp_path: Path) -> None:
    path = tmp_path / "net-1_10.ckpt"
    path.write_bytes(bytes(64))
    source = StoredSlice(str(path), 3, ((0, 128),), ((0, 16), (0, 8)))
    tensor = TargetTensor("w", 1, ((0, 16), (0, 4)), (Piece(source, ((0, 16), (0, 4))),))
    with FileHandles() as handles, pytest.raises(RetryableError, match=r"net-1_10\.ckpt.*rank 3"):
        BlockFiller(reader(storage, mapped, handles), memoryview(bytearray(4096))).fill(
            tensor, ((0, 16), (0, 4)), memoryview(bytearray(64))
        )


def test_the_file_system_of_a_path_is_known() -> None:
    assert file_system_of("/proc/self/status") == "proc"
