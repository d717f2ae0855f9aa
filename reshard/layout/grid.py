"""Cutting a tensor into boxes, and the source boxes of a target box: the geometry of layouts, without ranks.

A box is an interval per dimension, in elements of the full tensor, so boxes of different grids are comparable. A grid
cuts every dimension separately; its boxes are numbered in C order. It is created from a `Layout` and a shape, or from
the offsets in a file's metadata.

The source slices of a target slice are found in three steps:

1. Along every dimension, merge the edges of all source grids into one ascending list: the *common refinement*. Between
   two neighbouring edges, every source grid has exactly one slice.
2. A target slice is an interval per dimension; the refined intervals it meets, clipped to it, are found by bisection.
3. Slices are boxes and grids are separable, so the outer product of these intervals is the target slice, cut into
   *cells* that each lie in one slice of each source grid.

Several source grids exist if stages share a parameter (tied embeddings); a cell can be read from any of them. The cost
is linear in the edges: pairs of ranks are never compared. Regions of a view are cut alike, see `views.ViewOverlap`.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import LayoutError
from reshard.threads import cached_property

if TYPE_CHECKING:
    from reshard.layout.views import Region

Box = tuple[tuple[int, int], ...]
"""Start and stop per dimension; () is the one element of a scalar."""


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def volume_of(box: Box) -> int:
    return math.prod(shape_of(box))


def whole_box(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def intersection(first: Box, second: Box) -> Box | None:
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


class Cell(NamedTuple):
    """A box of the tensor, and the slice of every source grid that contains it.

    Attributes:
        box: interval per dimension, in elements of the full tensor.
        slices: slice number per source grid, in the order of the grids.
        region: its source, for a view of other tensors; the grids are those of this source.
    """

    box: Box
    slices: tuple[int, ...]
    region: Region | None = None

    @property
    def source_number(self) -> int:
        """The number of its source tensor, for a view of several."""
        return 0 if self.region is None else self.region.source


class Overlap:
    """The cells of every target slice of one tensor; created once per kind of parameter.

    Raises:
        LayoutError: the grids differ in shape.
    """

    def __init__(self, sources: Sequence[Grid], target: Grid) -> None:
        for grid in sources:
            if grid.shape != target.shape:
                raise LayoutError(f"tensors of shapes {list(grid.shape)} and {list(target.shape)} are not one tensor")
        self.shape = target.shape
        self.sources = tuple(sources)
        self.target = target
        self._edges, self._positions = refined(sources, self.shape)
        self._cells: dict[int, tuple[Cell, ...]] = {}

    def intervals(self, dimension: int, position: int) -> tuple[int, int]:
        """The refined intervals ``[first, last)`` that the target's cut at ``position`` meets."""
        edges = self._edges[dimension]
        start, stop = self.target.edges[dimension][position : position + 2]
        first = bisect_right(edges, start) - 1
        return (first, bisect_left(edges, stop)) if stop > start else (first, first)

    def cells(self, target_slice: int) -> tuple[Cell, ...]:
        """The cells of a target slice in C order; none for an empty slice."""
        cells = self._cells.get(target_slice)
        if cells is None:
            cells = self._cells[target_slice] = tuple(self._find_cells(target_slice))
        return cells

    def _find_cells(self, target_slice: int) -> list[Cell]:
        index = self.target.slice_index(target_slice)
        choices = []
        for dimension, position in enumerate(index):
            start, stop = self.target.edges[dimension][position : position + 2]
            edges = self._edges[dimension]
            first, last = self.intervals(dimension, position)
            choices.append(
                [
                    (interval, (max(edges[interval], start), min(edges[interval + 1], stop)))
                    for interval in range(first, last)
                ]
            )
        cells = []
        for combination in itertools.product(*choices):
            slices = slices_at(self.sources, self._positions, [interval for interval, _ in combination])
            cells.append(Cell(tuple(bounds for _, bounds in combination), slices))
        return cells


def slices_at(
    grids: Sequence[Grid], positions: Sequence[Sequence[Sequence[int]]], intervals: Sequence[int]
) -> tuple[int, ...]:
    """The slice number in each grid that contains one refined interval per dimension; ``positions`` of `refined`."""
    slices = []
    for number, grid in enumerate(grids):
        slice_number = 0
        for dimension, interval in enumerate(intervals):
            slice_number = slice_number * grid.cuts[dimension] + positions[dimension][number][interval]
        slices.append(slice_number)
    return tuple(slices)


def refined(grids: Sequence[Grid], shape: Sequence[int]) -> tuple[list[list[int]], list[list[list[int]]]]:
    """The common refinement of grids over one tensor.

    Returns:
        Per dimension the edges of its intervals, ascending; and per dimension, grid and interval the position of the
        slice that contains it.
    """
    all_edges: list[list[int]] = []
    positions: list[list[list[int]]] = []
    for dimension, size in enumerate(shape):
        cuts = [grid.edges[dimension] for grid in grids]
        edges = sorted({0, size, *itertools.chain.from_iterable(cuts)})
        all_edges.append(edges)
        positions.append([[bisect_right(cut, edge) - 1 for edge in edges[:-1]] for cut in cuts])
    return all_edges, positions
