"""Cutting the files of a group into parts for threads, and writing a part through a buffer per file.

A part is a range of every file of a group, some tens of MiB together, tensor by tensor in file order. Where members
of the group hold different columns of the same rows, the tensor is marked as shared: its rows are read once for all.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from reshard.checkpoints import Data, Literal
from reshard.execute.reader import FileReader
from reshard.execute.runs import is_transposed
from reshard.execute.writing import PartBuffer, TargetWriter
from reshard.layout import Box, boxes_of_range, shape_of, volume_of
from reshard.plan.pieces import SharedRows, StoredSlice, TargetFile, TargetTensor

Segment = Literal | Data
Segments = tuple[Sequence[Segment], ...]
"""Per member of a group the segments of a tensor to write, in file order."""

# Bytes of a part: large enough that threads seldom wait for each other, small enough to divide one file among them.
MAX_PART_BYTES = 64 << 20
MIN_PART_BYTES = 4 << 20
_PARTS_PER_THREAD = 4
# A part ends at this fraction of its bytes: shares are equal and seldom fill it exactly.
_FULL = 0.75
# Tensors of all files of a part together: each is an object until the part is written.
MAX_TENSORS = 4096
# Shared rows are read whole: members together must take at least this share of them.
_MIN_SHARE = 0.5
# Minimum bytes that are read to several places in one request: each request costs some microseconds of Python.
_MIN_SCATTERED = 256 << 10
# Maximum bytes of decoded or cast elements that are written at a time: they are still in the cache then.
_MAX_COMPUTED = 2 << 20


class TensorShare(NamedTuple):
    """One of several equal shares of a tensor in every file of a group; small tensors have one.

    Attributes:
        segments: of the whole tensor.
        find_shared: returns the rows of the whole tensor that members share; None where they share none.
    """

    group: Sequence[TargetFile]
    segments: Segments
    find_shared: Callable[[], SharedRows | None]
    number: int
    shares: int

    def cut(self) -> tuple[Segments, SharedRows | None]:
        """The segments of the share, and rows to read once for all members instead of the data in the segments."""
        shared = self.find_shared()
        if self.shares == 1:
            return self.segments, shared
        if shared is None:
            units = tuple(map(_unit_of, self.group, self.segments, itertools.repeat(self.shares)))
        else:
            first, last = self._part_of(shared.last)
            shared, units = shared._replace(first=first, last=last), shared.row_bytes
        return tuple(map(self._cut, self.segments, units)), shared

    def _part_of(self, count: int) -> tuple[int, int]:
        """The first of ``count`` units that are in this share, and the one behind the last."""
        return count * self.number // self.shares, count * (self.number + 1) // self.shares

    def _cut(self, segments: Sequence[Segment], unit: int) -> list[Segment]:
        """The share of a member's segments, in multiples of ``unit`` bytes; literal bytes go with the data behind."""
        size = _size_of(segments)
        first, last = (unit * place for place in self._part_of(size // unit))
        last = size if self.number + 1 == self.shares else last
        cut: list[Segment] = []
        literals: list[Segment] = []
        for segment in segments:
            if isinstance(segment, Literal):
                literals.append(segment)
                continue
            start, stop = max(segment.start, first), min(segment.stop, last)
            if start < stop:
                cut += literals if start == segment.start else []
                cut.append(Data(segment.offset + start - segment.start, segment.tensor, start, stop))
            literals = []
        return cut


def parts_of(group: Sequence[TargetFile], threads: int) -> Iterator[list[TensorShare]]:
    """Cut the files of a group into parts, in file order; at least one.

    Only sizes decide where: each of many processes finds its parts without planning the tensors of the others.

    Args:
        threads: maximum number of threads; large files are cut into some parts for each.
    """
    share = sum(target.layout.size for target in group) // (_PARTS_PER_THREAD * threads)
    part_bytes = max(MIN_PART_BYTES, min(MAX_PART_BYTES, share))
    part: list[TensorShare] = []
    size = 0
    any_part = False
    for segments, nbytes in _tensors_of(group):
        count = max(1, round(nbytes / part_bytes))
        find_shared: Callable[[], SharedRows | None] = functools.partial(_shared_rows, group, segments)
        if count > 1:
            find_shared = functools.cache(find_shared)
        for number in range(count):
            part.append(TensorShare(group, segments, find_shared, number, count))
            size += nbytes // count
            if size >= _FULL * part_bytes or len(part) * len(group) >= MAX_TENSORS:
                yield part
                part, size, any_part = [], 0, True
    if part or not any_part:
        yield part


def _tensors_of(group: Sequence[TargetFile]) -> Iterator[tuple[tuple[Sequence[Segment], ...], int]]:
    """Per tensor of the files: its segments in each, and the bytes of data in all."""
    if len({id(target.layout) for target in group}) == 1:
        for segments in _by_tensor(group[0]):
            yield (segments,) * len(group), len(group) * _size_of(segments)
    elif _alike(group):
        for of_members in zip(*map(_by_tensor, group)):
            yield of_members, sum(map(_size_of, of_members))
    else:
        # Members with other orders of tensors cannot be written side by side.
        for number, target in enumerate(group):
            for segments in _by_tensor(target):
                alone = tuple(segments if member == number else () for member in range(len(group)))
                yield alone, _size_of(segments)


def _size_of(segments: Sequence[Segment]) -> int:
    """Bytes of data, without literal bytes, which are not cut."""
    return sum(segment.stop - segment.start for segment in segments if isinstance(segment, Data))


def _alike(group: Sequence[TargetFile]) -> bool:
    """Whether all files have the same tensors in the same order, and all or none have bytes after the last."""
    layouts = {id(target.layout): target.layout for target in group}.values()
    orders = itertools.zip_longest(*(layout.order() for layout in layouts))
    return len({layout.ends_in_literal for layout in layouts}) == 1 and all(len(set(order)) == 1 for order in orders)


def _by_tensor(target: TargetFile) -> Iterator[list[Segment]]:
    """The segments of a file, each tensor's data with the literal bytes before it; then bytes at the end."""
    tensor = -1
    segments: list[Segment] = []
    literals: list[Segment] = []
    for segment in target.layout.segments():
        if isinstance(segment, Literal):
            literals.append(segment)
            continue
        if segment.tensor != tensor and segments:
            yield segments
            segments = []
        tensor = segment.tensor
        segments += [*literals, segment]
        literals = []
    # Headers of empty tensors at the end of the file follow the last data and must stay behind it.
    yield from filter(None, (segments, literals))


def _unit_of(target: TargetFile, segments: Sequence[Segment], shares: int) -> int:
    """Bytes that are not cut in a member: a row, or an element where rows are too large for as many shares."""
    tensor = next((target.tensors[segment.tensor] for segment in segments if isinstance(segment, Data)), None)
    if tensor is None:
        return 1
    row = math.prod(tensor.shape[1:]) * tensor.item_size
    return row if row * shares <= tensor.nbytes else tensor.item_size


def _shared_rows(group: Sequence[TargetFile], segments: Sequence[Sequence[Segment]]) -> SharedRows | None:
    """The rows of a tensor that members share, or None where reading them once gains nothing."""
    if len(group) == 1:
        return None
    data = [[segment for segment in of_member if isinstance(segment, Data)] for of_member in segments]
    if any(len(records) != 1 or records[0] is not of_member[-1] for records, of_member in zip(data, segments)):
        # Several records, or literal bytes after the data: only bytes before the data can precede the rows.
        return None
    tensors = tuple(target.tensors[records[0].tensor] for target, records in zip(group, data))
    first = tensors[0]
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


class FileGroup:
    """Target files that are written together, and their parts, cut when they are taken; for any number of threads.

    Args:
        files: the files.
        threads: maximum number of threads that write parts of them.
        writers: of the files; none in a worker process, where skipped parts are dropped because others write them.

    Attributes:
        begun: number of parts that threads have begun.
        done: number of parts that are done.
        threads: number of threads that write parts.
    """

    def __init__(self, files: Sequence[TargetFile], threads: int, writers: Sequence[TargetWriter] = ()) -> None:
        self.files = files
        self.writers = writers
        self.begun = self.done = self.threads = 0
        self._lock = threading.Lock()
        self._remaining = enumerate(parts_of(files, threads))
        # Before the first: nothing is cut where worker processes do it.
        self._next: tuple[int, list[TensorShare]] | None = (-1, [])
        self._skipped: dict[int, list[TensorShare]] = {}

    def take(self, number: int) -> tuple[list[TensorShare] | None, bool]:
        """A part by its number, None if there are fewer parts; and whether it is the last."""
        with self._lock:
            if number in self._skipped:
                return self._skipped.pop(number), False
            while self._next is not None:
                (place, part), self._next = self._next, next(self._remaining, None)
                if place == number:
                    return part, self._next is None
                if self.writers:
                    self._skipped[place] = part
            return None, True


def write_part(part: Sequence[TensorShare], writers: Sequence[TargetWriter], reader: FileReader) -> Iterator[int]:
    """Write a part, given a writer per file. A caller that stops early leaves the rest of it unwritten.

    Yields:
        Bytes of tensor contents that were read since the last time.

    Raises:
        UnwritableError: a file cannot be written, and no other could.
        ReshardError: a source file cannot be read.
    """
    size = len(reader.block) // len(writers)
    rooms = (reader.block[number * size : (number + 1) * size] for number in range(len(writers)))
    buffers = [PartBuffer(room, writer) for room, writer in zip(rooms, writers)]
    for share in part:
        of_members, shared = share.cut()
        if shared is None:
            for buffer, segments in zip(buffers, of_members):
                yield from _write_alone(segments, buffer.writer.target.tensors, buffer, reader)
        else:
            for buffer, segments in zip(buffers, of_members):
                for segment in segments:
                    buffer.expect(segment.offset)
                    if isinstance(segment, Literal):
                        buffer.put(segment.data)
            yield from _write_shared(shared, buffers, reader)
    for buffer in buffers:
        buffer.flush()


def _write_alone(
    segments: Sequence[Segment], tensors: Sequence[TargetTensor], buffer: PartBuffer, reader: FileReader
) -> Iterator[int]:
    for segment in segments:
        buffer.expect(segment.offset)
        if isinstance(segment, Literal):
            buffer.put(segment.data)
            continue
        tensor = tensors[segment.tensor]
        first, last = segment.start // tensor.item_size, segment.stop // tensor.item_size
        if is_transposed(tensor):
            yield from _write_transposed(tensor, first, last, buffer, reader)
            continue
        computed = all(
            piece.region is None and (piece.source.decoding is not None or piece.dtype is not None)
            for piece in tensor.pieces
        )
        step = min(buffer.size, _MAX_COMPUTED if computed else _most_at_a_time(tensor, first, last, reader))
        most = max(1, step // tensor.item_size)
        for box in boxes_of_range(tensor.shape, first, last, most):
            count = volume_of(box) * tensor.item_size
            reader.fill(tensor, box, buffer.reserve(count))
            if computed or buffer.pending >= step:
                buffer.flush()
            yield count


def _most_at_a_time(tensor: TargetTensor, first: int, last: int, reader: FileReader) -> int:
    """Maximum bytes of elements to read before they are written: runs are still in the cache then."""
    most = reader.copied_bytes
    if (last - first) * tensor.item_size <= most:
        # Small tensors are read at once: their runs are computed only then.
        return most
    for box in boxes_of_range(tensor.shape, first, last, last - first):
        runs = reader.runs(tensor, box)
        if runs is None:
            return len(reader.block)
        most = max(most, _MIN_SCATTERED * sum(places.number > 1 for _, _, places in runs))
    return most


def _write_transposed(
    tensor: TargetTensor, first: int, last: int, buffer: PartBuffer, reader: FileReader
) -> Iterator[int]:
    """Write elements while they are in the cache."""
    for box in boxes_of_range(tensor.shape, first, last, last - first):
        for part, fill in reader.filler.steps(tensor, box, buffer.size):
            count = volume_of(part) * tensor.item_size
            fill(buffer.reserve(count))
            buffer.flush()
            yield count


def _write_shared(shared: SharedRows, buffers: Sequence[PartBuffer], reader: FileReader) -> Iterator[int]:
    if shared.first == shared.last:
        return
    most = min(
        reader.filler.most_shared_rows(shared),
        *(buffer.size // row for buffer, row in zip(buffers, shared.row_bytes)),
    )
    if most < 1:
        # A row of all members does not fit the buffers: write each member alone.
        for tensor, row, buffer in zip(shared.tensors, shared.row_bytes, buffers):
            data = Data(buffer.position, 0, shared.first * row, shared.last * row)
            yield from _write_alone([data], (tensor,), buffer, reader)
        return
    for rows in boxes_of_range(shape_of(shared.outer), shared.first, shared.last, most):
        count = volume_of(rows)
        rooms = [buffer.reserve(count * row) for buffer, row in zip(buffers, shared.row_bytes)]
        reader.filler.fill_shared(shared, rows, rooms)
        yield sum(map(len, rooms))
