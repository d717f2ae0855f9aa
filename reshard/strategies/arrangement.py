"""The slices of one parameter and the ranks that hold them.

Only JSON strategies contain the full shape. The unit of a dimension of unknown size is a slice: ``1/8..2/8``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from reshard.layout import Box
from reshard.strategies import Holding
from reshard.text.messages import some_numbers
from reshard.threads import cached_property


class Slice(NamedTuple):
    """One slice, or one whole tensor-parallel slice with all its optimizer shards, and the ranks that hold it.

    The box is in units of `Arrangement.extents`; the place is the position per dimension.
    """

    box: Box
    place: tuple[int, ...]
    ranks: tuple[int, ...]


class Arrangement:
    """The slices of one parameter on the ranks of one stage.

    Attributes:
        extents: size of every dimension: elements if known, otherwise its number of slices.
        in_elements: per dimension, whether its size is in elements.
        readings: other readings of the file, in words.

    Raises:
        LayoutError: the recorded shape does not divide by the cuts.
    """

    def __init__(self, holding: Holding) -> None:
        layout, *alternatives = holding.layout.regroupings() or [holding.layout]
        self.holding = holding._replace(layout=layout)
        self.layout = layout
        self.readings = tuple(
            f"the file can also mean shape {list(alternative.recorded_shape or ())}, tensor map {alternative.map_text}"
            for alternative in alternatives
        )
        shape: Sequence[int | None] = layout.recorded_shape or [None] * len(layout.cuts)
        known_sizes = [sum(layout.uneven) if layout.uneven and not d else size for d, size in enumerate(shape)]
        self.in_elements = tuple(size is not None for size in known_sizes)
        self.extents = tuple(cuts if size is None else size for size, cuts in zip(known_sizes, layout.cuts))
        self._edges = [layout.boundaries(dimension, size) for dimension, size in enumerate(self.extents)]

    @cached_property
    def without_shards(self) -> Arrangement:
        return Arrangement(self.holding._replace(layout=self.layout.without_shards()))

    @property
    def cut_dimensions(self) -> list[int]:
        return [dimension for dimension, cuts in enumerate(self.layout.cuts) if cuts > 1]

    def slice(self, number: int) -> Slice:
        index = self.layout.slice_index(number)
        box = tuple((edges[at], edges[at + 1]) for edges, at in zip(self._edges, index))
        return Slice(box, index, tuple(self.holding.holders(number)))

    def at(self, index: Sequence[int]) -> Slice:
        number = 0
        for position, cuts in zip(index, self.layout.cuts):
            number = number * cuts + position
        return self.slice(number)

    def slices(self) -> Iterator[Slice]:
        return map(self.slice, range(self.layout.slice_count))

    def interval(self, dimension: int, position: int) -> str:
        """The interval of a slice along a dimension: ``8..16``, or ``1/8..2/8`` if the size is unknown."""
        if self.layout.cuts[dimension] == 1:
            return "whole"
        start, stop = self._edges[dimension][position : position + 2]
        of = "" if self.in_elements[dimension] else f"/{self.extents[dimension]}"
        return f"{start}{of}..{stop}{of}"

    def length(self, dimension: int, position: int) -> int:
        start, stop = self._edges[dimension][position : position + 2]
        return stop - start

    def axis_lines(self) -> list[str]:
        cut_by = {axis: dimension for dimension, axes in enumerate(self.layout.tensor_map) for axis in axes}
        lines = []
        for place, size in enumerate(self.layout.device_matrix):
            axis = len(self.layout.device_matrix) - 1 - place
            if size == 1:
                does = "nothing"
            elif axis in cut_by:
                does = f"cuts dimension {cut_by[axis]} in {size}"
            elif self.layout.shards == 1:
                does = "repeats slices: replicas"
            elif self.layout.shards == self.layout.replica_count:
                does = "repeats slices: optimizer shards"
            else:
                does = f"repeats slices: {self.layout.shards} optimizer shards and their replicas"
            lines.append(f"axis {axis} of size {size}: {does}")
        return lines

    def dimension_lines(self) -> list[str]:
        lines = []
        for dimension, axes in enumerate(self.layout.tensor_map):
            size = f" of {self.extents[dimension]}" if self.in_elements[dimension] else ""
            cuts = self.layout.tensor_cuts[dimension]
            if dimension == 0 and self.layout.uneven is not None:
                parts = [f"cut by hand into {some_numbers(self.layout.uneven)}"]
            else:
                over = f"{'axis' if len(axes) == 1 else 'axes'} {', '.join(map(str, axes))}"
                parts = [f"cut in {cuts} over {over}"] if cuts > 1 else []
            if dimension == 0 and self.layout.shards > 1:
                parts.append(f"cut in {self.layout.shards} optimizer shards")
            lines.append(f"dimension {dimension}{size}: {', then '.join(parts) or 'whole'}")
        return lines

    def summary(self) -> str:
        slices = self.layout.slice_count
        copies = self.layout.copies
        if slices == 1:
            return "whole on its rank" if copies == 1 else f"whole on every rank: {copies} identical copies"
        return f"{slices} slices, each on " + (f"{copies} ranks: identical copies" if copies > 1 else "one rank")

    def shard_text(self, position: int) -> str:
        """The optimizer shard at a position of dimension 0; empty without shards."""
        shards = self.layout.shards
        return f", shard {position % shards + 1} of {shards}" if shards > 1 else ""

    def shard_order(self) -> str | None:
        """The order of optimizer shards on a slice's ranks, for pictures that do not distinguish shards."""
        shards, group = self.layout.shards, self.layout.replica_count
        if shards == 1:
            return None
        each = "one on each of its ranks" if shards == group else f"each on {group // shards} of its ranks"
        over = "" if shards == group else ", repeatedly"
        return (
            f"Optimizer shards are not distinguished here: along dimension 0 every box is cut in {shards}, "
            f"{each}, in the order of the ranks{over}"
        )


def shown_positions(count: int, most: int) -> list[int | None]:
    """All positions if they are few; else the first ones, None for the omitted ones, and the last."""
    if count <= most:
        return list(range(count))
    return [*range(most - 2), None, count - 1]
