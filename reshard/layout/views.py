"""Tensors made of others without arithmetic: strided boxes of numbered source tensors.

Concatenation, splitting, interleaving of rows, stacking, grouping of query heads, transposition and
reshaping only move elements. After any chain of them, each element is one element of one source. Elements form few
*regions*: nested loops with constant steps through the tensor and through a source. So a view contains no elements or
indices, for tensors of any size. A layout cuts regions of the view or its sources into regions.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reshard.errors import LayoutError
from reshard.layout.grid import Box, Cell, Grid, refined, slices_at
from reshard.threads import cached_property

ZEROS = -1
"""Source number of zeros: elements without a source."""


class Loop(NamedTuple):
    """Elements with constant steps in the view and in the source.

    Attributes:
        length: number of elements, at least 2.
        dimension: of the view.
        step: distance in the view, at least 1.
        source_dimension: of the source.
        source_step: distance in the source, at least 1.
    """

    length: int
    dimension: int
    step: int
    source_dimension: int
    source_step: int


class Region(NamedTuple):
    """Nested loops through a view and through one of its sources.

    Invariant, along each dimension of both: the loops of smaller steps stay within one step of a larger loop.

    Attributes:
        source: number of the source, or ``ZEROS``.
        origin: the first element, per dimension of the view.
        source_origin: the first element, per dimension of the source.
        loops: sorted by dimension of the view, then largest step first.
    """

    source: int
    origin: tuple[int, ...]
    source_origin: tuple[int, ...]
    loops: tuple[Loop, ...]

    @property
    def is_zeros(self) -> bool:
        return self.source == ZEROS

    @property
    def volume(self) -> int:
        return math.prod(loop.length for loop in self.loops)

    @property
    def box(self) -> Box:
        """The smallest box of the view that contains it."""
        stops = [start + 1 for start in self.origin]
        for loop in self.loops:
            stops[loop.dimension] += (loop.length - 1) * loop.step
        return tuple(zip(self.origin, stops))

    @property
    def source_box(self) -> Box:
        """The smallest box of the source that contains it."""
        stops = [start + 1 for start in self.source_origin]
        for loop in self.loops:
            stops[loop.source_dimension] += (loop.length - 1) * loop.source_step
        return tuple(zip(self.source_origin, stops))

    def within(self, dimension: int, start: int, stop: int) -> Iterator[Region]:
        """The parts between two positions along a dimension of the view."""
        first = self.origin[dimension]
        places = [place for place, loop in enumerate(self.loops) if loop.dimension == dimension]
        # Loops are sorted by step already.
        steps = [(self.loops[place].length, self.loops[place].step) for place in places]
        for ranges in _ranges(steps, start - first, stop - first):
            yield self._part(places, ranges)

    def within_source(self, dimension: int, start: int, stop: int) -> Iterator[Region]:
        """The parts between two positions along a dimension of the source."""
        first = self.source_origin[dimension]
        places = [place for place, loop in enumerate(self.loops) if loop.source_dimension == dimension]
        places.sort(key=lambda place: -self.loops[place].source_step)
        steps = [(self.loops[place].length, self.loops[place].source_step) for place in places]
        for ranges in _ranges(steps, start - first, stop - first):
            yield self._part(places, ranges)

    def within_box(self, box: Box) -> Iterator[Region]:
        """The parts in a box of the view."""
        regions: Iterable[Region] = [self]
        for dimension, ((start, stop), (low, high)) in enumerate(zip(box, self.box)):
            if start > low or stop < high:
                regions = [part for region in regions for part in region.within(dimension, start, stop)]
        yield from regions

    def moved(self, offsets: Sequence[int]) -> Region:
        """The same elements at other positions of the view."""
        return self._replace(origin=tuple(start + offset for start, offset in zip(self.origin, offsets)))

    def _part(self, places: Sequence[int], ranges: Sequence[tuple[int, int]]) -> Region:
        """The elements ``first`` to ``first + count`` of some loops."""
        loops, origin, source_origin = list(self.loops), list(self.origin), list(self.source_origin)
        for place, (first, count) in zip(places, ranges):
            loop = loops[place]
            origin[loop.dimension] += first * loop.step
            if not self.is_zeros:
                source_origin[loop.source_dimension] += first * loop.source_step
            loops[place] = loop._replace(length=count)
        return _region(self.source, origin, source_origin, loops)

    def _split(self, dimension: int, inner: int) -> list[Region]:
        """The regions after a dimension is split in two; the second has ``inner`` elements."""
        outer, low = divmod(self.origin[dimension], inner)
        crossing = [loop for loop in self.loops if loop.dimension == dimension and loop.step % inner]
        span = sum((loop.length - 1) * loop.step for loop in crossing)
        if low + span < inner:
            return [self._carried(dimension, inner, outer, low)]
        widest = max(crossing, key=lambda loop: loop.step)
        other_spans = span - (widest.length - 1) * widest.step
        if widest.step > inner or inner % widest.step or low % widest.step + other_spans >= widest.step:
            # Row by row of the new outer dimension. The built-in operations need no such case.
            touched = range(outer, (self.box[dimension][1] - 1) // inner + 1)
            parts = (part for row in touched for part in self.within(dimension, row * inner, (row + 1) * inner))
            return [region for part in parts for region in part._split(dimension, inner)]
        turn = inner // widest.step
        place = self.loops.index(widest)
        head = min(widest.length, -(low // widest.step) % turn)
        full = (widest.length - head) // turn
        tail = widest.length - head - full * turn
        regions = []
        if head:
            regions += self._part([place], [(0, head)])._split(dimension, inner)
        if full:
            # As one loop over whole rows, and one within a row.
            rows = Loop(full, dimension, inner, widest.source_dimension, widest.source_step * turn)
            loops = (*self.loops[:place], rows, widest._replace(length=turn), *self.loops[place + 1 :])
            moved = self._part([place], [(head, 1)])
            whole_rows = Region(self.source, moved.origin, moved.source_origin, loops)
            regions.append(whole_rows._carried(dimension, inner, *divmod(moved.origin[dimension], inner)))
        if tail:
            regions += self._part([place], [(head + full * turn, tail)])._split(dimension, inner)
        return regions

    def _carried(self, dimension: int, inner: int, outer: int, low: int) -> Region:
        """The region where every loop stays in one of the two dimensions that a dimension becomes."""
        origin = (*self.origin[:dimension], outer, low, *self.origin[dimension + 1 :])
        loops = []
        for loop in self.loops:
            if loop.dimension < dimension:
                loops.append(loop)
            elif loop.dimension > dimension:
                loops.append(loop._replace(dimension=loop.dimension + 1))
            elif loop.step % inner:
                loops.append(loop._replace(dimension=dimension + 1))
            else:
                loops.append(loop._replace(step=loop.step // inner))
        return _region(self.source, origin, self.source_origin, loops)


@dataclass(frozen=True)
class View:
    """A tensor whose elements are elements of numbered sources, or zero.

    Attributes:
        shape: elements per dimension.
        regions: disjoint; together they cover the view.
    """

    shape: tuple[int, ...]
    regions: tuple[Region, ...]

    @classmethod
    def whole(cls, source: int, shape: Sequence[int]) -> View:
        """An unchanged source."""
        zeros = (0,) * len(shape)
        loops = [Loop(size, dimension, 1, dimension, 1) for dimension, size in enumerate(shape)]
        return cls(tuple(shape), (_region(source, zeros, zeros, loops),) if math.prod(shape) else ())

    @classmethod
    def zeros(cls, shape: Sequence[int]) -> View:
        return View.whole(ZEROS, shape)

    @classmethod
    def concat(cls, views: Sequence[View], dimension: int) -> View:
        """Views one after the other along a dimension.

        Raises:
            LayoutError: no views, or views that differ in another dimension.
        """
        if not views:
            raise LayoutError("no tensors to join")
        first = views[0].shape
        _check_dimension(dimension, first)
        regions: list[Region] = []
        offset = 0
        for view in views:
            if (*view.shape[:dimension], *view.shape[dimension + 1 :]) != (*first[:dimension], *first[dimension + 1 :]):
                shapes = ", ".join(str(list(each.shape)) for each in views[:4])
                raise LayoutError(f"tensors of shapes {shapes} cannot be joined along dimension {dimension}")
            offsets = [0] * len(first)
            offsets[dimension] = offset
            regions += (region.moved(offsets) for region in view.regions)
            offset += view.shape[dimension]
        return cls((*first[:dimension], offset, *first[dimension + 1 :]), tuple(regions))

    def part(self, dimension: int, start: int, stop: int) -> View:
        """The part between two positions along a dimension.

        Raises:
            LayoutError: a position is outside the tensor.
        """
        _check_dimension(dimension, self.shape)
        if not 0 <= start <= stop <= self.shape[dimension]:
            raise LayoutError(f"{start} to {stop} is not within dimension {dimension} of shape {list(self.shape)}")
        shape = (*self.shape[:dimension], stop - start, *self.shape[dimension + 1 :])
        if not math.prod(shape):
            return View(shape, ())
        offsets = [0] * len(shape)
        offsets[dimension] = -start
        parts = (part for region in self.regions for part in region.within(dimension, start, stop))
        return View(shape, tuple(part.moved(offsets) for part in parts))

    def transpose(self, order: Sequence[int]) -> View:
        """The same elements with the dimensions in another order.

        Args:
            order: the old dimension of each new one.

        Raises:
            LayoutError: ``order`` is not a permutation of the dimensions.
        """
        if sorted(order) != list(range(len(self.shape))):
            raise LayoutError(f"{list(order)} is not a permutation of the dimensions of shape {list(self.shape)}")
        place = {dimension: number for number, dimension in enumerate(order)}
        regions = (
            _region(
                region.source,
                [region.origin[dimension] for dimension in order],
                region.source_origin,
                [loop._replace(dimension=place[loop.dimension]) for loop in region.loops],
            )
            for region in self.regions
        )
        return View(tuple(self.shape[dimension] for dimension in order), tuple(regions))

    def with_sources(self, numbers: Sequence[int]) -> View:
        """The same view with other numbers of its sources, by the present ones."""
        if all(number == place for place, number in enumerate(numbers)):
            return self
        return View(
            self.shape,
            tuple(each if each.is_zeros else each._replace(source=numbers[each.source]) for each in self.regions),
        )

    def with_needed_sources(self) -> tuple[tuple[int, ...], View]:
        """The sources that have elements of it, ascending, and the view of these, numbered from 0."""
        # A view without elements, or of zeros only, still gets its type from a source.
        needed = sorted({region.source for region in self.regions} - {ZEROS}) or [0]
        places = {source: place for place, source in enumerate(needed)}
        return tuple(needed), self.with_sources([places.get(number, 0) for number in range(needed[-1] + 1)])

    def reshape(self, shape: Sequence[int]) -> View:
        """The same elements in C order, as a tensor of another shape.

        Raises:
            LayoutError: the number of elements differs.
        """
        if math.prod(shape) != math.prod(self.shape) or any(size < 0 for size in shape):
            raise LayoutError(f"a tensor of shape {list(self.shape)} cannot get shape {list(shape)}")
        if not math.prod(shape):
            return View(tuple(shape), ())
        regions = list(self.regions)
        # From the last group on, so that the numbers of earlier dimensions stay valid.
        for first, count, sizes in reversed(list(_regrouped(self.shape, shape))):
            if not sizes:
                regions = [_without(region, first, count) for region in regions]
                continue
            if count != 1:
                regions = [_joined(region, first, self.shape[first : first + count]) for region in regions]
            for place in range(len(sizes) - 1):
                inner = math.prod(sizes[place + 1 :])
                regions = [part for region in regions for part in region._split(first + place, inner)]
        return View(tuple(shape), tuple(regions))

    def is_all_of(self, shape: Sequence[int]) -> bool:
        """Whether it equals the first source, which has this shape."""
        return self.shape == tuple(shape) and self.regions == View.whole(0, shape).regions

    def keeps_rows(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether neighbours along the last dimension of a source stay neighbours, except at edges of regions."""
        last = len(self.shape) - 1
        for region in self.regions:
            # Loops of zeros go along the view on both sides.
            last_of_source = last if region.is_zeros else len(shapes[region.source]) - 1
            along = [loop for loop in region.loops if loop.dimension == last or loop.source_dimension == last_of_source]
            length = along[0].length if along else 1
            if along not in ([], [Loop(length, last, 1, last_of_source, 1)]):
                return False
            if region.is_zeros and length < self.shape[last]:
                return False
        return True

    @cached_property
    def padded(self) -> bool:
        """Whether some elements are zeros without a source."""
        return any(region.is_zeros for region in self.regions)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Cached: views are dictionary keys for every layer, and may have a region per expert.
        return hash((self.shape, self.regions))


