"""Filling a block of a target tensor from stored slices.

The strided side is always memory, never the file. Rows that lie close together in the source are
read in one request with what lies between them and gathered by NumPy; rows far apart are read one by
one; and what is contiguous on both sides goes straight into the block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.execute.parts import SharedRows
from reshard.execute.reading import Bytes, Reader
from reshard.layout import Box, intersection, shape_of, volume_of
from reshard.plan.pieces import Piece, StoredSlice, TargetTensor

Words = npt.NDArray[Any]

_WORDS = (8, 4, 2, 1)


class BlockFiller:
    """Fills blocks of target tensors through one reader; one per thread.

    Args:
        reader: where bytes come from.
        scratch: room for rows that have to be read before they are gathered; half of it must hold an
            element.
    """

    def __init__(self, reader: Reader, scratch: Bytes) -> None:
        self._reader = reader
        half = len(scratch) // 2
        self._scratch = scratch[:half]
        # Shared rows stay while they are handed out, and must not be overwritten by reading them.
        self._room = scratch[half:]

    def fill(self, tensor: TargetTensor, block: Box, out: memoryview) -> None:
        """Fill ``out`` with the elements of ``block``, in C order.

        Args:
            tensor: the target tensor.
            block: a box of it, counted from the target slice's own origin.
            out: exactly the block's bytes.
        """
        # Blocks and pieces meet in coordinates of the full tensor.
        box = tuple((start + low, start + high) for (start, _), (low, high) in zip(tensor.box, block))
        shape = shape_of(block)
        # Elements go as numbers, not as rows of bytes: short rows then cost an instruction, not a call.
        word = next(size for size in _WORDS if tensor.item_size % size == 0)
        view = np.frombuffer(out, dtype=f"u{word}").reshape(*shape, tensor.item_size // word)
        for piece in tensor.pieces:
            region = intersection(piece.box, box)
            if region is not None:
                self._fill_region(piece, region, view[_inside(region, box)], tensor.item_size)

    def most_shared_rows(self, shared: SharedRows) -> int:
        """How many shared rows of the widest source fit the scratch room."""
        axis = len(shared.outer)
        item_size = shared.tensors[0].item_size
        widest = max(volume_of(source.box[axis:]) for source, _ in shared.uses)
        return len(self._room) // (widest * item_size)

    def fill_shared(self, shared: SharedRows, rows: Box, outs: Sequence[memoryview]) -> None:
        """Fill the same rows of every member, reading each source's rows once.

        Args:
            shared: the tensor and who takes what of it.
            rows: a box of the outer dimensions, counted from the members' origin there; at most
                `most_shared_rows`.
            outs: per member exactly the rows' bytes.
        """
        axis = len(shared.outer)
        item_size = shared.tensors[0].item_size
        word = next(size for size in _WORDS if item_size % size == 0)
        outer = tuple((start + low, start + high) for (start, _), (low, high) in zip(shared.outer, rows))
        boxes = [(*outer, *tensor.box[axis:]) for tensor in shared.tensors]
        views = [
            np.frombuffer(out, dtype=f"u{word}").reshape(*shape_of(box), item_size // word)
            for out, box in zip(outs, boxes)
        ]
        for source, taken in shared.uses:
            region = intersection((*outer, *source.box[axis:]), source.box)
            if region is None:
                continue
            data = self._rows(source, region, item_size, word)
            for member, box in taken:
                common = intersection(box, region)
                if common is not None:
                    views[member][_inside(common, boxes[member])] = data[_inside(common, region)]

    def _rows(self, source: StoredSlice, region: Box, item_size: int, word: int) -> Words:
        """A region of whole rows of a stored slice, as it lies in a map or read into the scratch room."""
        counts = shape_of(region)
        strides = byte_strides(shape_of(source.box), item_size)
        start = sum((low - first) * stride for (low, _), (first, _), stride in zip(region, source.box, strides))
        span = span_of(counts, strides, item_size)
        mapped = self._reader.view(source, start, span)
        if mapped is not None:
            return np.ndarray(
                shape=(*counts, item_size // word), dtype=f"u{word}", buffer=mapped, strides=(*strides, word)
            )
        room = self._room[: math.prod(counts) * item_size]
        data: Words = room.view(f"u{word}").reshape(*counts, item_size // word)
        local = tuple((low - first, high - first) for (low, high), (first, _) in zip(region, source.box))
        self._copy(source, local, strides, data, item_size)
        return data

    def _fill_region(self, piece: Piece, region: Box, out: Words, item_size: int) -> None:
        source = piece.source
        local = tuple((low - start, high - start) for (low, high), (start, _) in zip(region, source.box))
        strides = byte_strides(shape_of(source.box), item_size)
        self._copy(source, local, strides, out, item_size)

    def _copy(self, source: StoredSlice, region: Box, strides: Sequence[int], out: Words, item_size: int) -> None:
        """Copy a region of a stored slice, however it has to be cut to fit the scratch room."""
        start = sum(low * stride for (low, _), stride in zip(region, strides))
        counts = shape_of(region)
        span = span_of(counts, strides, item_size)
        needed = math.prod(counts) * item_size
        if span == needed and out.flags.c_contiguous:
            self._reader.read_into(source, start, out.reshape(-1).view(np.uint8).data)
            return
        mapped = self._reader.view(source, start, span)
        if mapped is not None:
            gather(mapped, counts, strides, out)
            return
        skipped = self._reader.worth_skipping * max(1, runs(counts, strides, item_size))
        if span <= len(self._scratch) and span - needed <= skipped:
            self._reader.read_into(source, start, self._scratch[:span].data)
            gather(self._scratch[:span], counts, strides, out)
            return
        for part in self._parts(counts, strides, item_size):
            inside = tuple(slice(low, high) for low, high in part)
            moved = tuple((low + a, low + b) for (low, _), (a, b) in zip(region, part))
            self._copy(source, moved, strides, out[inside], item_size)

    def _parts(self, counts: Sequence[int], strides: Sequence[int], item_size: int) -> list[Box]:
        """Cut a region that cannot be read at once along its outermost axis longer than 1."""
        axis = next(axis for axis, count in enumerate(counts) if count > 1)
        row_span = span_of(counts[axis + 1 :], strides[axis + 1 :], item_size)
        gap = strides[axis] - row_span
        rows = 1 if gap > self._reader.worth_skipping else max(1, (len(self._scratch) - row_span) // strides[axis] + 1)
        if rows >= counts[axis]:
            rows = max(1, counts[axis] // 2)
        head = tuple((0, 1) for _ in counts[:axis])
        tail = tuple((0, count) for count in counts[axis + 1 :])
        return [(*head, (first, min(first + rows, counts[axis])), *tail) for first in range(0, counts[axis], rows)]


def _inside(box: Box, around: Box) -> tuple[slice, ...]:
    """A box as an index into the array of a box around it."""
    return tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(box, around))


def byte_strides(shape: Sequence[int], item_size: int) -> list[int]:
    """Strides of a C-order array in bytes."""
    strides = []
    stride = item_size
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return strides[::-1]


def span_of(counts: Sequence[int], strides: Sequence[int], item_size: int) -> int:
    """Bytes from the first byte of a region to its last, with what lies between."""
    return sum((count - 1) * stride for count, stride in zip(counts, strides)) + item_size


def runs(counts: Sequence[int], strides: Sequence[int], item_size: int) -> int:
    """How many contiguous runs a region consists of."""
    run = item_size
    for axis in range(len(counts) - 1, -1, -1):
        if strides[axis] != run:
            return math.prod(counts[: axis + 1])
        run *= counts[axis]
    return 1


def gather(data: Bytes, counts: Sequence[int], strides: Sequence[int], out: Words) -> None:
    """Copy strided elements out of ``data``, whose first byte is the region's first.

    Args:
        data: bytes of the source.
        counts: elements per dimension.
        strides: bytes from one element to the next, per dimension.
        out: one word or more per element, in the last dimension.
    """
    source: Words = np.ndarray(
        shape=(*counts, out.shape[-1]), dtype=out.dtype, buffer=data, strides=(*strides, out.itemsize)
    )
    out[...] = source
