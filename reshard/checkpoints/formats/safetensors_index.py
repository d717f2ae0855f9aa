"""The contents of a `.safetensors` file from its header, with all checks of the library.

The file is a header length (8 bytes, little-endian), a JSON header, and the tensors' bytes, without holes or
overlaps:

    {"__metadata__": {text: text}, name: {"dtype": ..., "shape": [...], "data_offsets": [from, to]}}

The library itself is not used here because it returns no offsets in the file.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Any, Optional

from reshard.checkpoints.formats.dtypes import FROM_SAFETENSORS, INT4, ITEM_SIZES, SAFETENSORS_NAMES, SUB_BYTE_TYPES
from reshard.checkpoints.formats.tensors import (
    LENGTH_SIZE,
    LONGEST_HEADER,
    METADATA,
    MOST_TENSORS,
    CheckpointIndex,
    TensorTable,
    check_shape,
    too_many,
)
from reshard.errors import CheckpointError, DamagedCheckpointError
from reshard.storage import ReadableFile, read_range, windows_in
from reshard.storage.json_text import JsonError, JsonStream
from reshard.text.wording import quoted

# Maximum length of a tensor's entry, including its name.
_LONGEST_ENTRY = 1 << 17
_LONGEST_NAME = 1 << 14
_MOST_DIMS = 64
_SHOWN = 100

_KNOWN_TYPES = FROM_SAFETENSORS.keys() | SUB_BYTE_TYPES
_LARGEST_NUMBER = (1 << 64) - 1


def read_safetensors_index(file: ReadableFile, size: int) -> CheckpointIndex:
    """Read the header of a safetensors file.

    Args:
        file: the file.
        size: its bytes.

    Returns:
        Every tensor, in the order of their bytes in the file.

    Raises:
        DamagedCheckpointError: the file is truncated, or its header is invalid.
        CheckpointError: a tensor has elements that are not whole bytes.
        OSError: reading failed.
    """
    path = file.path
    header = _Header(file, size)
    return CheckpointIndex(path, "safetensors", size, header.table(), _crc(header.metadata, path), header.metadata)


class _Header:
    """The parser of a header, which keeps some numbers per tensor in memory.

    Attributes:
        metadata: its metadata.
    """

    def __init__(self, file: ReadableFile, size: int) -> None:
        self._path = file.path
        self._size = size
        self.metadata: dict[str, str] = {}
        # By the order in the header.
        self._places: dict[str, int] = {}
        self._kinds: list[tuple[str, tuple[int, ...]]] = []
        self._numbers: dict[tuple[str, tuple[int, ...]], int] = {}
        self._kind_of = array("I")
        self._starts = array("Q")
        self._stops = array("Q")
        length = self._length(file)
        self._data_start = LENGTH_SIZE + length
        stream = JsonStream(windows_in(file, LENGTH_SIZE, self._data_start), _LONGEST_ENTRY)
        try:
            if stream.peek() != "{":
                raise self._damaged("its header does not begin with '{'")
            self._walk(stream)
        except JsonError as error:
            raise self._damaged(f"its header: {error}") from error

    def _length(self, file: ReadableFile) -> int:
        if self._size < LENGTH_SIZE:
            raise self._damaged(f"it has {self._size} bytes, less than the length of a header")
        length = int.from_bytes(read_range(file, 0, LENGTH_SIZE), "little")
        if length > LONGEST_HEADER:
            raise self._damaged(f"its header claims {length} bytes, more than the {LONGEST_HEADER} allowed")
        if LENGTH_SIZE + length > self._size:
            raise self._damaged(f"its header claims {length} bytes, but the file has {self._size}: it is truncated")
        return length

    def _walk(self, stream: JsonStream) -> None:
        described = False
        for key in stream.members(self._places):
            if key == METADATA:
                if described:
                    raise self._damaged(f"its header lists {METADATA} twice")
                described = True
                self._read_metadata(stream)
                continue
            # Strategies and other files have the same names.
            self._add(sys.intern(key), stream.value())
        stream.end()

    def _read_metadata(self, stream: JsonStream) -> None:
        if stream.peek() != "{":
            if stream.value() is not None:
                raise self._damaged(f"{METADATA} is not a map of texts")
            return
        for key in stream.members(self.metadata):
            value = stream.value(LONGEST_HEADER)
            if not isinstance(value, str):
                raise self._damaged(f"{METADATA} is not a map of texts")
            if len(self.metadata) >= MOST_TENSORS:
                raise too_many(self._path, "entries of metadata", MOST_TENSORS)
            self.metadata[key] = value

    def _add(self, name: str, info: Any) -> None:
        """Check and add the header's entry of a tensor."""
        stored, shape, start, stop = _entry(name, info, self._path)
        place = len(self._places)
        if place >= MOST_TENSORS:
            raise too_many(self._path, "tensors", MOST_TENSORS)
        self._places[name] = place
        kind = (stored, shape)
        number = self._numbers.setdefault(kind, len(self._kinds))
        if number == len(self._kinds):
            self._kinds.append(kind)
        self._kind_of.append(number)
        self._starts.append(start)
        self._stops.append(stop)

    def table(self) -> TensorTable:
        """The tensors in the order of their bytes, after a check for holes and overlaps."""
        tensors = TensorTable()
        position = 0
        for name, place in self._in_order():
            start, stop = self._starts[place], self._stops[place]
            if start != position:
                fault = "overlaps the tensor before it" if start < position else "leaves a hole before it"
                raise self._damaged(f"{quoted(name)} begins at byte {start} of the data and {fault}", name)
            position = stop
            dtype, shape = self._kinds[self._kind_of[place]]
            if self.metadata.get(name) == INT4:
                if dtype != "Int8":
                    raise self._damaged(
                        f"{quoted(name)} is marked as Int4 but not stored as {SAFETENSORS_NAMES[INT4]}", name
                    )
                dtype = INT4
            extents = ((self._data_start + start, stop - start),) if stop > start else ()
            tensors.add(name, dtype, shape, shape, extents)
        if self._data_start + position != self._size:
            end = self._data_start + position
            raise self._damaged(f"its tensors end at byte {end}, but the file has {self._size} bytes")
        return tensors

    def _in_order(self) -> Iterable[tuple[str, int]]:
        starts, stops = self._starts, self._stops
        ends = zip(starts[1:], starts, stops[1:], stops)
        if all((start, stop) >= (before, end) for start, before, stop, end in ends):
            return self._places.items()
        # A tensor of size zero has the offset of the next tensor, and comes before it.
        return sorted(self._places.items(), key=lambda entry: (starts[entry[1]], stops[entry[1]]))

    def _damaged(self, problem: str, name: Optional[str] = None) -> DamagedCheckpointError:
        return _damaged(self._path, problem, name)


