"""The slices of one parameter in one stage, for drawing: their boxes and ranks.

Only JSON strategies contain the full shape. The unit of a dimension of unknown size is a slice: ``1/8..2/8``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

from reshard.layout import Box
from reshard.strategies import Holding
from reshard.text.messages import some_numbers, stepped_rank_ranges
from reshard.threads import cached_property


class Slice(NamedTuple):
    """One slice, or one whole tensor-parallel slice with all its optimizer shards.

    Attributes:
        box: interval per dimension, in units of `Arrangement.extents`.
        place: position per dimension.
        ranks: global ranks that hold it or, if shards are not distinguished, a shard of it; ascending.
    """

    box: Box
    place: tuple[int, ...]
    ranks: tuple[int, ...]


class Arrangement:
    """The slices of one parameter on the ranks of one stage.

    Attributes:
        holding: the stage and the layout.
        layout: the same layout.
        extents: size of every dimension: elements if known, otherwise its number of slices.
        in_elements: per dimension, whether its size is in elements.
        readings: other readings of the file, in words.
        axis_names: names of the device matrix's axes, slowest first; empty if unknown.

    Raises:
        LayoutError: the recorded shape does not divide by the cuts.
    """

    def __init__(self, holding: Holding, axis_names: tuple[str, ...] = ()) -> None:
        self.axis_names = axis_names
        layout, *alternatives = holding.layout.regroupings() or [holding.layout]
        self.holding = holding._replace(layout=layout)
        self.layout = layout
        self.readings = tuple(
            f"the file can also mean shape {list(alternative.recorded_shape or ())}, tensor map {alternative.map_text}"
            for alternative in alternatives
        )
        shape: Sequence[Optional[int]] = layout.recorded_shape or [None] * len(layout.cuts)
        known_sizes = [sum(layout.uneven) if layout.uneven and not d else size for d, size in enumerate(shape)]
        self.in_elements = tuple(size is not None for size in known_sizes)
        self.extents = tuple(cuts if size is None else size for size, cuts in zip(known_sizes, layout.cuts))
        self._edges = [layout.boundaries(dimension, size) for dimension, size in enumerate(self.extents)]

    @cached_property
    def without_shards(self) -> Arrangement:
        """The same without distinguishing optimizer shards."""
        return Arrangement(self.holding._replace(layout=self.layout.without_shards()), self.axis_names)

    @property
    def cut_dimensions(self) -> list[int]:
        """Dimensions that are not whole."""
        return [dimension for dimension, cuts in enumerate(self.layout.cuts) if cuts > 1]

    def slice(self, number: int) -> Slice:
        """A slice by its number in the layout."""
        index = self.layout.slice_index(number)
        box = tuple((edges[at], edges[at + 1]) for edges, at in zip(self._edges, index))
        return Slice(box, index, tuple(self.holding.ranks(number)))

    def at(self, index: Sequence[int]) -> Slice:
        """A slice by its position along every dimension."""
        number = 0
        for position, cuts in zip(index, self.layout.cuts):
            number = number * cuts + position
        return self.slice(number)

    def slices(self) -> Iterator[Slice]:
        """All slices in C order."""
        return map(self.slice, range(self.layout.slice_count))

    def interval(self, dimension: int, position: int) -> str:
        """The interval of a slice along a dimension: ``8..16``, or ``1/8..2/8`` if the size is unknown."""
        if self.layout.cuts[dimension] == 1:
            return "whole"
        start, stop = self._edges[dimension][position : position + 2]
        of = "" if self.in_elements[dimension] else f"/{self.extents[dimension]}"
        return f"{start}{of}..{stop}{of}"

    def length(self, dimension: int, position: int) -> int:
        """Size of a slice along a dimension."""
        start, stop = self._edges[dimension][position : position + 2]
        return stop - start

    def rank_label(self, local: int) -> str:
        """A rank's global number, and after ``=`` the lowest rank that holds the same slice."""
        rank = self.holding.stage.first_rank + local
        first = self.holding.stage.first_rank + int(self.layout.holders(int(self.layout.slice_of_rank[local]))[0])
        return str(rank) if first == rank else f"{rank}={first}"

    def label_in_words(self, local: int) -> str:
        """An explanation of a rank's label, for a rank that is not the first with its slice."""
        label = self.rank_label(local)
        rank, _, first = label.partition("=")
        return f"{label}: rank {rank} holds the same slice as rank {first}"

    def axis_lines(self) -> list[str]:
        """The effect of each axis of the device matrix, slowest first."""
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
            lines.append(f"{self.axis_name(axis)} of size {size}: {does}")
        return lines

    def axis_name(self, axis: int) -> str:
        """The name of an axis, counted from the right, or else its number."""
        return self.axis_names[len(self.axis_names) - 1 - axis] if self.axis_names else f"axis {axis}"

    def dimension_lines(self) -> list[str]:
        """The cuts of every dimension."""
        lines = []
        for dimension, axes in enumerate(self.layout.tensor_map):
            size = f" of {self.extents[dimension]}" if self.in_elements[dimension] else ""
            cuts = self.layout.tensor_cuts[dimension]
            if dimension == 0 and self.layout.uneven is not None:
                parts = [f"cut by hand into {some_numbers(self.layout.uneven)}"]
            else:
                over = f"{'axis' if len(axes) == 1 else 'axes'} {', '.join(map(str, axes))}"
                if self.axis_names:
                    over = ", ".join(map(self.axis_name, axes))
                parts = [f"cut in {cuts} over {over}"] if cuts > 1 else []
            if dimension == 0 and self.layout.shards > 1:
                parts.append(f"cut in {self.layout.shards} optimizer shards")
            lines.append(f"dimension {dimension}{size}: {', then '.join(parts) or 'whole'}")
        return lines

    def summary(self) -> str:
        """The number of slices, and of ranks per slice."""
        slices = self.layout.slice_count
        copies = self.layout.copies
        if slices == 1:
            return "whole on its rank" if copies == 1 else f"whole on every rank: {copies} identical copies"
        return f"{slices} slices, each on " + (f"{copies} ranks: identical copies" if copies > 1 else "one rank")

    def shard_text(self, position: int) -> str:
        """The optimizer shard at a position of dimension 0; empty without shards."""
        shards = self.layout.shards
        return f", shard {position % shards + 1} of {shards}" if shards > 1 else ""

    def holders_text(self, slice_: Slice) -> str:
        """The ranks of a slice in words."""
        return stepped_rank_ranges(slice_.ranks)

    def shard_order(self) -> Optional[str]:
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


def coordinates(number: int, sizes: Sequence[int]) -> list[int]:
    """The position of element ``number`` in a grid, in C order."""
    position = []
    for size in reversed(sizes):
        number, at = divmod(number, size)
        position.append(at)
    return position[::-1]


def shown_positions(count: int, most: int) -> list[Optional[int]]:
    """All positions if they are few; else the first ones, None for the omitted ones, and the last."""
    if count <= most:
        return list(range(count))
    return [*range(most - 2), None, count - 1]
