"""Types of the plan: boxes of stored tensors that make a target tensor.

All boxes are in elements of the full logical tensor, so that source and target need no common
origin. The executor uses these types and no layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Optional

from reshard.checkpoints import OutputLayout
from reshard.checkpoints.checkpoint import Addition
from reshard.checkpoints.checkpoint import StoredSlice as StoredSlice
from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.layout import Box, shape_of, volume_of

if TYPE_CHECKING:
    from reshard.layout.views import Region


class Piece(NamedTuple):
    """A part of the full tensor, contained in one stored slice.

    Attributes:
        source: the slice.
        box: a box around the part.
        region: its elements of the box, and of the slice's tensor; None for the whole box, at the same place in
            that tensor.
        dtype: type of the stored elements, where they are cast; None where they are copied.
    """

    source: StoredSlice
    box: Box
    region: Optional[Region] = None
    dtype: Optional[str] = None

    @property
    def volume(self) -> int:
        """Elements."""
        return volume_of(self.box) if self.region is None else self.region.volume

    @property
    def elements(self) -> object:
        """A key of the elements of the stored tensor; pieces with the same elements have equal keys."""
        if self.region is None:
            return self.box
        loops = sorted((loop.source_dimension, loop.source_step, loop.length) for loop in self.region.loops)
        return self.region.source_origin, tuple(loops)

    def stored_size(self, item_size: int) -> int:
        """Bytes of a stored element; ``item_size`` where elements are not cast."""
        return item_size if self.dtype is None else ITEM_SIZES[self.dtype]


class TargetTensor(NamedTuple):
    """One tensor of a target file: a box of the full tensor, exactly covered by pieces, or zero elsewhere.

    Attributes:
        name: its name in the file.
        item_size: bytes of an element.
        box: the box.
        pieces: its pieces, without overlaps.
        dtype: its type, where elements are cast; None where all are copied.
        padded: whether some elements are in no piece.
        added: the addition to the elements.
    """

    name: str
    item_size: int
    box: Box
    pieces: tuple[Piece, ...]
    dtype: Optional[str] = None
    padded: bool = False
    added: Optional[Addition] = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per dimension."""
        return shape_of(self.box)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's content."""
        return volume_of(self.box) * self.item_size


class TargetFile(NamedTuple):
    """A target file: its layout and the sources of its bytes.

    Attributes:
        rank: target rank.
        path: final name.
        layout: literal bytes and tensor data in file order.
        tensors: the tensors, numbered as in ``layout``.
        source_paths: the source files of its bytes.
    """

    rank: int
    path: str
    layout: OutputLayout
    tensors: Sequence[TargetTensor]
    source_paths: frozenset[str]