def _region(source: int, origin: Sequence[int], source_origin: Sequence[int], loops: Iterable[Loop]) -> Region:
    """A region in normal form: sorted loops, without loops of one element, contiguous loops joined."""
    ordered = sorted(
        (loop for loop in loops if loop.length > 1),
        key=lambda loop: (loop.dimension, -loop.step, loop.source_dimension),
    )
    joined: list[Loop] = []
    for loop in ordered:
        before = joined[-1] if joined else None
        if (
            before is not None
            and (before.dimension, before.source_dimension) == (loop.dimension, loop.source_dimension)
            and (before.step, before.source_step) == (loop.length * loop.step, loop.length * loop.source_step)
        ):
            joined[-1] = loop._replace(length=before.length * loop.length)
        else:
            joined.append(loop)
    if source == ZEROS:
        source_origin = [0] * len(source_origin)
    return Region(source, tuple(origin), tuple(source_origin), tuple(joined))


def _ranges(steps: Sequence[tuple[int, int]], low: int, high: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The parts of nested loops with positions from ``low`` to ``high``.

    Args:
        steps: (count, step) of every loop, the largest step first; they begin at position 0.
        low: first position.
        high: one past the last.

    Yields:
        Per loop its first element and the number of elements.
    """
    span = sum((count - 1) * step for count, step in steps)
    if low <= 0 and span < high:
        yield tuple((0, count) for count, _ in steps)
        return
    if not steps or low > span or high <= 0:
        return
    (count, step), inner = steps[0], steps[1:]
    inner_span = span - (count - 1) * step
    begin, end = max(0, -(-(low - inner_span) // step)), min(count - 1, (high - 1) // step)
    # Elements first to last are completely inside, the others partly.
    first, last = max(0, -(-low // step)), min(count - 1, (high - 1 - inner_span) // step)
    number = begin
    while number <= end:
        if first <= number <= last:
            yield ((number, last + 1 - number), *((0, each) for each, _ in inner))
            number = last + 1
            continue
        for inner_ranges in _ranges(inner, low - number * step, high - number * step):
            yield ((number, 1), *inner_ranges)
        number += 1


def _joined(region: Region, first: int, sizes: Sequence[int]) -> Region:
    """The region after several dimensions are joined to one."""
    last = first + len(sizes)
    scales = [math.prod(sizes[place + 1 :]) for place in range(len(sizes))]
    position = sum(start * scale for start, scale in zip(region.origin[first:last], scales))
    loops = []
    for loop in region.loops:
        if first <= loop.dimension < last:
            loop = loop._replace(dimension=first, step=loop.step * scales[loop.dimension - first])
        elif loop.dimension >= last:
            loop = loop._replace(dimension=loop.dimension - len(sizes) + 1)
        loops.append(loop)
    origin = (*region.origin[:first], position, *region.origin[last:])
    return _region(region.source, origin, region.source_origin, loops)


def _without(region: Region, first: int, count: int) -> Region:
    """The region after dimensions of one element are removed."""
    loops = [
        loop._replace(dimension=loop.dimension - count) if loop.dimension >= first else loop for loop in region.loops
    ]
    origin = (*region.origin[:first], *region.origin[first + count :])
    return _region(region.source, origin, region.source_origin, loops)


def _regrouped(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[int, int, Sequence[int]]]:
    """Groups of old and new dimensions with equal numbers of elements, as small as possible.

    Yields:
        The first old dimension of a group, the number of old dimensions, and the new sizes. Dimensions of one element
        stay beside their neighbours.
    """
    at = to = 0
    while at < len(old) or to < len(new):
        begin, start = at, to
        old_elements, new_elements = 1, 1
        if at < len(old):
            old_elements, at = old[at], at + 1
        if to < len(new):
            new_elements, to = new[to], to + 1
        while old_elements != new_elements:
            if old_elements < new_elements:
                old_elements, at = old_elements * old[at], at + 1
            else:
                new_elements, to = new_elements * new[to], to + 1
        yield begin, at - begin, new[start:to]


def _check_dimension(dimension: int, shape: Sequence[int]) -> None:
    if not 0 <= dimension < len(shape):
        raise LayoutError(f"a tensor of shape {list(shape)} has no dimension {dimension}")


class ViewOverlap:
    """The cells of every target slice of one view; created once per kind of tensor.

    Args:
        sources: per source of the view its grids, one per sharding.

    Raises:
        LayoutError: the target's grid does not have the view's shape.
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
        """The cells of a target slice, by region; those of zeros have no slices."""
        cells = self._cells.get(target_slice)
        if cells is None:
            box = self.target.slice_box(target_slice)
            parts = (part for region in self.view.regions for part in region.within_box(box))
            cells = self._cells[target_slice] = tuple(cell for part in parts for cell in self._cells_of(part))
        return cells

    def _cells_of(self, region: Region) -> Iterable[Cell]:
        if region.is_zeros:
            return [Cell(region.box, (), region)]
        edges, positions = self._refined[region.source]
        # Regions with the numbers of the refined intervals that contain them, of the dimensions so far.
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
        grids = self._grids[region.source]
        return [Cell(part.box, slices_at(grids, positions, intervals), part) for part, intervals in parts]
