"""How elements of a target tensor lie in stored slices: in contiguous runs, in strides, or transposed.

Plans and copies of contiguous bytes need no more than this, and load no NumPy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, Optional

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.checkpoints.edited import EditedCheckpoint
from reshard.layout import ZEROS, Box, Loop, Region, intersection, placed, shape_of, volume_of
from reshard.plan.pieces import StoredSlice, TargetTensor

MIN_TILE = 16
"""Minimum elements along both sides of a tile of a transposed copy."""


class Run(NamedTuple):
    """Bytes that are contiguous both in a stored slice and in a box of a target tensor.

    Attributes:
        offset: of its first byte in the box.
        source: the slice.
        start: of its first byte in the slice.
        length: bytes.
    """

    offset: int
    source: StoredSlice
    start: int
    length: int


def runs_of_box(tensor: TargetTensor, block: Box) -> Optional[list[Run]]:
    """The runs that make a box of a target tensor, counted from its own origin; None if other elements are in it."""
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
        if not (_is_contiguous(common, box) and _is_contiguous(common, piece.source.box)):
            return None
        offset, start = (_offset_in(common, outer) * tensor.item_size for outer in (box, piece.source.box))
        runs.append(Run(offset, piece.source, start, volume_of(common) * tensor.item_size))
    return runs or None


def _is_contiguous(part: Box, box: Box) -> bool:
    """Whether the elements of a part of a box follow each other in it."""
    axis = next((axis for axis, (low, high) in enumerate(part) if high - low > 1), len(part))
    return part[axis + 1 :] == box[axis + 1 :]


def _offset_in(part: Box, box: Box) -> int:
    """The number of the first element of a part in its box, in C order."""
    strides = byte_strides(shape_of(box), 1)
    return sum((low - first) * stride for (low, _), (first, _), stride in zip(part, box, strides))


def byte_strides(shape: Sequence[int], item_size: int) -> list[int]:
    """Strides of a C-order array in bytes."""
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

    Args:
        region: the region.
        strides: bytes from one element of the stored slice to the next, per dimension.

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
            if region.source != ZEROS and _transposes(region):
                item_size = checkpoint.base.tensors[recipe.sources[region.source]].item_size
                largest = max(largest, _matrix_volume(region) * item_size)
    return largest


def _matrix_volume(region: Region) -> int:
    """Elements of a matrix of a transposed region, which may be a stack of them."""
    in_source = sorted(region.loops, key=lambda loop: (loop.source_dimension, -loop.source_step))
    stacked = itertools.takewhile(lambda pair: pair[0] is pair[1], zip(region.loops, in_source))
    return region.volume // math.prod(loop.length for loop, _ in stacked)
