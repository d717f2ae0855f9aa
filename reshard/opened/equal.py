"""Byte-by-byte comparison of tied tensors, of which only one is read, in any layouts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Optional

import numpy as np

from reshard.checkpoints.checkpoint import Checkpoint, Equal, GlobalTensor
from reshard.checkpoints.edited import stored_checkpoint
from reshard.errors import CheckpointError, IncompleteSourceError
from reshard.execute import Progress
from reshard.execute.reader import CHUNK_BYTES, BoxReader
from reshard.execute.reading import Bytes
from reshard.layout import Box, Grid, Overlap, boxes_of_range, volume_of, whole_box
from reshard.plan.pieces import Piece, StoredSlice, TargetTensor
from reshard.text.wording import quoted


def equal_of(checkpoint: Checkpoint, names: Iterable[str]) -> list[Equal]:
    """The sets of tied tensors that some tensors and values are made of."""
    tensors = checkpoint.tensors
    stored = {source.name for name in names if name in tensors for source in tensors[name].sources}
    return [equal for equal in checkpoint.equal() if equal.taken.name in stored]


def check_equal(
    checkpoint: Checkpoint,
    equals: Collection[Equal],
    reader: BoxReader,
    progress: Optional[Progress] = None,
    most: Optional[int] = None,
) -> None:
    """Compare tensors that should be equal.

    Args:
        checkpoint: the checkpoint.
        equals: the sets of tensors.
        reader: reads them.
        progress: counts bytes.
        most: bytes of each to compare; all by default.

    Raises:
        CheckpointError: two of them differ.
        ReshardError: a file cannot be read, or was modified.
    """
    if not equals:
        return
    progress = progress or Progress()
    progress.begin(
        sum(_elements(equal.taken, most) * equal.taken.item_size * (1 + len(equal.others)) for equal in equals),
        "comparing tensors",
    )
    try:
        for equal in equals:
            _check(stored_checkpoint(checkpoint), equal, reader, progress, most)
    finally:
        progress.end()


def _check(checkpoint: Checkpoint, equal: Equal, reader: BoxReader, progress: Progress, most: Optional[int]) -> None:
    first = equal.taken
    for tensor_beside in equal.others:
        if (tensor_beside.dtype, tensor_beside.shape) != (first.dtype, first.shape):
            raise _differ(checkpoint, equal, tensor_beside, None)
    count = _elements(first, most)
    step = max(1, min(CHUNK_BYTES // first.item_size, count))
    mine, theirs = (np.empty(step * first.item_size, np.uint8) for _ in range(2))
    target, *copies = (_whole(checkpoint, tensor) for tensor in (first, *equal.others))
    for box in boxes_of_range(first.shape, 0, count, step):
        nbytes = volume_of(box) * first.item_size
        reader.read(target, box, mine[:nbytes].data)
        for tensor, copy in zip(equal.others, copies):
            reader.read(copy, box, theirs[:nbytes].data)
            if not np.array_equal(mine[:nbytes], theirs[:nbytes]):
                raise _differ(checkpoint, equal, tensor, _first_difference(mine, theirs, box, first.item_size))
        progress.wrote(nbytes * (1 + len(copies)))


def _elements(tensor: GlobalTensor, most: Optional[int]) -> int:
    """Number of elements to compare."""
    count = math.prod(tensor.shape)
    return count if most is None else min(count, most // tensor.item_size)


def _first_difference(mine: Bytes, theirs: Bytes, box: Box, item_size: int) -> tuple[int, ...]:
    """The index of the first element of a box that differs."""
    element = int((mine != theirs).argmax()) // item_size
    place = np.unravel_index(element, [stop - start for start, stop in box])
    return tuple(start + int(position) for (start, _), position in zip(box, place))


def _whole(checkpoint: Checkpoint, tensor: GlobalTensor) -> TargetTensor:
    """A tensor whole, each part from the first file that holds it."""
    present = checkpoint.present(tensor)
    pieces = []
    for cell in Overlap([sharding.grid for sharding in tensor.shardings], Grid.whole(tensor.shape)).cells(0):
        holder, box = _holder(tensor, present, cell.slices)
        extents = checkpoint.indexes[holder].tensors[tensor.name].extents
        pieces.append(Piece(StoredSlice(checkpoint.files[holder], holder, extents, box), cell.box))
    return TargetTensor(tensor.name, tensor.item_size, whole_box(tensor.shape), tuple(pieces))


def _holder(tensor: GlobalTensor, present: tuple[frozenset[int], ...], slices: tuple[int, ...]) -> tuple[int, Box]:
    for sharding, files, number in zip(tensor.shardings, present, slices):
        for holder in sharding.holders(number):
            if holder in files:
                return holder, sharding.grid.slice_box(number)
    raise IncompleteSourceError(f"a slice of {quoted(tensor.name)} is on no readable rank", parameter=tensor.name)


def _differ(checkpoint: Checkpoint, equal: Equal, copy: GlobalTensor, at: Optional[tuple[int, ...]]) -> CheckpointError:
    where = "in type or shape" if at is None else f"at {list(at)}"
    paths = []
    for tensor in (equal.taken, copy):
        piece = next(
            piece
            for piece in _whole(checkpoint, tensor).pieces
            if at is None or all(start <= place < stop for place, (start, stop) in zip(at, piece.box))
        )
        paths.append(piece.source.path)
    original = "the copy" if copy.name == equal.taken.name else quoted(equal.taken.name)
    return CheckpointError(
        f"{paths[1]}: {quoted(copy.name)} differs from {original} in {paths[0]} {where}: {equal.reason}",
        file=paths[1],
        parameter=copy.name,
        hint=equal.hint,
    )
