"""Cutting the files of a group into parts that threads can take.

A part is a stretch of every file of a group, in file order, of some tens of MiB in all. Within it
goes one tensor after the other. Where members of the group take different columns of the same rows,
the tensor is marked as shared, so that its rows are read once for all of them.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional, Union

from reshard.checkpoints import Data, Literal
from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.layout import Box, shape_of, volume_of
from reshard.plan.pieces import StoredSlice, TargetFile, TargetTensor

Segment = Union[Literal, Data]

# Bytes of a part: large enough that threads seldom meet, small enough to share out one file.
MOST_PART_BYTES = 64 << 20
LEAST_PART_BYTES = 4 << 20
_PARTS_PER_THREAD = 4
# Tensors of all files of a part together, which are objects until it is written.
MOST_STRETCHES = 4096
# Rows are read whole for all members, so they must need most of them between them.
_LEAST_SHARE = 0.5


class SharedRows(NamedTuple):
    """Rows of one tensor that several members take columns of.

    Rows are numbered in C order over the outer dimensions, in which all members hold the same box.

    Attributes:
        tensors: the tensor as each member holds it.
        outer: the box that all of them hold of the outer dimensions.
        first: first row.
        last: one past the last row.
        row_bytes: bytes of a row, per member.
        uses: per stored slice, which member takes which box of it.
        dtype: type of the stored elements, where they are cast.
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
        segments: per member, what is written, in file order.
        shared: rows to be read once for all members, in place of the data in ``segments``.
    """

    segments: tuple[list[Segment], ...]
    shared: Optional[SharedRows] = None


class FilesPart(NamedTuple):
    """What one thread writes: where it begins in every file, and what follows."""

    offsets: tuple[int, ...]
    stretches: list[Stretch]


def parts_of(group: Sequence[TargetFile], threads: int) -> Iterator[FilesPart]:
    """Cut the files of a group into parts, at element boundaries; at least one.

    Args:
        group: the files.
        threads: how many threads may come to help; large files are cut into some parts for each.
    """
    share = sum(target.layout.size for target in group) // (_PARTS_PER_THREAD * threads)
    part_bytes = max(LEAST_PART_BYTES, min(MOST_PART_BYTES, share))
    offsets = [0] * len(group)
    start, stretches, size = tuple(offsets), list[Stretch](), 0
    for stretch in _stretches(group, part_bytes):
        stretches.append(stretch)
        for member, segments in enumerate(stretch.segments):
            count = sum(len(s.data) if isinstance(s, Literal) else s.stop - s.start for s in segments)
            offsets[member] += count
            size += count
        if size >= part_bytes or len(stretches) * len(group) >= MOST_STRETCHES:
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
        # Members that order their tensors differently cannot go side by side.
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
    """Whether all files have the same tensors one after the other, and something behind the last, or not."""
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
    """Cut a large tensor of a single file at element boundaries, as whole rows where they are small."""
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
    data = [[segment for segment in mine if isinstance(segment, Data)] for mine in segments]
    first = tensors[0]
    if any(len(mine) != 1 or mine[0] is not all_of_it[-1] for mine, all_of_it in zip(data, segments)):
        # Several records, or something behind the data: only what comes before it can go before the rows.
        return None
    if any(tensor.item_size != first.item_size or tensor.padded for tensor in tensors):
        return None
    types = {piece.dtype for tensor in tensors for piece in tensor.pieces}
    if len(types) != 1 or any(piece.region is not None for tensor in tensors for piece in tensor.pieces):
        return None
    axis = next((a for a, bounds in enumerate(zip(*(t.box for t in tensors))) if len(set(bounds)) > 1), None)
    if axis is None:
        # Replicas: everything is outer, and a row is an element; take the last dimension as the row.
        axis = len(first.box) - 1
    if axis < 1:
        return None
    uses: dict[StoredSlice, list[tuple[int, Box]]] = {}
    for member, tensor in enumerate(tensors):
        for piece in tensor.pieces:
            uses.setdefault(piece.source, []).append((member, piece.box))
    read = written = 0
    for source, taken in uses.items():
        read += volume_of(source.box[axis:])
        written += sum(volume_of(box[axis:]) for _, box in taken)
    if all(len({member for member, _ in taken}) < 2 for taken in uses.values()) or written < read * _LEAST_SHARE:
        return None
    outer = first.box[:axis]
    rows = volume_of(outer)
    row_bytes = tuple(tensor.nbytes // rows for tensor in tensors)
    shared = tuple((source, tuple(taken)) for source, taken in uses.items())
    return SharedRows(tensors, outer, 0, rows, row_bytes, shared, types.pop())


def _split_shared(shared: SharedRows, segments: tuple[list[Segment], ...], part_bytes: int) -> Iterator[Stretch]:
    """Cut shared rows where all members together take more than a part's bytes."""
    step = max(1, part_bytes // sum(shared.row_bytes))
    for first in range(0, shared.last, step):
        last = min(shared.last, first + step)
        cut = tuple(
            [
                Data(s.offset + first * row, s.tensor, first * row, last * row) if isinstance(s, Data) else s
                for s in mine
                if first == 0 or isinstance(s, Data)
            ]
            for mine, row in zip(segments, shared.row_bytes)
        )
        yield Stretch(cut, shared._replace(first=first, last=last))


class Parts:
    """The parts of a group's files, cut as they are taken; for any number of threads.

    Args:
        files: the files.
        threads: how many threads may come to help.
        alone: whether nobody elsewhere takes parts of these files: then those before one that is taken are kept,
            because they will be.
    """

    def __init__(self, files: Sequence[TargetFile], threads: int, alone: bool) -> None:
        self.files = files
        self._alone = alone
        self._lock = threading.Lock()
        self._coming = parts_of(files, threads)
        self._next: Optional[FilesPart] = next(self._coming)
        self._number = 0
        self._kept: dict[int, FilesPart] = {}

    def take(self, number: int) -> tuple[Optional[FilesPart], bool]:
        """A part by its number, None where there are fewer; and whether none follows it."""
        with self._lock:
            if number in self._kept:
                return self._kept.pop(number), False
            while self._next is not None:
                part, self._next = self._next, next(self._coming, None)
                self._number += 1
                if self._number > number:
                    return part, self._next is None
                if self._alone:
                    self._kept[self._number - 1] = part
            return None, True
