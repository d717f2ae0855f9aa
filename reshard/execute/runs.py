"""How elements of a target tensor lie in stored slices: in contiguous runs, in strides, or transposed.

Plans and copies of contiguous runs need no more than this, and load no NumPy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from reshard.checkpoints.checkpoint import Checkpoint, EditedCheckpoint
from reshard.layout import Box, intersection, placed
from reshard.plan.pieces import StoredSlice, TargetTensor

if TYPE_CHECKING:
    from reshard.layout.views import Loop, Region

MIN_TILE = 16
"""Minimum elements along both sides of a tile of a transposed copy."""


NEVER = 1 << 62
"""More bytes than any piece has."""


class Places(NamedTuple):
    """Pieces of a box in memory, equally far apart.

    Attributes:
        offset: of the first byte in the box.
        length: bytes of a piece.
        number: of pieces.
        stride: bytes from one piece to the next; 0 for a single piece.
    """

    offset: int
    length: int
    number: int
    stride: int

    def of(self, out: memoryview) -> list[memoryview]:
        """The pieces, given the memory of the box."""
        length = self.length
        if self.number == 1:
            return [out[self.offset : self.offset + length]]
        last = self.offset + self.number * self.stride
        return [out[first : first + length] for first in range(self.offset, last, self.stride)]


StoredRun = tuple[StoredSlice, int, Places]
"""Bytes that are contiguous in a stored slice, from a byte of it on, and the places in a box of a target tensor that
they fill."""


def runs_of_box(
    tensor: TargetTensor, block: Box, min_piece: Callable[[StoredSlice], int] = lambda source: NEVER
) -> list[StoredRun] | None:
    """The runs that make a box of a target tensor; None if other elements are in it.

    Args:
        block: the box, counted from the tensor's own origin.
        min_piece: returns the minimum length of pieces from a stored slice, unless the run is a single piece.
    """
    if tensor.padded or tensor.added is not None:
        return None
    box = placed(block, tensor.box)
    runs = []
    for piece in tensor.pieces:
        common = intersection(piece.box, box)
        if common is None:
            continue
        if piece.region is not None or piece.dtype is not None or piece.source.decoding is not None:
            return None
        places = _places_in(common, box, tensor.item_size)
        stored = _places_in(common, piece.source.box, tensor.item_size)
        if places is None or stored is None or stored.number > 1:
            return None
        if places.number > 1 and places.length < min_piece(piece.source):
            return None
        runs.append((piece.source, stored.offset, places))
    return runs or None


def _places_in(part: Box, box: Box, item_size: int) -> Places | None:
    """The places of a part of a box; None if they are not equally far apart."""
    offset, length, number, stride = 0, item_size, 1, 0
    # Bytes from one element to the next along an axis.
    step = item_size
    for (low, high), (first, last) in zip(reversed(part), reversed(box)):
        elements = high - low
        offset += (low - first) * step
        if length == step:
            # All inner axes are whole.
            length *= elements
        elif elements > 1:
            if number > 1 and step != number * stride:
                return None
            stride = stride or step
            number *= elements
        step *= last - first
    return Places(offset, length, number, stride)


def byte_strides(shape: Sequence[int], item_size: int) -> list[int]:
    strides = []
    stride = item_size
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return strides[::-1]


def span_of(counts: Sequence[int], strides: Sequence[int], item_size: int) -> int:
    """Bytes from the first byte of a region to its last, including gaps."""
    return sum((count - 1) * stride for count, stride in zip(counts, strides)) + item_size


def runs(counts: Sequence[int], strides: Sequence[int], item_size: int) -> int:
    """The number of contiguous runs of a region."""
    run = item_size
    for axis in range(len(counts) - 1, -1, -1):
        if strides[axis] != run:
            return math.prod(counts[: axis + 1])
        run *= counts[axis]
    return 1


def loops_in_source(region: Region, strides: Sequence[int]) -> tuple[list[Loop], list[int], list[int]]:
    """The loops of a region by their steps in the source, the widest first.

    Returns:
        The loops, elements of each, and bytes from one to the next.
    """
    loops = sorted(region.loops, key=lambda loop: -loop.source_step * strides[loop.source_dimension])
    steps = [loop.source_step * strides[loop.source_dimension] for loop in loops]
    return loops, [loop.length for loop in loops], steps


def is_transposed(tensor: TargetTensor) -> bool:
    """Whether neighbours in some stored slice of a tensor are far apart in the tensor."""
    return any(piece.region is not None and _transposes(piece.region) for piece in tensor.pieces)


def _transposes(region: Region) -> bool:
    if not region.loops:
        return False
    near_out = region.loops[-1]
    near_source = min(region.loops, key=lambda loop: (-loop.source_dimension, loop.source_step))
    return near_source is not near_out and min(near_source.length, near_out.length) >= MIN_TILE


def largest_transposed(checkpoint: Checkpoint) -> int:
    """Bytes of the largest stored matrix that a checkpoint's edits transpose; 0 if they transpose none."""
    if not isinstance(checkpoint, EditedCheckpoint):
        return 0
    largest = 0
    for recipe in checkpoint.recipes.values():
        for region in () if recipe.view is None else recipe.view.regions:
            if not region.is_zeros and _transposes(region):
                item_size = checkpoint.base.tensors[recipe.sources[region.source]].item_size
                largest = max(largest, _matrix_volume(region) * item_size)
    return largest


def _matrix_volume(region: Region) -> int:
    """Elements of a matrix of a transposed region, which may be a stack of them."""
    in_source = sorted(region.loops, key=lambda loop: (loop.source_dimension, -loop.source_step))
    stacked = itertools.takewhile(lambda pair: pair[0] is pair[1], zip(region.loops, in_source))
    return region.volume // math.prod(loop.length for loop, _ in stacked)
