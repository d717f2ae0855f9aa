"""Cutting a tensor into boxes: the geometry of a layout, without ranks.

A box is an interval per dimension, in elements of the full tensor, so boxes of different grids are comparable. A grid
cuts every dimension separately; its boxes are numbered in C order. It is created from a `Layout` and a shape, or from
the offsets in a file's metadata.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

from reshard.threads import cached_property

Box = tuple[tuple[int, int], ...]
"""Start and stop per dimension; () is the one element of a scalar."""


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def volume_of(box: Box) -> int:
    return math.prod(shape_of(box))


def whole_box(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def intersection(first: Box, second: Box) -> Optional[Box]:
    """The common part of two boxes, or None if it is empty."""
    common = []
    for (start, stop), (begin, end) in zip(first, second):
        low, high = max(start, begin), min(stop, end)
        if low >= high:
            return None
        common.append((low, high))
    return tuple(common)


def inside(box: Box, around: Box) -> tuple[slice, ...]:
    """A box as an index into the array of a box around it."""
    return tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(box, around))


def placed(part: Box, box: Box) -> Box:
    """A part of a box, whose numbers count from the box's first element, in the numbers of the box."""
    return tuple((start + low, start + high) for (start, _), (low, high) in zip(box, part))


def place_of(number: int, cuts: Sequence[int]) -> tuple[int, ...]:
    """The position of a box along every dimension."""
    place = []
    for count in reversed(cuts):
        number, position = divmod(number, count)
        place.append(position)
    return tuple(reversed(place))


def boxes_of_range(shape: Sequence[int], start: int, stop: int, most: int) -> Iterator[Box]:
    """The elements ``start`` to ``stop`` of a C-order array, as boxes of at most ``most`` elements.

    A file is written front to back, so a tensor is produced in C order. A few boxes cover any run of elements in C
    order: each is one position of the outer axes, a range of one axis and all of the inner ones.

    Args:
        start: first element, counted in C order.
        stop: one past the last.
        most: maximum number of elements in a box, at least 1.
    """
    rows = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if not shape:
        if start < stop:
            yield ()
        return
    position = start
    while position < stop:
        room = min(most, stop - position)
        # The outermost axis along which whole rows fit; the innermost always does.
        axis = next(a for a, row in enumerate(rows) if position % row == 0 and row <= room)
        row = rows[axis]
        first = position // row % shape[axis]
        count = min(shape[axis] - first, room // row)
        outer = tuple((i, i + 1) for i in (position // rows[a] % shape[a] for a in range(axis)))
        inner = tuple((0, size) for size in shape[axis + 1 :])
        yield (*outer, (first, first + count), *inner)
        position += count * row


@dataclass(frozen=True)
class Grid:
    """A tensor cut into boxes.

    Attributes:
        edges: per dimension the ascending edges of boxes, from 0 to its size; a dimension that is not cut has two.
            Equal neighbours are an empty box.
    """

    edges: tuple[tuple[int, ...], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Grid:
        """The grid of one box."""
        return cls(tuple((0, size) for size in shape))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Elements per dimension of the full tensor."""
        return tuple(edges[-1] for edges in self.edges)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Boxes per dimension."""
        return tuple(len(edges) - 1 for edges in self.edges)

    @cached_property
    def slice_count(self) -> int:
        return math.prod(self.cuts)

    def slice_index(self, slice_number: int) -> tuple[int, ...]:
        """A box's position along every dimension."""
        return place_of(slice_number, self.cuts)

    def slice_box(self, slice_number: int) -> Box:
        index = self.slice_index(slice_number)
        return tuple((edges[position], edges[position + 1]) for edges, position in zip(self.edges, index))
