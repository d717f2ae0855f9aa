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
from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.checkpoints.formats.elements import cast_words
from reshard.errors import RetryableError
from reshard.execute import Budget
from reshard.execute.casts import put
from reshard.execute.filling import BlockFiller
from reshard.execute.reader import FileReader
from reshard.execute.runs import Places, runs_of_box
from reshard.layout import Box, boxes_of_range, intersection
from reshard.layout.views import ZEROS, View
from reshard.plan.pieces import Piece, StoredSlice, TargetTensor
from reshard.storage.local import file_system_of
from reshard.storage.store import LOCAL, REMOTE, Costs
from tests.layouts import examples

READERS = pytest.mark.parametrize(("costs", "mapped"), list(itertools.product([LOCAL, REMOTE], [False, True])))
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
        cells = [(*cell, (low, high)) for cell in cells for low, high in itertools.pairwise(cuts)]
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
    assert runs_of_box(plain, ((1, 3), (0, 8))) == [(stored, 16, Places(0, 32, 1, 0))]
    assert runs_of_box(plain, ((1, 3), (0, 4))) is None
    for piece in (Piece(stored, box, dtype="Float32"), Piece(stored._replace(decoding=anything), box)):
        assert runs_of_box(plain._replace(pieces=(piece,)), ((1, 3), (0, 8))) is None
    for changed in (plain._replace(padded=True), plain._replace(added=anything)):
        assert runs_of_box(changed, ((1, 3), (0, 8))) is None


def reader(costs: Costs, mapped: bool, handles: FileHandles) -> FileReader:
    return FileReader(handles, Budget.of(1, costs=costs, io="mmap" if mapped else "pread"))


