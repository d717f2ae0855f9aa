"""Stored boxes of a tensor: they cover it exactly, or are refused."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import LayoutError
from reshard.layout import Box, Grid, shape_of, volume_of
from reshard.layout.boxes import Covering, covering, elements_of


def covered_by(shape: tuple[int, ...], boxes: list[Box]) -> Covering:
    starts = np.array([[start for start, _ in box] for box in boxes], np.int64).reshape(len(boxes), len(shape))
    sizes = np.array([shape_of(box) for box in boxes], np.int64).reshape(len(boxes), len(shape))
    return covering(shape, starts, sizes)


def elements_in(box: Box) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(start, stop) for start, stop in box)))


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor cut into boxes, each cut again along some dimension: mostly no grid."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    boxes: list[Box] = [tuple((0, size) for size in shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dimension = draw(st.integers(0, len(shape) - 1))
        start, stop = box[dimension]
        at = draw(st.integers(start, stop))
        for low, high in ((start, at), (at, stop)):
            boxes.append((*box[:dimension], (low, high), *box[dimension + 1 :]))
    return shape, draw(st.permutations(boxes))


@given(partitions(), st.data())
def test_each_element_is_read_from_the_box_that_contains_it(
    cut: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = cut
    boxes += data.draw(st.lists(st.sampled_from(boxes), max_size=3))
    coverage = covered_by(shape, boxes)
    assert coverage.grid.shape == shape
    for number in range(coverage.grid.slice_count):
        part = coverage.grid.slice_box(number)
        box = coverage.boxes[number if coverage.box_of_slice is None else int(coverage.box_of_slice[number])]
        assert all(low <= a <= b <= high for (a, b), (low, high) in zip(part, box))
    for box, members in zip(coverage.boxes, coverage.members):
        equal = [number for number, each in enumerate(boxes) if each == box]
        assert list(members) == (equal if volume_of(box) else list(range(len(boxes))))
    if coverage.box_of_slice is None:
        assert [coverage.grid.slice_box(number) for number in range(coverage.grid.slice_count)] == list(coverage.boxes)


@given(partitions(), st.data())
def test_boxes_with_holes_or_overlaps_are_refused(cut: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    shape, boxes = cut
    for _ in range(data.draw(st.integers(1, 2))):
        number = data.draw(st.integers(0, len(boxes) - 1))
        if not shape or data.draw(st.booleans()):
            del boxes[number]
            if not boxes:
                break
            continue
        dimension = data.draw(st.integers(0, len(shape) - 1))
        moved = tuple(sorted(data.draw(st.tuples(*2 * [st.integers(0, shape[dimension])]))))
        boxes[number] = (*boxes[number][:dimension], moved, *boxes[number][dimension + 1 :])
    whole = [tuple((0, size) for size in shape)]
    times = Counter(itertools.chain.from_iterable(map(elements_in, set(boxes))))
    if times == Counter(elements_in(whole[0])):
        covered_by(shape, boxes)
        return
    with pytest.raises(LayoutError) as refused:
        covered_by(shape, boxes)
    assert "no chunk holds" in refused.value.message or "overlap" in refused.value.message


@pytest.mark.parametrize(
    ("boxes", "texts"),
    [
        ([((0, 5), (0, 6))], "no chunk holds rows 5 to 8"),
        ([((0, 5), (0, 6)), ((6, 9), (0, 6))], "no chunk holds row 5"),
        ([((0, 9), (0, 4))], r"no chunk holds elements \[0:9, 4:6\]"),
        ([((0, 5), (0, 6)), ((4, 9), (0, 6))], "rows 4 to 8 and rows 0 to 4 overlap"),
        ([((0, 9), (0, 6)), ((3, 4), (2, 3))], "overlap"),
        ([((0, 9), (0, 7))], r"shape \[9, 7\] at \[0, 0\] does not lie in a tensor of shape \[9, 6\]"),
        ([((0, 0), (0, 6))], "no chunk holds rows 0 to 8"),
    ],
)
def test_the_missing_or_doubled_elements_are_named(boxes: list[Box], texts: str) -> None:
    with pytest.raises(LayoutError, match=texts):
        covered_by((9, 6), boxes)


def test_a_pinwheel_is_read_from_its_five_boxes() -> None:
    pinwheel: list[Box] = [((0, 1), (0, 2)), ((0, 2), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (0, 1)), ((1, 2), (1, 2))]
    coverage = covered_by((3, 3), pinwheel)
    assert coverage.grid == Grid(((0, 1, 2, 3), (0, 1, 2, 3)))
    assert set(coverage.boxes) == set(pinwheel)


def test_missing_rows_are_named_as_rows() -> None:
    assert elements_of(((3, 4), (0, 5)), (9, 5)) == "row 3"
    assert elements_of(((3, 6),), (9,)) == "rows 3 to 5"
    assert elements_of(((0, 9), (1, 2)), (9, 5)) == "elements [0:9, 1:2]"
