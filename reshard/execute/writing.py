"""Target files: written once, seen by nobody until they are whole, on disk or in their store, and recorded."""

from __future__ import annotations

import contextlib
import errno
import functools
import threading
import zlib
from collections.abc import Iterable, Iterator
from typing import Callable, NamedTuple, Optional

import numpy as np
import numpy.typing as npt

from reshard.errors import ReshardError, RetryableError, UnwritableError, UsageError
from reshard.plan.pieces import TargetFile
from reshard.storage import Expected, FileStatus, NewFile, Sending, new_file, writing_error

# The polynomial of CRC-32 (ISO-HDLC) with its bits in reverse, x**31 in the lowest bit.
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_X_TO_8 = 1 << 23

Checksum = tuple[int, int, int]
"""Of a piece of a file: where it begins, bytes, CRC-32."""

Finish = Callable[[TargetFile, FileStatus, Optional[int], bool], None]
"""Told of a target whose bytes are on disk, before it gets its name and after: status, CRC-32, which."""

Expect = Callable[[TargetFile], Optional[Expected]]
"""Says what a target may replace; None for anything."""


class PartDone(NamedTuple):
    """What came of a part of a file.

    Attributes:
        written: bytes.
        checksums: of them.
        error: why the file was given up, if it was.
    """

    written: int
    checksums: Optional[list[Checksum]]
    error: Optional[ReshardError]


