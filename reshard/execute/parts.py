"""Cutting the files of a group into parts for threads.

A part is a range of every file of a group, some tens of MiB together, tensor by tensor in file order. Where members
of the group hold different columns of the same rows, the tensor is marked as shared: its rows are read once for all.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Optional, Union

from reshard.checkpoints import Data, Literal
from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.layout import Box, shape_of, volume_of
from reshard.named_tuple import NamedTuple
from reshard.plan.pieces import StoredSlice, TargetFile, TargetTensor

Segment = Union[Literal, Data]

# Bytes of a part: large enough that threads seldom wait for each other, small enough to divide one file among them.
MAX_PART_BYTES = 64 << 20
MIN_PART_BYTES = 4 << 20
_PARTS_PER_THREAD = 4
# Tensors of all files of a part together: each is an object until the part is written.
MAX_STRETCHES = 4096
# Shared rows are read whole: members together must take at least this share of them.
_MIN_SHARE = 0.5


class SharedRows(NamedTuple):
    """Rows of one tensor of which several members hold columns.

    Rows are numbered in C order over the outer dimensions, in which all members hold the same box.

    Attributes:
        tensors: the tensor as each member holds it.
        outer: their common box of the outer dimensions.
        first: first row.
        last: one past the last row.
        row_bytes: bytes of a row, per member.
        uses: per stored slice, members and the boxes that they take from it.
        dtype: type of the stored elements, if they are cast.
    """

    tensors: tuple[TargetTensor, ...]
    outer: Box
    first: int
    last: int
    row_bytes: tuple[int, ...]
    uses: tuple[tuple[StoredSlice, tuple[tuple[int, Box], ...]], ...]
    dtype: Optional[str] = None

    @property
    def stored_size(self) -> int:
        """Bytes of an element in the source."""
        return self.tensors[0].item_size if self.dtype is None else ITEM_SIZES[self.dtype]

    @property
    def outer_shape(self) -> tuple[int, ...]:
        """Elements per outer dimension."""
        return shape_of(self.outer)


class Stretch(NamedTuple):
    """A tensor, or a part of one, in every file of the group.

    Attributes:
        segments: per member, the segments to write, in file order.
        shared: rows to read once for all members, instead of the data in ``segments``.
    """

    segments: tuple[list[Segment], ...]
    shared: Optional[SharedRows] = None


class FilesPart(NamedTuple):
    """The work of one thread: the offset of its first byte in every file, and the tensors from there on."""

    offsets: tuple[int, ...]
    stretches: list[Stretch]


def parts_of(group: Sequence[TargetFile], threads: int) -> Iterator[FilesPart]:
    """Cut the files of a group into parts, at element boundaries; at least one.

    Args:
        group: the files.
        threads: maximum number of threads; large files are cut into some parts for each.
    """
    share = sum(target.layout.size for target in group) // (_PARTS_PER_THREAD * threads)
    part_bytes = max(MIN_PART_BYTES, min(MAX_PART_BYTES, share))
    offsets = [0] * len(group)
    start, stretches, size = tuple(offsets), list[Stretch](), 0
    for stretch in _stretches(group, part_bytes):
        stretches.append(stretch)
        for member, segments in enumerate(stretch.segments):
            count = sum(len(s.data) if isinstance(s, Literal) else s.stop - s.start for s in segments)
            offsets[member] += count
            size += count
        if size >= part_bytes or len(stretches) * len(group) >= MAX_STRETCHES:
            yield FilesPart(start, stretches)
            start, stretches, size = tuple(offsets), [], 0
    if stretches or not any(offsets):
        yield FilesPart(start, stretches)


def _stretches(group: Sequence[TargetFile], part_bytes: int) -> Iterator[Stretch]:
    if len(group) == 1:
        for _, segments in _by_tensor(group[0]):
            for piece in _split(segments, group[0], part_bytes):
                yield Stretch((piece,))
        return
    if not _alike(group):
        # Members with other orders of tensors cannot be written side by side.
        for number, target in enumerate(group):
            for _, segments in _by_tensor(target):
                yield Stretch(tuple(segments if member == number else [] for member in range(len(group))))
        return
    for entries in zip(*map(_by_tensor, group)):
        side_by_side = tuple(segments for _, segments in entries)
        tensors = tuple(target.tensors[tensor] for target, (tensor, _) in zip(group, entries) if tensor >= 0)
        shared = _shared_rows(tensors, side_by_side) if len(tensors) == len(group) else None
        if shared is None:
            yield Stretch(side_by_side)
        else:
            yield from _split_shared(shared, side_by_side, part_bytes)


def _alike(group: Sequence[TargetFile]) -> bool:
    """Whether all files have the same tensors in the same order, and all or none have bytes after the last."""
    layouts = {id(target.layout): target.layout for target in group}.values()
    if len(layouts) == 1:
        return True
    orders = itertools.zip_longest(*(layout.order() for layout in layouts))
    return len({layout.ends_in_literal for layout in layouts}) == 1 and all(len(set(order)) == 1 for order in orders)


def _by_tensor(target: TargetFile) -> Iterator[tuple[int, list[Segment]]]:
    """The segments of a file, each tensor's data with the literal bytes before it; -1 for bytes at the end."""
    pending: list[Segment] = []
    last = -1
    for segment in target.layout.segments():
        if isinstance(segment, Data) and segment.tensor != last and last >= 0:
            # Literal bytes since the last tensor's data belong to this one.
            data = max(n for n, s in enumerate(pending) if isinstance(s, Data)) + 1
            yield last, pending[:data]
            pending = pending[data:]
        pending.append(segment)
        if isinstance(segment, Data):
            last = segment.tensor
    # Headers of empty tensors at the end of the file follow the last data and must stay behind it.
    data = max((n + 1 for n, s in enumerate(pending) if isinstance(s, Data)), default=0)
    if pending[:data]:
        yield last, pending[:data]
    if pending[data:]:
        yield -1, pending[data:]


