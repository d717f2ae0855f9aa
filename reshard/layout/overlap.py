"""Which source slices a target slice is made of.

1. Along every dimension, merge the edges of all source grids into one ascending list: the *common
   refinement*. Between two neighbouring edges, every source grid has exactly one slice.
2. A target slice is an interval per dimension; the refined intervals it meets, clipped to it, are
   found by bisection.
3. Slices are boxes and grids are separable, so the outer product of these intervals is the
   target slice, cut into *cells* that each lie in one slice of each source grid.

There are several source grids where stages share a parameter (tied embeddings): a cell can then
be taken from any of them. No pair of ranks is ever compared; the cost is that of the edges.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Optional

from reshard.errors import LayoutError
from reshard.layout.grid import Box, Grid
from reshard.layout.layout import Layout
from reshard.layout.views import Region


class Cell(NamedTuple):
    """A box of the tensor, and the slice of every source grid that it lies in.

    Attributes:
        box: interval per dimension, in elements of the full tensor.
        slices: slice number per source grid, in the order they were given.
        region: where it comes from, of a tensor that is a view of others; the grids are those of its source.
    """

    box: Box
    slices: tuple[int, ...]
    region: Optional[Region] = None


class Overlap:
    """The cells of every target slice of one tensor; made once per kind of parameter.

    Args:
        sources: one grid per way in which the tensor is held.
        target: the grid to cut it into.

    Raises:
        LayoutError: the grids are not of one shape.
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
        """The cells of a target slice in C order; none where the slice is empty."""
        found = self._cells.get(target_slice)
        if found is None:
            found = self._cells[target_slice] = tuple(self._find_cells(target_slice))
        return found

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
            slices = []
            for number, grid in enumerate(self.sources):
                slice_number = 0
                for dimension, (interval, _) in enumerate(combination):
                    position = self._positions[dimension][number][interval]
                    slice_number = slice_number * grid.cuts[dimension] + position
                slices.append(slice_number)
            cells.append(Cell(tuple(bounds for _, bounds in combination), tuple(slices)))
        return cells


def refined(grids: Sequence[Grid], shape: Sequence[int]) -> tuple[list[list[int]], list[list[list[int]]]]:
    """The common refinement of grids over one tensor.

    Returns:
        Per dimension the edges of its intervals, ascending; and per dimension and grid the position of the slice
        that every interval lies in.
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
    """The smallest shape that all layouts divide evenly, for planning without any file.

    Even cuts of a tensor overlap alike whatever its size, so a tensor of this shape needs the
    same source slices as the real one, whose shape strategy files need not tell.

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
