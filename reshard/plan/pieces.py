"""The plan's words for bytes: which boxes of which stored tensors make which target tensor.

All boxes are in elements of the full logical tensor, so that source and target need no common
origin. The executor knows these words and nothing of layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reshard.checkpoints import OutputLayout
from reshard.layout import Box, shape_of, volume_of


class StoredSlice(NamedTuple):
    """A slice as it lies in a source file.

    Attributes:
        path: the file.
        rank: the source rank it belongs to.
        extents: (offset, bytes) runs in the file that make up the slice in C order.
        box: the part of the full tensor that it holds.
    """

    path: str
    rank: int
    extents: tuple[tuple[int, int], ...]
    box: Box


class Piece(NamedTuple):
    """A box of the full tensor, taken from one stored slice that contains it."""

    source: StoredSlice
    box: Box


class TargetTensor(NamedTuple):
    """One tensor of a target file: a box of the full tensor, exactly covered by pieces."""

    name: str
    item_size: int
    box: Box
    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per dimension."""
        return shape_of(self.box)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's content."""
        return volume_of(self.box) * self.item_size


@dataclass(frozen=True)
class TargetFile:
    """A file to be written: where its bytes lie and where they come from.

    Attributes:
        rank: target rank.
        path: final name.
        layout: literal bytes and tensor data in file order.
        tensors: what the data is made of, numbered as in ``layout``.
        source_paths: the source files that its bytes come from.
    """

    rank: int
    path: str
    layout: OutputLayout
    tensors: Sequence[TargetTensor]
    source_paths: frozenset[str]