class TargetWriter:
    """One target file while it is being written; several threads may write parts of it.

    Args:
        target: what is written.
        finish: called when its bytes are on disk, before it gets its name and after.
        checksum: compute a CRC-32 of the whole file on the way.
        expected: what it may replace; None for anything.
        sending: sends its parts, where its store takes files in parts.
        file: the file, where it has been made.
        allocated: give it all of its room first where that can be done, so that it is `mapped`.
        mapped: whether another has done so.
        copies: whether its file system copies ranges of files, where another has looked.

    Attributes:
        error: why the file was given up, if it was; others can still be finished.
        checksums: of what was written: offset, bytes, CRC-32; None where they are not computed.
        written: bytes that were written.
        mapped: whether the file has all of its room on disk, so that it is written through maps.
        copies: whether its file system copies ranges of files; not where checksums are computed on the way.
    """

    def __init__(
        self,
        target: TargetFile,
        finish: Finish,
        checksum: bool = False,
        expected: Optional[Expected] = None,
        sending: Optional[Sending] = None,
        file: Optional[NewFile] = None,
        allocated: bool = False,
        mapped: bool = False,
        copies: bool = False,
    ) -> None:
        self.target = target
        self._finish = finish
        self._expected = expected
        self._sending = sending
        self._allocated = allocated
        self.checksums: Optional[list[Checksum]] = [] if checksum else None
        self.written = 0
        self.mapped = mapped
        self.copies = copies
        self._file = file
        self._lock = threading.Lock()
        self._open_parts = 0
        self._sealed = False
        self._closed = False
        # Threads that are writing at this moment: the file is closed when none is, because the number of its
        # descriptor would else be given to another one under their hands.
        self._users = 0
        self.error: Optional[ReshardError] = None

    def add_part(self) -> None:
        """A part will be written."""
        with self._lock:
            self._open_parts += 1

    def seal(self) -> None:
        """No more parts will be added."""
        with self._lock:
            self._sealed = True

    def part_done(self) -> bool:
        """A part is written; whether it was the last one."""
        with self._lock:
            self._open_parts -= 1
            return self._sealed and self._open_parts == 0

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset of the file; nothing once `error` is set.

        Raises:
            UnwritableError: the bytes cannot be written, and no other file's could; names file and rank.
        """
        if self.error is not None:
            return
        try:
            with self._used() as file:
                file.write(offset, data)
        except OSError as error:
            self._fail(error)
            return
        self.wrote(offset, data)

    def wrote(self, offset: int, data: memoryview) -> None:
        """These bytes are in the file."""
        crc = None if self.checksums is None else zlib.crc32(data)
        with self._lock:
            self.written += len(data)
            if self.checksums is not None and crc is not None:
                self.checksums.append((offset, len(data), crc))

    def copy(self, descriptor: int, start: int, offset: int, count: int) -> bool:
        """Have the file system copy a range of another file to an offset; whether it could.

        Raises:
            OSError: it could not.
        """
        with self._used() as file:
            return file.copy(descriptor, start, offset, count)

    def copied(self, count: int) -> None:
        """So many bytes were copied to the file."""
        with self._lock:
            self.written += count

    def window(self, offset: int, count: int) -> memoryview:
        """A map of a range of the file, which is `mapped`, to write it through.

        Raises:
            UnwritableError: there is none, and of no other file there would be.
            RetryableError: there is none.
        """
        try:
            with self._used() as file:
                return file.window(offset, min(count, self.target.layout.size - offset))
        except OSError as error:
            raise writing_error(self.target.path, error, rank=self.target.rank) from error

    @contextlib.contextmanager
    def handed_out(self) -> Iterator[Optional[int]]:
        """A descriptor of the file, for workers that write to it while the block runs; None once `error` is set.

        Raises:
            UnwritableError: it cannot be written, and no other file could.
        """
        with contextlib.ExitStack() as stack:
            descriptor = None
            if self.error is None:
                try:
                    descriptor = stack.enter_context(self._used()).descriptor
                except OSError as error:
                    self._fail(error)
            yield descriptor

    def begin(self) -> None:
        """Make the file, unless it is there or `error` is set.

        Raises:
            UnwritableError: it cannot be written, and no other file could.
        """
        with self.handed_out():
            pass

    def adopt(self, done: PartDone) -> None:
        """What came of a part that a worker has written."""
        if done.error is not None:
            self.fail(done.error)
        with self._lock:
            self.written += done.written
            if self.checksums is not None:
                self.checksums += done.checksums or ()

    @property
    def done(self) -> PartDone:
        """What came of all parts that this has written."""
        return PartDone(self.written, self.checksums, self.error)

    def commit(self) -> None:
        """Flush the file to disk and give it its final name, unless `error` is set or is set by it.

        Raises:
            UnwritableError: it cannot be done, and with no other file could; names file and rank.
            TargetError: a file has come to stand in its place.
        """
        if self.error is not None:
            return
        try:
            with self._used() as file:
                self._publish(file)
        except OSError as error:
            self._fail(error)
        finally:
            self.discard()

    def _publish(self, file: NewFile) -> None:
        status = file.finish()
        # A file that got its room first has its size whatever was written to it; bytes that were written twice are no
        # substitute for others.
        planned = self.target.layout.size
        if status.size != planned or self.written != planned:
            size = status.size if status.size != planned else self.written
            raise RetryableError(
                f"{self.target.path}: {size} bytes were written where {planned} were planned (rank {self.target.rank})",
                file=self.target.path,
                rank=self.target.rank,
            )
        crc = None if self.checksums is None else joined_crc(self.checksums)
        self._finish(self.target, status, crc, False)
        another = file.publish()
        self._finish(self.target, another or status, crc, True)

    def discard(self) -> None:
        """Close the file, and remove it if it was not committed."""
        with self._lock:
            self._closed = True
            file = self._file
            self._users += 1
        try:
            if file is not None:
                file.discard()
        finally:
            self._leave()

    @contextlib.contextmanager
    def _used(self) -> Iterator[NewFile]:
        """The file, made when it is first asked for; not closed while the block runs.

        Raises:
            OSError: there is none.
        """
        with self._lock:
            if self._closed:
                raise OSError(errno.ECANCELED, "was given up")
            if self._file is None:
                size = self.target.layout.size
                self._file = new_file(self.target.path, size, self._expected, self._sending)
                self.mapped = self._allocated and self._file.allocate(size)
                self.copies = self.checksums is None and self._file.copies
            file = self._file
            self._users += 1
        try:
            yield file
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            idle, self._file = (self._file, None) if self._closed and not self._users else (None, self._file)
        if idle is not None:
            idle.close()

    def fail(self, error: ReshardError) -> None:
        """Give the file up; the first reason counts."""
        with self._lock:
            if self.error is None:
                self.error = error
        self.discard()

    def _fail(self, error: OSError) -> None:
        said = writing_error(self.target.path, error, rank=self.target.rank)
        if isinstance(said, (UnwritableError, UsageError)) or error.errno == errno.EROFS:
            # No other file would fare better.
            raise said from error
        self.fail(said)


class PartBuffer:
    """Collects a part of a target file in order, and writes it in large requests.

    What is asked for with `reserve` is filled in place, so nothing is copied on its way out. While many write to one
    file, the kernel lets one write at a time: then what is filled is the file itself, in a map. It has all of its
    room on disk by then, so that a full disk is an error and no signal.

    Args:
        memory: the buffer, at least one byte.
        writer: of the file.
        offset: where in it the part begins.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], writer: TargetWriter, offset: int) -> None:
        self.size = len(memory)
        """Bytes that can be reserved at once."""
        self._memory: memoryview = memory[:0].data if writer.mapped else memory.data
        self._used = 0
        self._offset = offset
        self.writer = writer

    def reserve(self, count: int) -> memoryview:
        """The next ``count`` bytes of the file, at most `size`, to be filled by the caller."""
        if self._used + count > len(self._memory):
            self.flush()
            if self.writer.mapped:
                self._memory = self.writer.window(self._offset, self.size)
        room = self._memory[self._used : self._used + count]
        self._used += count
        return room

    @property
    def position(self) -> int:
        """Where in the file the next byte goes."""
        return self._offset + self._used

    def skip(self, count: int) -> None:
        """The next ``count`` bytes were copied to the file; after `flush`."""
        self.writer.copied(count)
        self._offset += count

    def expect(self, offset: int) -> None:
        """Insist that what comes next belongs at this offset of the file.

        A mistake in the order of segments would keep the size and so pass unseen; it ends the run.
        """
        if self.position != offset:
            raise RuntimeError(f"bytes for offset {offset} came at {self.position}")

    def put(self, data: memoryview) -> None:
        """Append bytes."""
        for start in range(0, len(data), self.size):
            part = data[start : start + self.size]
            self.reserve(len(part))[:] = part

    def flush(self) -> None:
        """Write what was collected."""
        if self._used:
            data = self._memory[: self._used]
            if self.writer.mapped:
                self.writer.wrote(self._offset, data)
                self._memory = data[:0]
            else:
                self.writer.write(self._offset, data)
            self._offset += self._used
            self._used = 0


def joined_crc(pieces: Iterable[tuple[int, int, int]]) -> int:
    """The CRC-32 of pieces put together, such as those of a file that several threads write.

    A CRC is a remainder of polynomials over GF(2), so the CRC of a concatenation follows from those of its parts: the
    first one times x to the number of bits behind it, plus the second one.

    Args:
        pieces: (offset, bytes, CRC-32) of each, without gaps from offset 0, in any order.

    Raises:
        ValueError: there is a gap or an overlap.
    """
    crc = position = 0
    for offset, length, own in sorted(pieces):
        if offset != position:
            raise ValueError(f"bytes {position} to {offset} have no checksum")
        crc = _times(crc, _shift(length)) ^ own
        position += length
    return crc


@functools.lru_cache(maxsize=1024)
def _shift(length: int) -> int:
    """X to the number of bits in ``length`` bytes."""
    power, factor = _ONE, _X_TO_8
    while length:
        if length & 1:
            power = _times(power, factor)
        factor = _times(factor, factor)
        length >>= 1
    return power


def _times(one: int, other: int) -> int:
    """The product of two polynomials modulo that of CRC-32."""
    product = 0
    bit = _ONE
    while bit:
        if one & bit:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
        bit >>= 1
    return product
