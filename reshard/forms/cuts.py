"""Cuts of source tensors for the target; one `Overlap` per kind of tensor.

A model has thousands of tensors but tens of kinds: combinations of full shape, source grids and target
layout. Everything that depends on the kind alone is computed once.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Union

from reshard.checkpoints.checkpoint import GlobalTensor, Sharding
from reshard.errors import CheckpointError, LayoutError
from reshard.forms.target import Section, layout_in
from reshard.layout import Grid, Layout, Overlap
from reshard.text.messages import quoted

if TYPE_CHECKING:
    from reshard.layout.views import ViewOverlap


class Cut(NamedTuple):
    """The cut of tensors of one kind for one section of the target.

    Attributes:
        number: of the kind, counted from 0.
        overlap: the cells of every target slice.
        target: the target layout.
        shardings: the source's shardings of these tensors, or the shardings of all their sources in a row.
        firsts: per source, the index of its first sharding.
    """

    number: int
    overlap: Union[Overlap, ViewOverlap]
    target: Layout
    shardings: tuple[Sharding, ...]
    firsts: tuple[int, ...] = (0,)

    def slice_of(self, position: int) -> int:
        """The slice that a file of the section gets."""
        return int(self.target.slice_of_rank[position])


class Cuts:
    """Cache of the cuts of tensors for sections."""

    def __init__(self) -> None:
        self._cuts: dict[object, Cut] = {}
        # Cache by identity: equal tensors share layout and shardings. Without the references a new object could
        # get the id of a freed one.
        self._by_reading: dict[tuple[object, ...], tuple[Cut, Layout, tuple[Sharding, ...]]] = {}

    def of(self, tensor: GlobalTensor, section: Section) -> Cut:
        """The cut of a tensor that this section gets.

        Raises:
            CheckpointError: the target layout does not fit the tensor; names it.
        """
        recorded = section.layouts[tensor.name]
        kind = (tensor.view, *(len(each.shardings) for each in tensor.stored))
        key = (section.number, id(recorded), *map(id, tensor.shardings), tensor.shape, tensor.shards, kind)
        cached = self._by_reading.get(key)
        if cached is None:
            cached = self._by_reading[key] = (self._make(tensor, section), recorded, tensor.shardings)
        return cached[0]

    def _make(self, tensor: GlobalTensor, section: Section) -> Cut:
        try:
            layout = layout_in(tensor, section.layouts[tensor.name], section.in_pipeline)
            # The cut references its shardings, so their ids stay unique.
            counts = [len(each.shardings) for each in tensor.sources]
            key = (section.number, tensor.shape, *map(id, tensor.shardings), layout, tensor.view, *counts)
            if key not in self._cuts:
                firsts = tuple(accumulate(counts[:-1], initial=0))
                overlap = _overlap(tensor, layout.grid(tensor.shape))
                self._cuts[key] = Cut(len(self._cuts), overlap, layout, tensor.shardings, firsts)
            return self._cuts[key]
        except LayoutError as error:
            raise CheckpointError(
                f"{quoted(tensor.name)}: {error.message} ({section.label})",
                parameter=tensor.name,
                hint="the target strategy has to be of the same model, and every dimension to divide by its slices",
            ) from error


def _overlap(tensor: GlobalTensor, target: Grid) -> Union[Overlap, ViewOverlap]:
    if tensor.view is None:
        return Overlap([sharding.grid for sharding in tensor.shardings], target)
    # Loaded only here: most conversions have no views.
    from reshard.layout.views import ViewOverlap

    grids = [[sharding.grid for sharding in source.shardings] for source in tensor.sources]
    return ViewOverlap(grids, tensor.view, target)
