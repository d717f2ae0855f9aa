"""Recognising files with the structure of a file read before.

Ranks of one stage save the same tensors in the same shapes, so except for tensor contents their files are equal byte
for byte. Comparing these bytes is far cheaper than parsing them, and files of equal structure share one description,
so a thousand ranks take the memory of a few.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Optional

from reshard.checkpoints.files import FileHandles
from reshard.checkpoints.formats.ckpt_index import CRC_MARK, TRAILER_SIZE
from reshard.checkpoints.formats.tensors import CheckpointIndex
from reshard.errors import RetryableError
from reshard.storage import FileStatus, ReadableFile, read_each, read_range, storage_of

# Limit of cached structures; in a de-duplicated save every file has its own.
_MOST_STRUCTURES = 16
# Gaps up to this size are cheaper to read than to skip; and the limit of one read.
_NEAR = 32 << 10
_MOST_AT_ONCE = 1 << 20


class _Read(NamedTuple):
    """Bytes to read at once, and their expected parts.

    Attributes:
        offset: of the first byte in the file.
        length: bytes.
        starts: offset of each compared part in these bytes; columns, because every tensor has a part.
        sizes: bytes of each part.
        digest: of all parts.
    """

    offset: int
    length: int
    starts: array[int]
    sizes: array[int]
    digest: bytes

    def matches(self, data: bytes) -> bool:
        """Whether the bytes have all parts in their places."""
        return _digest(data, self.starts, self.sizes) == self.digest


def _digest(data: bytes, starts: Iterable[int], sizes: Iterable[int]) -> bytes:
    parts = b"".join(data[start : start + size] for start, size in zip(starts, sizes))
    return hashlib.blake2b(parts, digest_size=32).digest()


class _Structure:
    """The structure of one file; its headers are read again for the first comparison."""

    def __init__(self, example: CheckpointIndex, status: FileStatus) -> None:
        self.example = example
        self._status = status
        self._lock = threading.Lock()
        self._reads: Optional[list[_Read]] = None

    def reads(self, handles: FileHandles) -> list[_Read]:
        """The reads of a file for a comparison.

        Raises:
            OSError: the example cannot be read any more, or was replaced.
        """
        with self._lock:
            if self._reads is None:
                reads = []
                with handles.borrow(self.example.path) as file:
                    status = file.status()
                    if (status.inode, status.modified) != (self._status.inode, self._status.modified):
                        raise OSError(errno.ESTALE, "changed since it was parsed")
                    gaps = list(_gaps(self.example, max(_NEAR, storage_of(self.example.path).worth_skipping)))
                    contents = read_each(file, [(offset, length) for offset, length, _, _ in gaps])
                    for (offset, length, starts, sizes), data in zip(gaps, contents):
                        reads.append(_Read(offset, length, starts, sizes, _digest(data, starts, sizes)))
                self._reads = reads
            return self._reads


class KnownStructures:
    """The structures of files read before, by format and size; thread-safe.

    Args:
        handles: open files.
    """

    def __init__(self, handles: FileHandles) -> None:
        self._handles = handles
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, int], list[_Structure]] = OrderedDict()

    def find(self, file: ReadableFile, format: str, size: int) -> Optional[CheckpointIndex]:
        """The index of a file with a known structure, or None.

        Raises:
            OSError: reading failed.
        """
        with self._lock:
            structures = tuple(self._known.get((format, size), ()))
        for structure in structures:
            try:
                reads = structure.reads(self._handles)
            except (OSError, RetryableError):
                # The example vanished: parse this file instead. The example's reader reports that error.
                continue
            contents = read_each(file, [(expected.offset, expected.length) for expected in reads])
            if all(expected.matches(data) for expected, data in zip(reads, contents)):
                crc = structure.example.crc
                if crc is not None and format == "ckpt":
                    trailer = read_range(file, size - TRAILER_SIZE, TRAILER_SIZE)
                    if not trailer.startswith(CRC_MARK):
                        continue
                    crc = int.from_bytes(trailer[len(CRC_MARK) :], "big")
                example = structure.example
                return CheckpointIndex(file.path, format, size, example.tensors, crc, example.metadata)
        return None

    def add(self, file: ReadableFile, index: CheckpointIndex) -> None:
        """Add the structure of a file.

        Raises:
            OSError: its status cannot be read.
        """
        status = file.status()
        with self._lock:
            structures = self._known.setdefault((index.format, index.size), [])
            self._known.move_to_end((index.format, index.size))
            structures.insert(0, _Structure(index, status))
            del structures[_MOST_STRUCTURES:]
            if len(self._known) > _MOST_STRUCTURES:
                self._known.popitem(last=False)


def _gaps(index: CheckpointIndex, near: int) -> Iterator[tuple[int, int, array[int], array[int]]]:
    """Reads that cover all bytes but tensor contents: offset and length, starts and sizes of the parts in it.

    A read includes gaps of up to ``near`` bytes.
    """
    first = last = 0
    starts, sizes = array("Q"), array("Q")
    for start, stop in _between(index):
        if starts and not (start - last <= near and stop - first <= _MOST_AT_ONCE):
            yield first, last - first, starts, sizes
            starts, sizes = array("Q"), array("Q")
        if not starts:
            first = start
        starts.append(start - first)
        sizes.append(stop - start)
        last = stop
    if starts:
        yield first, last - first, starts, sizes


def _between(index: CheckpointIndex) -> Iterator[tuple[int, int]]:
    """Ranges without tensor contents, in pieces of limited size."""
    end = index.size - (TRAILER_SIZE if index.crc is not None and index.format == "ckpt" else 0)
    position = 0
    for offset, size in itertools.chain(index.extents(), [(end, 0)]):
        for start in range(position, offset, _MOST_AT_ONCE):
            yield start, min(start + _MOST_AT_ONCE, offset)
        position = offset + size
