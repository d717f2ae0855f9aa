"""The source slices of a target slice.

1. Along every dimension, merge the edges of all source grids into one ascending list: the *common
   refinement*. Between two neighbouring edges, every source grid has exactly one slice.
2. A target slice is an interval per dimension; the refined intervals it meets, clipped to it, are
   found by bisection.
3. Slices are boxes and grids are separable, so the outer product of these intervals is the
   target slice, cut into *cells* that each lie in one slice of each source grid.

Several source grids exist if stages share a parameter (tied embeddings); a cell can be read from any of them. The cost
is linear in the edges: pairs of ranks are never compared.

Regions of a view are cut in the same way, see `views.ViewOverlap`.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Optional

from reshard.errors import LayoutError
from reshard.layout.grid import Box, Grid
from reshard.layout.layout import Layout

if TYPE_CHECKING:
    from reshard.layout.views import Region


class Cell(NamedTuple):
    """A box of the tensor, and the slice of every source grid that contains it.

    Attributes:
        box: interval per dimension, in elements of the full tensor.
        slices: slice number per source grid, in the order of the grids.
        region: its source, for a view of other tensors; the grids are those of this source.
    """

    box: Box
    slices: tuple[int, ...]
    region: Optional[Region] = None


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


def stand_in_shape(sources: Sequence[Layout], target: Layout) -> tuple[int, ...]:
    """The smallest shape that all layouts divide evenly, for planning without files.

    Even cuts overlap in the same way for every size, so a tensor of this shape needs the same source slices as the
    real one, whose shape strategy files may not contain.

    Raises:
        LayoutError: the layouts have different numbers of dimensions.
    """
    dimensions = {len(layout.cuts) for layout in (*sources, target)}
    if len(dimensions) > 1:
        maps = ", ".join(layout.map_text for layout in (*sources, target))
        raise LayoutError(f"tensor maps {maps} lay out different numbers of dimensions")
    shape = []
    for dimension in range(len(target.cuts)):
        by_hand = [sum(layout.uneven) for layout in (*sources, target) if dimension == 0 and layout.uneven is not None]
        even = math.lcm(*(layout.cuts[dimension] for layout in (*sources, target)))
        shape.append(by_hand[0] if by_hand else even)
    return tuple(shape)
