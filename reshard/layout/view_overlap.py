"""Which source slices a slice of a view is made of.

A view is made of regions of its sources. Cut by the box of a target slice, and by the edges of all grids over
a source, each becomes regions that lie in one slice of every grid: the cells.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from reshard.errors import LayoutError
from reshard.layout.grid import Grid
from reshard.layout.overlap import Cell, refined
from reshard.layout.views import ZEROS, Region, View


class ViewOverlap:
    """The cells of every target slice of one view; made once per kind of tensor.

    Args:
        sources: per source of the view its grids, one per way in which it is held.
        view: what the tensor is made of.
        target: the grid to cut it into.

    Raises:
        LayoutError: the target's grid is not of the view's shape.
    """

    def __init__(self, sources: Sequence[Sequence[Grid]], view: View, target: Grid) -> None:
        if view.shape != target.shape:
            raise LayoutError(f"tensors of shapes {list(view.shape)} and {list(target.shape)} are not one tensor")
        self.view = view
        self.target = target
        self._grids = [tuple(grids) for grids in sources]
        self._refined = [refined(grids, grids[0].shape) for grids in sources]
        self._cells: dict[int, tuple[Cell, ...]] = {}

    def cells(self, target_slice: int) -> tuple[Cell, ...]:
        """The cells of a target slice, by region; those of elements that no source has are in no slice."""
        found = self._cells.get(target_slice)
        if found is None:
            box = self.target.slice_box(target_slice)
            parts = (part for region in self.view.regions for part in region.within_box(box))
            found = self._cells[target_slice] = tuple(cell for part in parts for cell in self._cells_of(part))
        return found

    def _cells_of(self, region: Region) -> Iterable[Cell]:
        if region.source == ZEROS:
            return [Cell(region.box, (), region)]
        edges, positions = self._refined[region.source]
        # Regions with the number of the refined interval that they lie in, per dimension so far.
        parts: list[tuple[Region, tuple[int, ...]]] = [(region, ())]
        for dimension, bounds in enumerate(edges):
            cut = []
            for part, intervals in parts:
                first, stop = part.source_box[dimension]
                begin, end = bisect_right(bounds, first) - 1, bisect_right(bounds, stop - 1) - 1
                if begin == end:
                    cut.append((part, (*intervals, begin)))
                    continue
                for number in range(begin, end + 1):
                    inside = part.within_source(dimension, bounds[number], bounds[number + 1])
                    cut += ((each, (*intervals, number)) for each in inside)
            parts = cut
        return [Cell(part.box, self._slices(region.source, positions, at), part) for part, at in parts]

    def _slices(self, source: int, positions: Sequence[Sequence[Sequence[int]]], at: Sequence[int]) -> tuple[int, ...]:
        slices = []
        for number, grid in enumerate(self._grids[source]):
            slice_number = 0
            for dimension, interval in enumerate(at):
                slice_number = slice_number * grid.cuts[dimension] + positions[dimension][number][interval]
            slices.append(slice_number)
        return tuple(slices)