def _entry(name: str, info: Any, path: str) -> tuple[str, tuple[int, ...], int, int]:
    """The checked dtype, shape and range in the data of one tensor."""
    if len(name) > _LONGEST_NAME:
        raise _damaged(path, f"the name {name[:_SHOWN]!r}... is too long")
    if not isinstance(info, dict) or not {"dtype", "shape", "data_offsets"} <= info.keys():
        raise _damaged(path, f"{quoted(name)} needs dtype, shape and data_offsets", name)
    stored, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(stored, str) or stored not in _KNOWN_TYPES:
        raise _damaged(path, f"{quoted(name)} has the unknown type {str(stored)[:_SHOWN]!r}", name)
    if stored in SUB_BYTE_TYPES:
        raise CheckpointError(
            f"{path}: {quoted(name)} has type {stored}, whose elements are not whole bytes; it cannot be converted",
            file=path,
            parameter=name,
        )
    dtype = FROM_SAFETENSORS[stored]
    if not _are_numbers(shape) or len(shape) > _MOST_DIMS:
        raise _damaged(path, f"the shape of {quoted(name)} is not a list of sizes", name)
    if not _are_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(path, f"the data_offsets of {quoted(name)} are not a range", name)
    expected = ITEM_SIZES[dtype]
    for size in shape:
        expected *= size
        if expected > _LARGEST_NUMBER:
            raise _damaged(path, f"{quoted(name)} is too large", name)
    start, stop = offsets
    if stop - start != expected:
        raise _damaged(
            path, f"{quoted(name)} has {stop - start} bytes, but {stored} of shape {shape} takes {expected}", name
        )
    check_shape(path, name, shape)
    return dtype, tuple(shape), start, stop


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(entry) is int and 0 <= entry <= _LARGEST_NUMBER for entry in value)


def _crc(metadata: dict[str, str], path: str) -> Optional[int]:
    text = metadata.get("crc_num")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise _damaged(path, f"its crc_num {text[:40]!r} is not a number")
    return int(text)


def _damaged(path: str, problem: str, name: Optional[str] = None) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{path}: is damaged, or no safetensors file: {problem}", file=path, parameter=name)
