"""The contents of a `.ckpt` file, without reading the tensors.

A `.ckpt` file is a protobuf message of tens of GB, of which only some hundred bytes per tensor are structure. So this
module parses the wire format: it reads keys and lengths through a small window, and skips contents.

    Checkpoint     { value: Value* (1) }
    Value          { tag: string (1), tensor: TensorProto (2) or maptensor: MapTensorProto (3) }
    TensorProto    { dims: int64* (1), tensor_type: string (2), tensor_content: bytes (3) }
    MapTensorProto { tensor: TensorProto* (1) }

A large tensor has several consecutive values of the same tag, type and dims. A CRC may follow the last value. All
lengths are checked against the file's size; a damaged or hostile file costs bounded time and memory.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from reshard.checkpoints.formats.dtypes import ITEM_SIZES, MAP_TENSOR, TEXT
from reshard.checkpoints.formats.tensors import CheckpointIndex, TensorTable, content_size, logical_shape
from reshard.errors import CheckpointError, DamagedCheckpointError, EncryptedCheckpointError
from reshard.storage import ReadableFile, read_range
from reshard.storage.files import MARK_SIZE, cipher_of
from reshard.text.messages import quoted

CRC_MARK = b"crc_num"
TRAILER_SIZE = len(CRC_MARK) + 10

# Keys of the fields above: field number, shifted by three, plus the wire type.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIELD_1 = 1 << 3 | _BYTES
_FIELD_2 = 2 << 3 | _BYTES
_FIELD_3 = 3 << 3 | _BYTES
_FIELD_1_NUMBER = 1 << 3 | _VARINT

# The window: small after a skipped large tensor, growing while tensors are so small that reading on is cheaper than
# another system call.
_LEAST_WINDOW = 1 << 10
_MOST_WINDOW = 1 << 18
_NEAR = 1 << 15

# A damaged length is found before much is read.
_LONGEST_NAME = 1 << 14
_MOST_DIMS = 64
_LONGEST_VARINT = 10


def read_ckpt_index(file: ReadableFile, size: int) -> CheckpointIndex:
    """Read the structure of a `.ckpt` file of ``size`` bytes.

    Returns:
        Every tensor with its extents; none for an empty file, which MindSpore writes for a rank without slices.

    Raises:
        EncryptedCheckpointError: the file is encrypted.
        DamagedCheckpointError: the file is truncated, or its structure is broken.
        CheckpointError: the file is a strategy file.
    """
    walk = _Walk(file, size)
    cipher = cipher_of(walk.peek(MARK_SIZE))
    if cipher is not None:
        raise EncryptedCheckpointError(
            f"{walk.path}: is encrypted with {cipher}",
            file=walk.path,
            hint="reshard decrypt SRC PLAIN --key-file KEY, then this command with PLAIN",
        )
    tensors = TensorTable()
    for _, records in itertools.groupby(_records(walk), key=lambda record: record.name):
        _add_joined(tensors, [*records], walk.path)
    crc = None
    if walk.position < size:
        crc = int.from_bytes(walk.take(TRAILER_SIZE)[len(CRC_MARK) :], "big")
    return CheckpointIndex(walk.path, "ckpt", size, tensors, crc)


class _Record(NamedTuple):
    """One value: a tensor, a piece of one, or a map tensor."""

    start: int
    name: str
    dtype: str
    dims: tuple[int, ...]
    extents: tuple[tuple[int, int], ...]


def _records(walk: _Walk) -> Iterator[_Record]:
    """The values of a file. Afterwards the position is the end of the file, or the beginning of its CRC."""
    size = walk.size
    while walk.position < size:
        if size - walk.position == TRAILER_SIZE and walk.peek(len(CRC_MARK)) == CRC_MARK:
            return
        key = walk.key()
        if key == _FIELD_1:
            yield _read_value(walk, walk.enter(size))
        elif key == _FIELD_1_NUMBER:
            raise CheckpointError(
                f"{walk.path}: is a strategy file, not a checkpoint",
                file=walk.path,
                hint="name strategy files with --src-strategy and --dst-strategy",
            )
        else:
            walk.skip(key, size)


def _read_value(walk: _Walk, end: int) -> _Record:
    start = walk.position
    name: str | None = None
    tensor: tuple[str, tuple[int, ...], tuple[tuple[int, int], ...]] | None = None
    while walk.position < end:
        key = walk.key()
        if key == _FIELD_1:
            name = walk.name(end)
        elif key in (_FIELD_2, _FIELD_3):
            if tensor is not None:
                raise walk.damaged("a record holds two tensors")
            inner = walk.enter(end)
            tensor = _read_tensor(walk, inner) if key == _FIELD_2 else _read_map_tensor(walk, inner)
        else:
            walk.skip(key, end)
    walk.leave(end)
    if not name:
        raise walk.damaged("a record has no name", start)
    if tensor is None:
        raise walk.damaged(f"{quoted(name)} has no tensor", start, name)
    return _Record(start, name, *tensor)


def _read_tensor(walk: _Walk, end: int) -> tuple[str, tuple[int, ...], tuple[tuple[int, int], ...]]:
    dtype: str | None = None
    dims: list[int] = []
    content: tuple[int, int] | None = None
    while walk.position < end:
        key = walk.key()
        if key == _FIELD_1_NUMBER:
            dims.append(walk.varint())
        elif key == _FIELD_2:
            dtype = walk.name(end)
        elif key == _FIELD_3:
            if content is not None:
                raise walk.damaged("a record holds two contents")
            stop = walk.enter(end)
            content = (walk.position, stop - walk.position)
            walk.position = stop
        elif key == _FIELD_1:
            # The packed form of the same numbers; readers of protobuf accept both.
            stop = walk.enter(end)
            while walk.position < stop and len(dims) <= _MOST_DIMS:
                dims.append(walk.varint())
            if len(dims) <= _MOST_DIMS:
                walk.leave(stop)
        else:
            walk.skip(key, end)
        if len(dims) > _MOST_DIMS:
            raise walk.damaged(f"a tensor has more than {_MOST_DIMS} dimensions")
    walk.leave(end)
    if not dtype:
        raise walk.damaged("a tensor has no type")
    if any(dim >> 63 for dim in dims):
        raise walk.damaged("a tensor has a negative dimension")
    return dtype, tuple(dims), (content,) if content is not None and content[1] else ()


def _read_map_tensor(walk: _Walk, end: int) -> tuple[str, tuple[int, ...], tuple[tuple[int, int], ...]]:
    extents: list[tuple[int, int]] = []
    while walk.position < end:
        key = walk.key()
        if key == _FIELD_1:
            extents += _read_tensor(walk, walk.enter(end))[2]
        else:
            walk.skip(key, end)
    walk.leave(end)
    return MAP_TENSOR, (), tuple(extents)


def _add_joined(tensors: TensorTable, records: Sequence[_Record], path: str) -> None:
    """Add the tensor of consecutive records of one name, after checking its size."""
    first = at = records[0]
    extents = first.extents
    if len(records) > 1:
        extents = tuple(extent for record in records for extent in record.extents)
        at = next((record for record in records if (record.dtype, record.dims) != (first.dtype, first.dims)), first)
    nbytes = sum(length for _, length in extents)
    if at is not first:
        problem: str | None = "occurs twice, with different types or dimensions"
    elif first.name in tensors:
        problem = "occurs twice"
    else:
        problem = _problem_of_size(first, nbytes, len(records) > 1)
    if problem is not None:
        raise DamagedCheckpointError(
            f"{path}: is damaged: {quoted(first.name)} at byte {at.start} {problem}",
            file=path,
            parameter=first.name,
        )
    shape = logical_shape(first.dtype, first.dims, nbytes)
    tensors.add(first.name, first.dtype, shape, first.dims, extents)


def _problem_of_size(first: _Record, nbytes: int, several: bool) -> str | None:
    if first.dtype == MAP_TENSOR:
        return None
    expected = content_size(first.dtype, first.dims, nbytes)
    if expected is None:
        # Text, or an unknown type: only whole elements are required.
        elements = math.prod(logical_shape(first.dtype, first.dims, nbytes))
        if first.dtype == TEXT:
            fits = nbytes % 4 == 0
        elif elements:
            fits = nbytes > 0 and nbytes % elements == 0
        else:
            fits = nbytes == 0
        return None if fits else f"has {nbytes} bytes of {first.dtype} for dimensions {list(first.dims)}"
    if nbytes == expected:
        return None
    twice = " (or it occurs twice)" if several and nbytes > expected else ""
    return (
        f"has {nbytes} bytes, but {first.dtype} of dimensions {list(first.dims)} "
        f"takes {ITEM_SIZES[first.dtype]} bytes per element, {expected} in all{twice}"
    )


class _Walk:
    """A position in the file, and a window of its bytes with keys, lengths and names.

    Attributes:
        path: of the file.
        size: of the file, in bytes.
        position: offset of the next byte; set it to skip content.
    """

    def __init__(self, file: ReadableFile, size: int) -> None:
        self.path = file.path
        self.position = 0
        self._file = file
        self.size = size
        self._window = b""
        self._start = 0
        self._length = _LEAST_WINDOW

    def peek(self, count: int) -> bytes:
        """The next ``count`` bytes, fewer at the end of the file; the position stays."""
        offset = self.position - self._start
        if offset + count > len(self._window):
            self._move_window(min(count, self.size - self.position))
            offset = 0
        return self._window[offset : offset + count]

    def take(self, count: int) -> bytes:
        data = self.peek(count)
        self.position += count
        return data

    def varint(self) -> int:
        """The next number, 0 to 2**64 - 1."""
        offset = self.position - self._start
        if offset >= len(self._window):
            self._move_window(1)
            offset = 0
        byte = self._window[offset]
        self.position += 1
        if byte < 0x80:
            return byte
        value = byte & 0x7F
        for shift in range(7, 7 * _LONGEST_VARINT, 7):
            offset += 1
            if offset >= len(self._window):
                self._move_window(1)
                offset = 0
            byte = self._window[offset]
            self.position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & 0xFFFFFFFFFFFFFFFF
        raise self.damaged("a number has no end")

    def key(self) -> int:
        start = self.position
        key = self.varint()
        if key < 8:
            raise self.damaged("invalid field number 0", start)
        return key

    def enter(self, end: int) -> int:
        """Read the length of a field; returns the offset of its end, at most ``end``."""
        start = self.position
        length = self.varint()
        stop = self.position + length
        if stop > end:
            if stop > self.size:
                raise self.damaged(
                    f"a field ends at byte {stop}, but the file has {self.size} bytes: it is truncated",
                    start,
                )
            raise self.damaged(f"a field ends at byte {stop}, beyond its message's end at {end}", start)
        return stop

    def leave(self, end: int) -> None:
        if self.position != end:
            raise self.damaged(f"a message should end at byte {end}")

    def name(self, end: int) -> str:
        start = self.position
        length = self.enter(end) - self.position
        if length > _LONGEST_NAME:
            raise self.damaged("a name is too long", start)
        try:
            # Strategies and other files have the same names.
            return sys.intern(self.take(length).decode())
        except UnicodeDecodeError as error:
            raise self.damaged("a name is not UTF-8", start) from error

    def skip(self, key: int, end: int) -> None:
        start = self.position
        wire_type = key & 7
        if wire_type == _VARINT:
            self.varint()
        elif wire_type == _BYTES:
            self.position = self.enter(end)
        elif wire_type in (_FIXED64, _FIXED32):
            self.position += 8 if wire_type == _FIXED64 else 4
        else:
            raise self.damaged(f"wire type {wire_type} is not used in checkpoints", start)
        if self.position > end:
            raise self.damaged("a field ends beyond its message", start)

    def damaged(self, problem: str, at: int | None = None, name: str | None = None) -> DamagedCheckpointError:
        """The error for a defect at byte ``at``, by default at the position."""
        where = self.position if at is None else at
        return DamagedCheckpointError(
            f"{self.path}: is damaged, or no checkpoint: at byte {where}: {problem}",
            file=self.path,
            parameter=name,
        )

    def _move_window(self, count: int) -> None:
        """Move the window to the position; it then contains at least ``count`` bytes."""
        passed = self.position - (self._start + len(self._window))
        self._length = min(2 * self._length, _MOST_WINDOW) if passed < _NEAR else _LEAST_WINDOW
        if self.size - self.position < count:
            raise self.damaged("the file ends here, inside a record: it is truncated")
        self._window = read_range(self._file, self.position, count, self._length)
        self._start = self.position
