"""Archives of ``torch.save`` to be written: a file of records, one for each tensor, and archives of objects.

The CRC-32 of elements is zero, as torch writes it with ``set_crc32_options(False)``: computing it takes a third of the
time of a copy. Where checksums are requested, writers fill it in at `OutputLayout.entries`.
Elements begin at a multiple of 64 bytes of the record, so that they can be mapped.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from reshard.checkpoints.formats.archives import REBUILD, REBUILD_TYPED, STORAGES, UNTYPED
from reshard.checkpoints.formats.dtypes import TORCH_NAMES
from reshard.checkpoints.formats.output import CheckedEntry, OutputLayout, OutputTensor
from reshard.checkpoints.formats.pickles import PickledInstance, inert, inert_class, pickled

_ALIGNMENT = 64
_UNKNOWN = 0xFFFFFFFF
_UTF8 = 0x0800
_NAME = "archive/"
# Offsets of the CRC in an entry's header, and in its entry of the directory.
_LOCAL_CRC, _DIRECTORY_CRC = 14, 16
_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items()}
_ORDERED = inert("collections.OrderedDict")


class WrittenRecord(NamedTuple):
    """A record of a file that is laid out.

    Attributes:
        tensor: its tensor.
        starts: its first element, per dimension of the full tensor.
        offset: where the record begins.
        length: its bytes.
    """

    tensor: OutputTensor
    starts: tuple[int, ...]
    offset: int
    length: int


class ArchiveLayout(OutputLayout):
    """A file of archives.

    Attributes:
        records: its records, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: list[WrittenRecord] = []
        self.entries: list[CheckedEntry] = []


def lay_out_archives(tensors: Sequence[OutputTensor], starts: Sequence[tuple[int, ...]]) -> ArchiveLayout:
    """Lay out a file with an archive for every tensor, one after the other.

    Args:
        tensors: the tensors, in this order.
        starts: where in the full tensor each begins.
    """
    layout = ArchiveLayout()
    pending = b""
    offset = 0
    for index, (tensor, start) in enumerate(zip(tensors, starts)):
        archive = _Archive()
        archive.add("data.pkl", _described(tensor))
        archive.add("byteorder", b"little")
        head = archive.begin("data/0", tensor.nbytes)
        archive.add("version", b"3\n")
        tail = archive.end()
        pending += head
        if tensor.nbytes:
            layout.add(pending, index, 0, tensor.nbytes)
            pending = b""
        pending += tail
        length = len(head) + tensor.nbytes + len(tail)
        if tensor.nbytes:
            first = offset + len(head)
            places = tuple(offset + place for place in archive.crc_places)
            layout.entries.append(CheckedEntry(first, first + tensor.nbytes, places))
        layout.records.append(WrittenRecord(tensor, start, offset, length))
        offset += length
    layout.add(pending)
    return layout


def archive_of_pickle(data: bytes) -> bytes:
    """The archive of an object without tensors.

    Args:
        data: the pickle of the object.
    """
    archive = _Archive()
    archive.add("data.pkl", data)
    archive.add("byteorder", b"little")
    archive.add("version", b"3\n")
    return archive.end()


def _described(tensor: OutputTensor) -> bytes:
    """The pickle of a tensor that is all of the storage ``0``."""
    shape = tensor.dims
    strides = tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
    typed = _STORAGE_OF.get(tensor.dtype)
    elements = math.prod(shape) if typed else tensor.nbytes
    storage = PickledInstance(("storage", inert_class(typed or UNTYPED), "0", "cpu", elements))
    args = (storage, 0, shape, strides, False, _ORDERED)
    if typed:
        return pickled(inert(REBUILD, *args))
    return pickled(inert(REBUILD_TYPED, *args, inert_class(TORCH_NAMES[tensor.dtype])))


class _Archive:
    """Puts entries together; the content of one may be left out, and then lies where the pieces are joined.

    Attributes:
        crc_places: where the CRC of that content is in the archive.
    """

    def __init__(self) -> None:
        self.crc_places: tuple[int, ...] = ()
        self._directory_place = 0
        self._bytes = bytearray()
        self._position = 0
        self._directory = bytearray()
        self._count = 0

    def add(self, name: str, data: bytes) -> None:
        self._header(name, len(data), zlib.crc32(data))
        self._put(data)

    def begin(self, name: str, size: int) -> bytes:
        """All bytes before the content of an entry; the content is written by others."""
        self.crc_places = (self._position + _LOCAL_CRC,)
        self._directory_place = len(self._directory) + _DIRECTORY_CRC
        self._header(name, size, 0)
        head = bytes(self._bytes)
        self._bytes.clear()
        self._position += size
        return head

    def _put(self, data: bytes) -> None:
        self._bytes += data
        self._position += len(data)

    def _header(self, name: str, size: int, crc: int) -> None:
        full = (_NAME + name).encode()
        start = self._position
        large = size >= _UNKNOWN
        extra = struct.pack("<2H2Q", 1, 16, size, size) if large else b""
        before = start + 30 + len(full) + len(extra)
        # Padding as torch has it, in a field of its own.
        padding = -(before + 4) % _ALIGNMENT
        extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        stored = _UNKNOWN if large else size
        self._put(
            struct.pack(
                "<4s5H3I2H", b"PK\3\4", 45 if large else 0, _UTF8, 0, 0, 0, crc, stored, stored, len(full), len(extra)
            )
        )
        self._put(full + extra)
        far = start >= _UNKNOWN
        numbers = [*([size, size] if large else []), *([start] if far else [])]
        more = struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
        self._directory += struct.pack(
            "<4s6H3I5H2I",
            b"PK\1\2",
            45 if numbers else 0,
            45 if numbers else 0,
            _UTF8,
            0,
            0,
            0,
            crc,
            stored,
            stored,
            len(full),
            len(more),
            0,
            0,
            0,
            0,
            _UNKNOWN if far else start,
        )
        self._directory += full + more
        self._count += 1

    def end(self) -> bytes:
        """The remaining bytes, with the directory."""
        start, size, count = self._position, len(self._directory), self._count
        self.crc_places += (start + self._directory_place,)
        ending = bytes(self._bytes + self._directory)
        if start >= _UNKNOWN:
            ending += struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
            ending += struct.pack("<4sIQI", b"PK\6\7", 0, start + size, 1)
        return ending + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, size, min(start, _UNKNOWN), 0)
