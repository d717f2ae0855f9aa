"""Layout algebra against brute force: every device enumerated, every element counted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import LayoutError
from reshard.layout import Cell, Layout, Overlap, stand_in_shape
from tests.reference import boxes

MATRICES = st.lists(st.sampled_from([1, 2, 2, 3, 4]), max_size=4).filter(lambda sizes: math.prod(sizes) <= 48)


@st.composite
def layouts(draw: st.DrawFn, dimensions: int) -> Layout:
    matrix = draw(MATRICES)
    axes = draw(st.permutations(range(len(matrix))))
    owners = [draw(st.integers(-1, dimensions - 1)) for _ in axes]
    tensor_map = tuple(tuple(a for a, owner in zip(axes, owners) if owner == d) for d in range(dimensions))
    plain = Layout(tuple(matrix), tensor_map)
    sizes = [n for n in range(1, plain.replica_count + 1) if plain.replica_count % n == 0]
    size = draw(st.sampled_from([0, -1, *sizes])) if dimensions else 0
    return Layout(tuple(matrix), tensor_map, shard_size=size)


def overlap_of(shape: tuple[int, ...], sources: Sequence[Layout], target: Layout) -> Overlap:
    return Overlap([source.grid(shape) for source in sources], target.grid(shape))


def described(layout: Layout) -> dict[str, object]:
    return {
        "dev_matrix": list(layout.device_matrix),
        "tensor_map": [list(axes) or [-1] for axes in layout.tensor_map] if layout.tensor_map else [],
        "shard_size": layout.shard_size,
        "shard_step": 1,
        "uneven": None,
    }


@given(st.data())
def test_slices_equal_those_of_enumerated_devices(data: st.DataObject) -> None:
    layout = data.draw(layouts(data.draw(st.integers(0, 3))))
    shape = tuple(cuts * data.draw(st.integers(1, 3)) for cuts in layout.cuts)
    actual = [layout.slice_box(shape, int(number)) for number in layout.slice_of_rank]
    assert [list(box) for box in actual] == [list(box) for box in boxes(described(layout), shape)]


@given(st.data())
def test_holders_of_a_slice_are_its_ranks_in_ascending_order(data: st.DataObject) -> None:
    layout = data.draw(layouts(2))
    for number in range(layout.slice_count):
        contents = [rank for rank in range(layout.device_count) if layout.slice_of_rank[rank] == number]
        assert layout.holders(number) == contents and contents


@given(st.data())
def test_cells_cover_a_slice_once_and_lie_within_their_source_slices(data: st.DataObject) -> None:
    dimensions = data.draw(st.integers(0, 3))
    sources = data.draw(st.lists(layouts(dimensions), min_size=1, max_size=2))
    target = data.draw(layouts(dimensions))
    shape = tuple(size * data.draw(st.sampled_from([1, 2])) for size in stand_in_shape(sources, target))
    overlap = overlap_of(shape, sources, target)
    for number in range(target.slice_count):
        counted = np.zeros(shape, dtype=int)
        for box, slices, _ in overlap.cells(number):
            counted[tuple(slice(*interval) for interval in box)] += 1
            for layout, contents in zip(sources, slices):
                around = layout.slice_box(shape, contents)
                assert all(low <= start and stop <= high for (start, stop), (low, high) in zip(box, around))
        expected = np.zeros(shape, dtype=int)
        expected[tuple(slice(*interval) for interval in target.slice_box(shape, number))] = 1
        assert (counted == expected).all()


@given(st.data())
def test_a_substitute_shape_needs_the_same_slices_as_the_real_one(data: st.DataObject) -> None:
    dimensions = data.draw(st.integers(1, 3))
    source, target = data.draw(layouts(dimensions)), data.draw(layouts(dimensions))
    small = stand_in_shape([source], target)
    real = tuple(size * data.draw(st.integers(1, 5)) for size in small)
    one, other = overlap_of(small, [source], target), overlap_of(real, [source], target)
    for number in range(target.slice_count):
        assert [cell.slices for cell in one.cells(number)] == [cell.slices for cell in other.cells(number)]


def test_an_empty_dimension_has_no_cells() -> None:
    layout = Layout((2,), ((0,), ()))
    overlap = overlap_of((0, 3), [layout], layout)
    assert overlap.cells(0) == () and overlap.cells(1) == ()


def test_uneven_slices_overlap_even_ones() -> None:
    uneven = Layout((4,), ((0,), ()), uneven=(10, 20, 30, 4))
    even = Layout((2,), ((0,), ()))
    overlap = overlap_of((64, 8), [uneven], even)
    assert overlap.cells(0) == (
        Cell(((0, 10), (0, 8)), (0,)),
        Cell(((10, 30), (0, 8)), (1,)),
        Cell(((30, 32), (0, 8)), (2,)),
    )


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (dict(device_matrix=(2,), tensor_map=((1,),)), "axis 1"),
        (dict(device_matrix=(2, 2), tensor_map=((0,), (0,))), "twice"),
        (dict(device_matrix=(0,), tensor_map=()), "smaller than 1"),
        (dict(device_matrix=(4,), tensor_map=((),), shard_size=3), "does not divide"),
        (dict(device_matrix=(4,), tensor_map=((),), shard_size=-2), "neither"),
        (dict(device_matrix=(2, 4), tensor_map=((0,),), shard_size=-1, shard_step=1), "contradicts"),
        (dict(device_matrix=(4,), tensor_map=(), shard_size=-1), "scalar"),
        (dict(device_matrix=(4,), tensor_map=((0,),), uneven=(1, 2)), "split by hand"),
        (dict(device_matrix=(4,), tensor_map=((),), recorded_shape=(2, 2)), "differ in length"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(arguments: dict[str, object], texts: str) -> None:
    with pytest.raises(LayoutError, match=texts):
        Layout(**arguments)  # type: ignore[arg-type]


def test_a_rounded_shard_step_is_accepted() -> None:
    # MindSpore records 5 for the group [0, 1, 16, 17]: two repeated axes.
    layout = Layout((2, 8, 2), ((1,),), shard_size=-1, shard_step=5)
    assert layout.shards == 4


def test_a_dimension_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(LayoutError, match="size 6 does not divide into 4"):
        Layout((4,), ((0,),)).slice_box((6,), 0)


def test_an_expanded_map_is_regrouped_to_the_tensors_own_dimensions() -> None:
    # Corpus case 07: (64, 32) stored as [2, 32, 32] with map [2, 0, -1] and two optimizer shards.
    expanded = Layout((2, 2, 2), ((2,), (0,), ()), shard_size=2, recorded_shape=(2, 32, 32), expandable=True)
    (own,) = [layout for layout in expanded.regroupings() if len(layout.cuts) == 2]
    assert own.recorded_shape == (64, 32)
    assert own.cuts == (8, 1)


def test_a_divisible_expanded_map_is_not_regrouped() -> None:
    flat = Layout((2, 2), ((1,), (0,)), recorded_shape=(2, 64), expandable=True)
    assert [layout.recorded_shape for layout in flat.regroupings()] == [(2, 64), (128,)]
