"""A parameter as the files of one step hold it: in which slices, on which ranks, and whether in all of them."""

from __future__ import annotations

import enum
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.errors import LayoutError
from reshard.layout import Box, Layout
from reshard.strategies import Stage

_NOWHERE = -1


class Slice(NamedTuple):
    """A slice of a parameter in one stage, and the ranks of the stage whose files hold it.

    Attributes:
        stage: the stage's number.
        box: what of the full tensor it is.
        holders: ranks whose file has it, ascending; may be empty.
        ranks: all ranks that the layout gives it to, ascending.
    """

    stage: int
    box: Box
    holders: tuple[int, ...]
    ranks: tuple[int, ...]


class Holding(NamedTuple):
    """A stage that holds a parameter.

    Attributes:
        stage: the stage.
        layout: how it cuts the parameter, of the readings of its record the one that is true.
        holders: ranks of the stage whose file has the parameter, ascending; at least one.
    """

    stage: Stage
    layout: Layout
    holders: tuple[int, ...]

    def slices(self, shape: tuple[int, ...]) -> tuple[Slice, ...]:
        """Every slice of a parameter of this shape."""
        return slices_of(self.layout, self.stage, shape, self.holders)


class Shards(enum.Enum):
    """Whether the optimizer shards that strategies record for a parameter are made.

    Of accumulated gradients a strategy may record a shard that the compiler did not make.
    """

    MADE = enum.auto()
    """As recorded: all other parameters, and accumulated gradients that the source stores so."""
    NOT_MADE = enum.auto()
    """The source stores accumulated gradients without the shard that its strategy records."""
    NOT_RECORDED = enum.auto()
    """The source's strategy records no shard for these accumulated gradients, in no stage."""
    UNDECIDED = enum.auto()
    """It records one, but only in stages none of whose files hold these accumulated gradients."""


