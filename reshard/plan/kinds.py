"""Tensors of a section by kind: what is true of one of a kind is true of all."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Optional

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.forms.cuts import Cut
from reshard.layout import Box, Cell


class Kind(NamedTuple):
    """Tensors that are cut alike and held by the same source files, and so are taken alike.

    Attributes:
        cut: how they are cut.
        present: the files that hold them, per sharding of the cut.
        item_size: bytes of an element.
        tensors: the tensors, sorted by name, at least one; what they are made of is of the same types.
    """

    cut: Cut
    present: tuple[frozenset[int], ...]
    item_size: int
    tensors: list[GlobalTensor]

    def box_of(self, position: int) -> Box:
        """The slice of such a tensor that a file of the section gets."""
        return self.cut.overlap.target.slice_box(self.cut.slice_of(position))

    def count(self, names: Optional[Collection[str]]) -> int:
        """How many of them have one of some names; all where None."""
        return len(self.tensors) if names is None else sum(tensor.name in names for tensor in self.tensors)

    def holders(self, cell: Cell) -> list[tuple[int, int]]:
        """Who holds a cell: files, and of which sharding; nobody where no source has its elements."""
        first = 0 if cell.region is None else self.cut.firsts[cell.region.source] if cell.slices else 0
        found: list[tuple[int, int]] = []
        for index, number in enumerate(cell.slices, first):
            sharding, present = self.cut.shardings[index], self.present[index]
            found += [(holder, index) for holder in sharding.holders(number) if holder in present]
        return found
