"""Byte-by-byte comparison of tied tensors, in any layouts: only one of them is converted.

Of a master copy and its weight, the former is cast first, and all NaN are equal.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor, TiedTensors, stored_checkpoint
from reshard.errors import CheckpointError, IncompleteSourceError
from reshard.execute import Progress
from reshard.execute.reader import CHUNK_BYTES, BoxReader
from reshard.layout import Box, Grid, Overlap, boxes_of_range, shape_of, volume_of, whole_box
from reshard.layout.grid import place_of
from reshard.plan.pieces import Piece, StoredSlice, TargetTensor
from reshard.text.messages import quoted


def check_equal(
    checkpoint: Checkpoint,
    equals: Collection[TiedTensors],
    reader: BoxReader,
    progress: Progress | None = None,
    most: int | None = None,
) -> None:
    """Compare tensors that should be equal.

    Args:
        most: bytes of each to compare; all by default.

    Raises:
        CheckpointError: two of them differ.
        ReshardError: a file cannot be read, or was modified.
    """
    if not equals:
        return
    progress = progress or Progress()
    progress.begin(
        sum(
            _elements(equal.representative, most) * equal.representative.item_size * (1 + len(equal.copies))
            for equal in equals
        ),
        "comparing tensors",
    )
    try:
        for equal in equals:
            _check(stored_checkpoint(checkpoint), equal, reader, progress, most)
    finally:
        progress.end()


def _check(checkpoint: Checkpoint, equal: TiedTensors, reader: BoxReader, progress: Progress, most: int | None) -> None:
    first = equal.representative
    for tensor in equal.copies:
        if (tensor.dtype, tensor.shape) != (first.dtype, first.shape):
            raise _differ(checkpoint, equal, tensor, None)
    count = _elements(first, most)
    step = max(1, min(CHUNK_BYTES // first.item_size, count))
    bytes_of_first, bytes_of_copy = (bytearray(step * first.item_size) for _ in range(2))
    target, *copies = (_whole(checkpoint, tensor) for tensor in (first, *equal.copies))
    for box in boxes_of_range(first.shape, 0, count, step):
        nbytes = volume_of(box) * first.item_size
        reader.read(target, box, memoryview(bytes_of_first)[:nbytes])
        for tensor, copy in zip(equal.copies, copies):
            reader.read(copy, box, memoryview(bytes_of_copy)[:nbytes])
            if bytes_of_first[:nbytes] == bytes_of_copy[:nbytes]:
                continue
            if first.stored or tensor.stored:
                for buffer in (bytes_of_first, bytes_of_copy):
                    _make_nans_equal(memoryview(buffer)[:nbytes], first.dtype)
            if bytes_of_first[:nbytes] != bytes_of_copy[:nbytes]:
                place = _first_difference(bytes_of_first[:nbytes], bytes_of_copy[:nbytes], box, first.item_size)
                raise _differ(checkpoint, equal, tensor, place)
        progress.wrote(nbytes * (1 + len(copies)))


def _make_nans_equal(elements: memoryview, dtype: str) -> None:
    # Loaded only here: most tied tensors are equal.
    import numpy as np

    from reshard.checkpoints.formats.elements import numpy_dtype

    numbers = np.frombuffer(elements, numpy_dtype(dtype))
    numbers[np.isnan(numbers)] = np.nan


def _elements(tensor: GlobalTensor, most: int | None) -> int:
    count = math.prod(tensor.shape)
    return count if most is None else min(count, most // tensor.item_size)


def _first_difference(first: bytearray, second: bytearray, box: Box, item_size: int) -> tuple[int, ...]:
    """The index of the first element of a box that differs."""
    same, length = 0, len(first)
    while length > 1:
        half = length // 2
        if first[same : same + half] == second[same : same + half]:
            same, length = same + half, length - half
        else:
            length = half
    place = place_of(same // item_size, shape_of(box))
    return tuple(start + position for (start, _), position in zip(box, place))


def _whole(checkpoint: Checkpoint, tensor: GlobalTensor) -> TargetTensor:
    """A tensor whole, each part from the first file that holds it; cast, if its source has another type."""
    source = tensor.stored[0] if tensor.stored else tensor
    stored_type = source.dtype if source.dtype != tensor.dtype else None
    # Files hold the codes of a dequantised tensor.
    name = source.name_in_files
    present = checkpoint.present(source if source.decoding is None else checkpoint.tensors[name])
    pieces = []
    for cell in Overlap([sharding.grid for sharding in tensor.shardings], Grid.whole(tensor.shape)).cells(0):
        holder, box = _holder(tensor, present, cell.slices)
        extents = checkpoint.indexes[holder].tensors[name].extents
        stored = StoredSlice(checkpoint.files[holder], holder, extents, box, source.decoding)
        pieces.append(Piece(stored, cell.box, dtype=stored_type))
    dtype = tensor.dtype if stored_type else None
    return TargetTensor(tensor.name, tensor.item_size, whole_box(tensor.shape), tuple(pieces), dtype)


def _holder(tensor: GlobalTensor, present: tuple[frozenset[int], ...], slices: tuple[int, ...]) -> tuple[int, Box]:
    for sharding, files, number in zip(tensor.shardings, present, slices):
        for holder in sharding.holders(number):
            if holder in files:
                return holder, sharding.stored_box(number)
    raise IncompleteSourceError(f"a slice of {quoted(tensor.name)} is on no readable rank", parameter=tensor.name)


def _differ(
    checkpoint: Checkpoint, equal: TiedTensors, copy: GlobalTensor, at: tuple[int, ...] | None
) -> CheckpointError:
    where = "in type or shape" if at is None else f"at {list(at)}"
    paths = []
    for tensor in (equal.representative, copy):
        piece = next(
            piece
            for piece in _whole(checkpoint, tensor).pieces
            if at is None or all(start <= place < stop for place, (start, stop) in zip(at, piece.box))
        )
        paths.append(piece.source.path)
    converted = "the copy" if copy.name == equal.representative.name else quoted(equal.representative.name)
    return CheckpointError(
        f"{paths[1]}: {quoted(copy.name)} differs from {converted} in {paths[0]} {where}: {equal.reason}",
        file=paths[1],
        parameter=copy.name,
        hint=equal.hint,
    )