def _split(segments: list[Segment], target: TargetFile, part_bytes: int) -> Iterator[list[Segment]]:
    """Cut a large tensor of a single file at element boundaries, between rows if a row fits into a part."""
    pending: list[Segment] = []
    for segment in segments:
        if isinstance(segment, Literal) or segment.stop - segment.start <= part_bytes:
            pending.append(segment)
            continue
        tensor = target.tensors[segment.tensor]
        row = math.prod(tensor.shape[1:]) * tensor.item_size
        unit = row if row <= part_bytes else tensor.item_size
        step = max(unit, part_bytes // unit * unit)
        start = segment.start
        while start < segment.stop:
            stop = min(segment.stop, (start // step + 1) * step)
            yield [*pending, Data(segment.offset + start - segment.start, segment.tensor, start, stop)]
            pending = []
            start = stop
    if pending:
        yield pending


def _shared_rows(tensors: tuple[TargetTensor, ...], segments: tuple[list[Segment], ...]) -> Optional[SharedRows]:
    """The rows of a tensor that members share, or None where reading them once gains nothing."""
    data = [[segment for segment in of_member if isinstance(segment, Data)] for of_member in segments]
    first = tensors[0]
    if any(len(records) != 1 or records[0] is not of_member[-1] for records, of_member in zip(data, segments)):
        # Several records, or literal bytes after the data: only bytes before the data can precede the rows.
        return None
    if any(tensor.item_size != first.item_size or tensor.padded for tensor in tensors):
        return None
    types = {piece.dtype for tensor in tensors for piece in tensor.pieces}
    if len(types) != 1 or any(piece.region is not None for tensor in tensors for piece in tensor.pieces):
        return None
    axis = next((a for a, bounds in enumerate(zip(*(t.box for t in tensors))) if len(set(bounds)) > 1), None)
    if axis is None:
        # Replicas: all dimensions are equal, so take the last one as the row.
        axis = len(first.box) - 1
    if axis < 1:
        return None
    uses: dict[StoredSlice, list[tuple[int, Box]]] = {}
    for member, tensor in enumerate(tensors):
        for piece in tensor.pieces:
            uses.setdefault(piece.source, []).append((member, piece.box))
    elements_read = elements_used = 0
    for source, boxes in uses.items():
        elements_read += volume_of(source.box[axis:])
        elements_used += sum(volume_of(box[axis:]) for _, box in boxes)
    if elements_used < elements_read * _MIN_SHARE:
        return None
    if all(len({member for member, _ in boxes}) < 2 for boxes in uses.values()):
        return None
    outer = first.box[:axis]
    rows = volume_of(outer)
    row_bytes = tuple(tensor.nbytes // rows for tensor in tensors)
    uses_of_sources = tuple((source, tuple(boxes)) for source, boxes in uses.items())
    return SharedRows(tensors, outer, 0, rows, row_bytes, uses_of_sources, types.pop())


def _split_shared(shared: SharedRows, segments: tuple[list[Segment], ...], part_bytes: int) -> Iterator[Stretch]:
    """Cut shared rows so that all members together take at most the bytes of a part."""
    step = max(1, part_bytes // sum(shared.row_bytes))
    for first in range(0, shared.last, step):
        last = min(shared.last, first + step)
        cut = tuple(
            [
                Data(s.offset + first * row, s.tensor, first * row, last * row) if isinstance(s, Data) else s
                for s in of_member
                if first == 0 or isinstance(s, Data)
            ]
            for of_member, row in zip(segments, shared.row_bytes)
        )
        yield Stretch(cut, shared._replace(first=first, last=last))


class Parts:
    """The parts of a group's files, cut when they are taken; for any number of threads.

    Args:
        files: the files.
        threads: maximum number of threads.
        alone: whether all parts are taken here; else other processes take some, and skipped parts are dropped.
    """

    def __init__(self, files: Sequence[TargetFile], threads: int, alone: bool) -> None:
        self.files = files
        self._alone = alone
        self._lock = threading.Lock()
        self._remaining = parts_of(files, threads)
        self._next: Optional[FilesPart] = next(self._remaining)
        self._number = 0
        self._skipped: dict[int, FilesPart] = {}

    def take(self, number: int) -> tuple[Optional[FilesPart], bool]:
        """A part by its number, None if there are fewer parts; and whether it is the last."""
        with self._lock:
            if number in self._skipped:
                return self._skipped.pop(number), False
            while self._next is not None:
                part, self._next = self._next, next(self._remaining, None)
                self._number += 1
                if self._number > number:
                    return part, self._next is None
                if self._alone:
                    self._skipped[self._number - 1] = part
            return None, True
