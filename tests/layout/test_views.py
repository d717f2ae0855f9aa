"""Views against NumPy: the same operations on arrays of running numbers give the same elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import LayoutError
from reshard.layout.views import ZEROS, Region, View

Array = npt.NDArray[np.int64]


def elements(regions: Sequence[Region], shape: Sequence[int], sources: Sequence[Array]) -> Array:
    """The element positions of regions; -1 outside all regions."""
    actual = np.full(shape, -1, np.int64)
    for region in regions:
        for indices in itertools.product(*(range(loop.length) for loop in region.loops)):
            here, source_origin = list(region.origin), list(region.source_origin)
            for index, loop in zip(indices, region.loops):
                here[loop.dimension] += index * loop.step
                source_origin[loop.source_dimension] += index * loop.source_step
            assert actual[tuple(here)] == -1
            actual[tuple(here)] = 0 if region.source == ZEROS else sources[region.source][tuple(source_origin)]
    return actual


def numbered(*shapes: Sequence[int]) -> list[Array]:
    """Arrays whose elements are all different."""
    actual, first = [], 1
    for shape in shapes:
        count = math.prod(shape)
        actual.append(np.arange(first, first + count).reshape(shape))
        first += count
    return actual


def a_shape_of(draw: Any, count: int) -> tuple[int, ...]:
    sizes = []
    while count > 1 and draw(st.integers(0, 3)):
        factor = draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
        sizes.append(factor)
        count //= factor
    return (*sizes, count) if count > 1 or not sizes else tuple(sizes)


@st.composite
def made(draw: Any) -> tuple[View, Array, list[Array]]:
    """A view that a random chain of operations made, and the array that NumPy made alike."""
    shapes = draw(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=3))
    sources = numbered(*shapes)
    views = [View.whole(number, shape) for number, shape in enumerate(shapes)]
    arrays = list(sources)
    for _ in range(draw(st.integers(0, 6))):
        which = draw(st.integers(0, len(views) - 1))
        view, array = views[which], arrays[which]
        operation = draw(st.sampled_from(["transpose", "reshape", "part", "concat", "zeros"]))
        dimension = draw(st.integers(0, len(view.shape) - 1)) if view.shape else 0
        if operation == "transpose":
            order = draw(st.permutations(range(len(view.shape))))
            view, array = view.transpose(order), array.transpose(order)
        elif operation == "reshape":
            shape = a_shape_of(draw, math.prod(view.shape))
            view, array = view.reshape(shape), array.reshape(shape)
        elif operation == "part" and view.shape:
            start = draw(st.integers(0, view.shape[dimension] - 1))
            stop = draw(st.integers(start + 1, view.shape[dimension]))
            view, array = view.part(dimension, start, stop), array.take(range(start, stop), dimension)
        elif operation == "zeros" and view.shape:
            shape = tuple(2 if place == dimension else size for place, size in enumerate(view.shape))
            array = np.concatenate([array, np.zeros(shape, np.int64)], dimension)
            view = View.concat([view, View.zeros(shape)], dimension)
        elif operation == "concat" and view.shape:
            # With another that fits, or with another order of itself.
            others = [
                n
                for n, other in enumerate(views)
                if len(other.shape) == len(view.shape)
                and all(a == b for d, (a, b) in enumerate(zip(other.shape, view.shape)) if d != dimension)
            ]
            other = draw(st.sampled_from(others))
            array = np.concatenate([array, arrays[other]], dimension)
            view = View.concat([view, views[other]], dimension)
        if math.prod(view.shape) > 2000:
            break
        views[which], arrays[which] = view, array
    return views[0], arrays[0], sources


@pytest.mark.deep
@given(made())
@settings(max_examples=300)
def test_a_chain_of_operations_equals_numpys(case: tuple[View, Array, list[Array]]) -> None:
    view, array, sources = case
    assert view.shape == array.shape
    np.testing.assert_array_equal(elements(view.regions, view.shape, sources), array)
    for region in view.regions:
        assert region.volume <= math.prod(stop - start for start, stop in region.box)


@pytest.mark.deep
@given(made(), st.data())
@settings(max_examples=200)
def test_regions_of_a_box_equal_its_elements(case: tuple[View, Array, list[Array]], data: Any) -> None:
    view, array, sources = case
    box = []
    for size in view.shape:
        start = data.draw(st.integers(0, size - 1))
        box.append((start, data.draw(st.integers(start + 1, size))))
    parts = [part for region in view.regions for part in region.within_box(tuple(box))]
    expected = np.full(array.shape, -1, np.int64)
    inside = tuple(slice(start, stop) for start, stop in box)
    expected[inside] = array[inside]
    np.testing.assert_array_equal(elements(parts, view.shape, sources), expected)


@given(made())
@settings(max_examples=200)
def test_needed_sources_in_another_order_give_the_same_elements(case: tuple[View, Array, list[Array]]) -> None:
    view, array, sources = case
    numbers = list(reversed(range(len(sources))))
    needed, renumbered = view.with_sources(numbers).with_needed_sources()
    stored = [sources[numbers[number]] for number in needed]
    np.testing.assert_array_equal(elements(renumbered.regions, view.shape, stored), array)


@pytest.mark.deep
@given(made(), st.data())
@settings(max_examples=200)
def test_cutting_a_source_keeps_each_element_once(case: tuple[View, Array, list[Array]], data: Any) -> None:
    view, array, sources = case
    number = data.draw(st.integers(0, len(sources) - 1))
    dimension = data.draw(st.integers(0, sources[number].ndim - 1))
    size = sources[number].shape[dimension]
    edge = data.draw(st.integers(0, size))
    parts = []
    for region in view.regions:
        if region.source != number:
            parts.append(region)
            continue
        for start, stop in ((0, edge), (edge, size)):
            cut = list(region.within_source(dimension, start, stop))
            assert all(start <= part.source_box[dimension][0] <= part.source_box[dimension][1] <= stop for part in cut)
            parts += cut
    np.testing.assert_array_equal(elements(parts, view.shape, sources), array)


def test_packing_and_unpacking_gives_few_regions() -> None:
    gate, up = View.whole(0, (1024, 512)), View.whole(1, (1024, 512))
    rows = View.concat([each.reshape((1024, 1, 512)) for each in (gate, up)], 1).reshape((2048, 512))
    assert len(rows.regions) == 2
    query, key, value = View.whole(0, (32 * 128, 64)), View.whole(1, (8 * 128, 64)), View.whole(2, (8 * 128, 64))
    grouped = [query.reshape((8, 512, 64)), key.reshape((8, 128, 64)), value.reshape((8, 128, 64))]
    packed = View.concat(grouped, 1).reshape((48 * 128, 64))
    assert len(packed.regions) == 3
    whole = View.whole(0, (48 * 128, 64)).reshape((8, 768, 64))
    parts = [whole.part(1, 0, 512), whole.part(1, 512, 640), whole.part(1, 640, 768)]
    assert [len(part.reshape((8 * part.shape[1], 64)).regions) for part in parts] == [1, 1, 1]


def test_inverse_operations_give_the_unchanged_tensor() -> None:
    whole = View.whole(0, (6, 4, 5))
    assert whole.transpose([2, 0, 1]).transpose([1, 2, 0]).is_all_of((6, 4, 5))
    assert whole.reshape((24, 5)).reshape((2, 3, 20)).reshape((6, 4, 5)).is_all_of((6, 4, 5))
    assert not whole.transpose([0, 2, 1]).is_all_of((6, 4, 5))
    assert not whole.part(0, 0, 2).is_all_of((6, 4, 5))
    assert not whole.part(0, 0, 6).part(1, 0, 3).is_all_of((6, 4, 5))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2, 2)])
def test_tensors_without_elements_have_no_regions(shape: tuple[int, ...]) -> None:
    view = View.whole(0, shape)
    assert not view.regions
    assert View.concat([view, view], 0).shape == (2 * shape[0], *shape[1:])
    assert view.reshape((0, 7)).shape == (0, 7)


@pytest.mark.parametrize(
    "make",
    [
        lambda: View.whole(0, (2, 3)).reshape((5,)),
        lambda: View.whole(0, (2, 3)).transpose([0, 0]),
        lambda: View.whole(0, (2, 3)).part(1, 2, 4),
        lambda: View.whole(0, (2, 3)).part(2, 0, 1),
        lambda: View.concat([View.whole(0, (2, 3)), View.whole(1, (2, 2))], 0),
        lambda: View.concat([], 0),
    ],
)
def test_operations_on_wrong_shapes_are_errors(make: Any) -> None:
    with pytest.raises(LayoutError):
        make()