@pytest.mark.deep
@READERS
def test_a_tensor_is_the_same_through_any_reader_and_buffer_size(costs: Costs, mapped: bool, tmp_path: Path) -> None:
    @examples(150)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        tensor, expected = data.draw(tensors(tmp_path))
        scratch = memoryview(bytearray(data.draw(st.sampled_from([16, 40, 4096]))))
        most = max(1, data.draw(st.sampled_from([1, 16, 64, 1 << 20])) // tensor.item_size)
        out = b""
        with FileHandles() as handles:
            filler = BlockFiller(reader(costs, mapped, handles), scratch)
            for block in boxes_of_range(tensor.shape, 0, math.prod(tensor.shape), most):
                room = bytearray(math.prod(high - low for low, high in block) * tensor.item_size)
                filler.fill(tensor, block, memoryview(room))
                out += room
        assert out == expected.tobytes()

    check()


class Views:
    """Random tensors that are views of stored ones, cut into slices; all read the same file.

    Args:
        data: draws them.
        path: the file, which is written.
    """

    def __init__(self, data: st.DataObject, path: Path) -> None:
        self._data = data
        self.dtype = data.draw(st.sampled_from(["u1", "u2", "u4", "u8"]), "dtype")
        random = np.random.default_rng(data.draw(st.integers(0, 99), "seed"))
        sides, outer = st.sampled_from([3, 16, 17, 40, 130, 300, 701]), st.lists(st.integers(1, 3), max_size=1)
        shapes = [(*data.draw(outer, "outer"), data.draw(sides, "rows"), data.draw(sides, "columns")) for _ in range(2)]
        self._shapes = [shape if math.prod(shape) <= 600_000 else shape[1:] for shape in shapes]
        size = np.dtype(self.dtype).itemsize
        self._arrays = [
            # Exponents of ordinary numbers, so that casts round.
            (random.integers(0, 1 << 15, (*shape, size // 2 or 1)) + 0x3000).astype("u2" if size > 1 else "u1")
            for shape in self._shapes
        ]
        self._arrays = [array.view(self.dtype)[..., 0] for array in self._arrays]
        self._slices: list[list[StoredSlice]] = []
        content = b""
        for array in self._arrays:
            cells: list[Box] = [()]
            for edge in array.shape:
                cuts = sorted({0, edge, data.draw(st.integers(0, edge), "cut")})
                cells = [(*cell, interval) for cell in cells for interval in itertools.pairwise(cuts)]
            slices = []
            for cell in cells:
                stored = array[tuple(itertools.starmap(slice, cell))].tobytes()
                content += b"\xee" * data.draw(st.integers(0, 9), "gap")
                slices.append(StoredSlice(str(path), 0, ((len(content), len(stored)),), cell))
                content += stored
            self._slices.append(slices)
        path.write_bytes(content)

    def tensor(self, stored: str | None, dtype: str | None) -> tuple[TargetTensor, npt.NDArray[Any]]:
        """A tensor and its elements, cast from one type to another."""
        data = self._data
        number = data.draw(st.sampled_from([0, 0, 1]), "source")
        view, array = View.whole(number, self._shapes[number]), self._arrays[number]
        if data.draw(st.integers(0, 3), "transposed"):
            order = [*range(array.ndim - 2), array.ndim - 1, array.ndim - 2]
            view, array = view.transpose(order), array.transpose(order)
        operations = ["transpose", "part", "stack", "halves", "zeros"]
        for operation in data.draw(st.lists(st.sampled_from(operations), max_size=4), "operations"):
            axis = data.draw(st.integers(0, array.ndim - 1), "axis")
            if operation == "transpose":
                order = data.draw(st.permutations(range(array.ndim)), "order")
                view, array = view.transpose(order), array.transpose(order)
            elif operation == "part":
                stop = data.draw(st.integers(-(-array.shape[axis] // 2), array.shape[axis]), "stop")
                view, array = view.part(axis, 0, stop), array.take(range(stop), axis)
            elif operation == "zeros":
                zeros = (*array.shape[:axis], 2, *array.shape[axis + 1 :])
                view = View.concat([view, View.zeros(zeros)], axis)
                array = np.concatenate([array, np.zeros(zeros, self.dtype)], axis)
            elif array.size <= 300_000:
                # The second is the source itself, in its own order; behind the first or interleaved with it.
                other, values = View.whole(number, self._shapes[number]), self._arrays[number]
                if values.shape == array.shape:
                    parts, joined = [view, other], [array, values]
                    if operation == "stack":
                        shape = (*array.shape[: axis + 1], 1, *array.shape[axis + 1 :])
                        whole = (*array.shape[:axis], 2 * array.shape[axis], *array.shape[axis + 1 :])
                        view = View.concat([part.reshape(shape) for part in parts], axis + 1).reshape(whole)
                        array = np.stack(joined, axis + 1).reshape(whole)
                    else:
                        view, array = View.concat(parts, axis), np.concatenate(joined, axis)
        box: Box = tuple(
            (data.draw(st.integers(0, size // 3), "low"), data.draw(st.integers(size - size // 3, size), "high"))
            for size in array.shape
        )
        pieces = []
        for region in (part for each in view.regions for part in each.within_box(box)):
            for source in self._slices[number] if region.source != ZEROS else []:
                parts_of_slice = [region]
                for dimension, (low, high) in enumerate(source.box):
                    parts_of_slice = [p for part in parts_of_slice for p in part.within_source(dimension, low, high)]
                pieces += [Piece(source, part.box, part, stored) for part in parts_of_slice]
        values = array[tuple(itertools.starmap(slice, box))]
        if dtype is not None and stored is not None:
            values = np.where(values == 0, 0, cast_words(values, stored, dtype)).astype(f"u{ITEM_SIZES[dtype]}")
        padded = sum(piece.volume for piece in pieces) < values.size
        return TargetTensor("w", values.itemsize, box, tuple(pieces), dtype, padded), values


@pytest.mark.deep
@READERS
def test_views_are_the_same_through_any_reader_and_buffer_size(costs: Costs, mapped: bool, tmp_path: Path) -> None:
    """One filler fills blocks of several tensors in turns, so what it keeps of one must not show in another."""

    @examples(90)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        views = Views(data, tmp_path / "stored")
        types = {"u2": [("BFloat16", "Float32"), ("Float16", "BFloat16")], "u4": [("Float32", "BFloat16")]}
        casts = st.sampled_from([(None, None), *types.get(views.dtype, [])])
        cases = [views.tensor(*data.draw(casts, "cast")) for _ in range(2)]
        scratch = memoryview(bytearray(data.draw(st.sampled_from([64, 4096, 50_000, 1 << 20, 9 << 20]), "scratch")))
        most = data.draw(st.sampled_from([64, 10_000, 1 << 20, 8 << 20]), "most")
        with FileHandles() as handles:
            filler = BlockFiller(reader(costs, mapped, handles), scratch)
            actual: list[list[bytes]] = [[], []]
            blocks = [
                [
                    (number, box)
                    for box in boxes_of_range(tensor.shape, 0, values.size, max(1, most // tensor.item_size))
                ]
                for number, (tensor, values) in enumerate(cases)
            ]
            if max(map(len, blocks)) > 200:
                return
            in_turns = data.draw(st.booleans(), "in turns")
            order = itertools.chain(*(itertools.zip_longest(*blocks) if in_turns else blocks))
            for number, box in filter(None, order):
                tensor, _ = cases[number]
                room = bytearray(math.prod(high - low for low, high in box) * tensor.item_size)
                if data.draw(st.booleans(), "in steps"):
                    first = 0
                    for part, fill in filler.steps(tensor, box, most):
                        last = first + math.prod(high - low for low, high in part) * tensor.item_size
                        fill(memoryview(room)[first:last])
                        first = last
                    assert first == len(room)
                else:
                    filler.fill(tensor, box, memoryview(room))
                actual[number].append(bytes(room))
        for parts, (_, values) in zip(actual, cases):
            np.testing.assert_array_equal(np.frombuffer(b"".join(parts), values.dtype), values.reshape(-1))

    check()


@READERS
def test_a_file_that_shrinks_is_an_error_that_names_it(costs: Costs, mapped: bool, tmp_path: Path) -> None:
    path = tmp_path / "net-1_10.ckpt"
    path.write_bytes(bytes(64))
    source = StoredSlice(str(path), 3, ((0, 128),), ((0, 16), (0, 8)))
    tensor = TargetTensor("w", 1, ((0, 16), (0, 4)), (Piece(source, ((0, 16), (0, 4))),))
    with FileHandles() as handles, pytest.raises(RetryableError, match=r"net-1_10\.ckpt") as caught:
        BlockFiller(reader(costs, mapped, handles), memoryview(bytearray(4096))).fill(
            tensor, ((0, 16), (0, 4)), memoryview(bytearray(64))
        )
    assert caught.value.rank == 3


def test_the_file_system_of_a_path_is_known() -> None:
    assert file_system_of("/proc/self/status") == "proc"
