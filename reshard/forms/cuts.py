"""Cuts of source tensors for the target; one `Overlap` per kind of tensor.

A model has thousands of tensors but tens of kinds: combinations of full shape, source grids and target
layout. Everything that depends on the kind alone is computed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Union

from reshard.checkpoints.checkpoint import GlobalTensor, Sharding
from reshard.errors import CheckpointError, LayoutError
from reshard.forms.target import Section, layout_in
from reshard.layout import Grid, Layout, Overlap, ViewOverlap
from reshard.text.wording import quoted


@dataclass(frozen=True)
class Cut:
    """The cut of tensors of one kind for one section of the target.

    Attributes:
        number: numbers the kinds in the order they were met.
        overlap: the cells of every target slice.
        target: the target layout.
        shardings: the source's shardings of these tensors, or of their sources one after the other.
        firsts: the number of the first sharding of each of these sources.
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
        # Cache by identity: equal tensors share layout and shardings. References are kept, or a new object
        # could get the same id.
        self._by_reading: dict[tuple[object, ...], tuple[Cut, Layout, tuple[Sharding, ...]]] = {}

    def of(self, tensor: GlobalTensor, section: Section) -> Cut:
        """The cut of a tensor that this section gets.

        Raises:
            CheckpointError: the target layout does not fit the tensor; names it.
        """
        recorded = section.layouts[tensor.name]
        made_of = (tensor.view, *(len(each.shardings) for each in tensor.stored))
        key = (section.number, id(recorded), *map(id, tensor.shardings), tensor.shape, tensor.shards, made_of)
        found = self._by_reading.get(key)
        if found is None:
            found = self._by_reading[key] = (self._make(tensor, section), recorded, tensor.shardings)
        return found[0]

    def _make(self, tensor: GlobalTensor, section: Section) -> Cut:
        try:
            layout = layout_in(tensor, section.layouts[tensor.name], section.in_pipeline)
            # By identity, with references kept, as above.
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
    grids = [[sharding.grid for sharding in source.shardings] for source in tensor.sources]
    return ViewOverlap(grids, tensor.view, target)