@dataclass(frozen=True)
class Parameter:
    """A parameter that a strategy lists, as the files hold it.

    Attributes:
        name: its name.
        dtype: MindSpore's name of its element type.
        shape: shape of the full tensor.
        holdings: the stages that hold it, in order.
        shards: whether recorded optimizer shards are made.
        deciding: where that is undecided the ranks whose files would tell.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    holdings: tuple[Holding, ...]
    shards: Shards = Shards.MADE
    deciding: tuple[int, ...] = ()

    @property
    def slices(self) -> tuple[Slice, ...]:
        """Its slices, stage by stage; made when they are asked for."""
        return tuple(part for holding in self.holdings for part in holding.slices(self.shape))

    @property
    def holders(self) -> Iterator[int]:
        """Every rank whose file has it, ascending."""
        return itertools.chain.from_iterable(holding.holders for holding in self.holdings)

    @property
    def cells(self) -> Cells:
        """What of it is on which slice that some file holds."""
        return _cells(self.shape, tuple((layout, stage.first_rank, held) for stage, layout, held in self.holdings))

    def whole_stages(self) -> list[tuple[Slice, ...]]:
        """The slices of every stage of which all are there that have elements."""
        stages = [holding.slices(self.shape) for holding in self.holdings]
        return [parts for parts in stages if all(part.holders or is_empty(part.box) for part in parts)]

    def target_layout(self, recorded: Layout, in_pipeline: bool) -> Layout:
        """The layout it has to have in a target stage whose strategy records ``recorded``.

        Accumulated gradients are written the way the source stores them. Where the source cannot tell, because
        it records no shard, they are written without one if the target has a pipeline, where the compiler
        records but does not make it.

        Args:
            recorded: what the target's strategy says.
            in_pipeline: the target has several pipeline stages.

        Raises:
            LayoutError: the recorded layout does not fit the parameter.
        """
        if self.shards is Shards.NOT_MADE or (self.shards is Shards.NOT_RECORDED and in_pipeline):
            recorded = recorded.without_shards()
        for layout in recorded.regroupings():
            if len(layout.cuts) == len(self.shape) and layout.recorded_shape in (None, self.shape):
                for dimension, size in enumerate(self.shape):
                    layout.check_size(dimension, size)
                return shared(layout)
        raise LayoutError(f"tensor map {recorded.map_text} does not lay out a tensor of shape {list(self.shape)}")


@dataclass(frozen=True)
class Cells:
    """A parameter in the boxes that no slice's edge crosses: each lies in one slice of every stage.

    Where a stage has all of the parameter these are its slices. Boxes without elements are left out.

    Attributes:
        edges: the boxes' edges per dimension, ascending.
        slices: per box a slice that some file holds, as it counts among `Parameter.slices`; -1 where none does.
        of_one_stage: whether these are slices of one stage; else they are of several, which share the parameter.
    """

    edges: tuple[list[int], ...]
    slices: npt.NDArray[np.int64]
    of_one_stage: bool

    @property
    def whole(self) -> bool:
        """Whether every element is in some file."""
        return bool((self.slices != _NOWHERE).all())

    def lost_in(self, box: Box) -> bool:
        """Whether some element of a box is in no file."""
        intervals = tuple(slice(*self._intervals(*where)) for where in zip(self.edges, box))
        return bool((self.slices[intervals] == _NOWHERE).any())

    def within(self, box: Box) -> Iterator[tuple[Box, int]]:
        """A box in parts that each lie in one slice that a file holds, and that slice; lost ones are left out."""
        spans = [range(*self._intervals(*where)) for where in zip(self.edges, box)]
        for place in itertools.product(*spans):
            number = int(self.slices[place])
            if number != _NOWHERE:
                cell = tuple((edges[at], edges[at + 1]) for edges, at in zip(self.edges, place))
                yield tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(cell, box)), number

    @staticmethod
    def _intervals(edges: list[int], interval: tuple[int, int]) -> tuple[int, int]:
        """The first of the intervals between edges that an interval meets, and the one after the last."""
        start, stop = interval
        return (bisect_right(edges, start) - 1, bisect_left(edges, stop)) if start < stop else (0, 0)


# Parameters that are cut alike and held by the same ranks, as most are, have the same cells.
@lru_cache(maxsize=64)
def _cells(shape: tuple[int, ...], cuts: tuple[tuple[Layout, int, tuple[int, ...]], ...]) -> Cells:
    if len(cuts) > 1:
        first = 0
        for one in cuts:
            alone = _cells(shape, (one,))
            if alone.whole:
                return Cells(alone.edges, alone.slices + first, True)
            first += one[0].slice_count
    edges = tuple(
        sorted({0, size, *itertools.chain.from_iterable(layout.boundaries(dimension, size) for layout, _, _ in cuts)})
        for dimension, size in enumerate(shape)
    )
    slices = np.full([len(ends) - 1 for ends in edges], _NOWHERE)
    first = 0
    for layout, first_rank, holders in cuts:
        numbers = np.full(layout.slice_count, _NOWHERE)
        held = layout.slice_of_rank[np.array(holders) - first_rank]
        numbers[held] = held + first
        # Per dimension the layout's slice that each of the intervals between edges lies in.
        where = [
            np.searchsorted(layout.boundaries(dimension, size), ends[:-1], side="right") - 1
            for dimension, (size, ends) in enumerate(zip(shape, edges))
        ]
        here = numbers.reshape(layout.cuts)[np.ix_(*where)]
        slices = np.where(slices == _NOWHERE, here, slices)
        first += layout.slice_count
    return Cells(edges, slices, len(cuts) == 1)


def is_empty(box: Box) -> bool:
    """Whether a box has no elements."""
    return any(start == stop for start, stop in box)


def slice_shape(layout: Layout, shape: tuple[int, ...], local_rank: int) -> tuple[int, ...]:
    """The shape of the slice that a rank of the stage holds."""
    box = layout.slice_box(shape, int(layout.slice_of_rank[local_rank]))
    return tuple(stop - start for start, stop in box)


def slice_shapes(layout: Layout, shape: tuple[int, ...], local_ranks: Iterable[int]) -> list[tuple[int, ...]]:
    """The shapes of the slices that several ranks of the stage hold."""
    if layout.uneven is None:
        # All slices are alike.
        return [slice_shape(layout, shape, 0)] * len(list(local_ranks))
    return [slice_shape(layout, shape, rank) for rank in local_ranks]


def slices_of(layout: Layout, stage: Stage, shape: tuple[int, ...], holders: Iterable[int]) -> tuple[Slice, ...]:
    """Every slice of a parameter in a stage."""
    return _slices_of(shared(layout), stage.number, stage.first_rank, shape, tuple(holders))


@lru_cache(maxsize=1024)
def shared(layout: Layout) -> Layout:
    """One of all equal layouts, since each keeps tables of all ranks."""
    return layout


# Most parameters are cut like one shortly before them.
@lru_cache(maxsize=8)
def _slices_of(
    layout: Layout, stage: int, first: int, shape: tuple[int, ...], holders: tuple[int, ...]
) -> tuple[Slice, ...]:
    there = set(holders)
    edges = [layout.boundaries(dimension, size) for dimension, size in enumerate(shape)]
    # Slices count in C order.
    boxes = itertools.product(*(zip(cuts, cuts[1:]) for cuts in edges))
    slices = []
    for number, box in enumerate(boxes):
        ranks = tuple(first + rank for rank in layout.holders(number).tolist())
        held = tuple(rank for rank in ranks if rank in there)
        slices.append(Slice(stage, box, ranks if held == ranks else held, ranks))
    return tuple(slices)
