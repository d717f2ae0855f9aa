"""Target files: written once under a temporary name, renamed when they are complete, on disk and recorded."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import threading
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence

from reshard.errors import ReshardError, RetryableError, UnwritableError, UsageError
from reshard.plan.pieces import TargetFile
from reshard.storage import FileStatus, NewFile, Sending, new_file, writing, writing_error

# The polynomial of CRC-32 (ISO-HDLC) with its bits in reverse, x**31 in the lowest bit.
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_X_TO_8 = 1 << 23
_CRC_BYTES = 4
_NOWHERE = -1

Checksum = tuple[int, int, int]
"""Of a piece of a file: offset, bytes, CRC-32."""

Finish = Callable[[TargetFile, FileStatus, int | None], None]
"""Receives a target whose bytes are on disk, its status and CRC-32, before it gets its final name."""


class TargetWriter:
    """One target file while it is being written; several threads may write parts of it.

    Args:
        finish: called when its bytes are on disk, before it gets its name.
        checksum: compute a CRC-32 of the whole file on the way, and fill in the CRCs inside it.
        sending: sends its parts, if its store takes files in parts.
        file: the open file, if another process has created it.
        allocated: allocate its space first if possible, so that it is `mapped`.
        mapped: whether another process has allocated its space.

    Attributes:
        error: the error after which the file is not finished; other files can still be.
        checksums: offset, bytes and CRC-32 of each write; None if they are not computed.
        mapped: whether the file has all of its space on disk, so that it is written through maps.
    """

    def __init__(
        self,
        target: TargetFile,
        finish: Finish | None,
        checksum: bool = False,
        sending: Sending | None = None,
        file: NewFile | None = None,
        allocated: bool = False,
        mapped: bool = False,
    ) -> None:
        self.target = target
        self._finish = finish
        self._sending = sending
        self._allocated = allocated
        self.checksums: list[Checksum] | None = [] if checksum else None
        # Ends of parts with a CRC of their own.
        entries = target.layout.entries if checksum else ()
        self._ends = array("Q", (end for entry in entries for end in (entry.start, entry.stop)))
        self.written = 0
        self.mapped = mapped
        self._file = file
        self._lock = threading.Lock()
        self._closed = False
        # Threads that are writing: the file is closed after the last, because the system could give the number of its
        # descriptor to another file while they write.
        self._users = 0
        self.error: ReshardError | None = None

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset of the file; nothing once `error` is set.

        Raises:
            UnwritableError: the bytes cannot be written, nor those of other files; names file and rank.
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
        """Count bytes that are in the file."""
        checksums = [] if self.checksums is None else self._checksums_of(offset, data)
        with self._lock:
            self.written += len(data)
            if self.checksums is not None:
                self.checksums += checksums

    def _checksums_of(self, offset: int, data: memoryview) -> list[Checksum]:
        """The checksums of written bytes; no piece crosses the end of an entry."""
        ends = self._ends
        first, last = bisect_right(ends, offset), bisect_left(ends, offset + len(data))
        bounds = [0, *(end - offset for end in ends[first:last]), len(data)]
        return [
            (offset + start, stop - start, zlib.crc32(data[start:stop])) for start, stop in itertools.pairwise(bounds)
        ]

    def window(self, offset: int, count: int) -> memoryview:
        """A writable map of a range of the file, which is `mapped`.

        Raises:
            UnwritableError: it cannot be mapped, nor can other files.
            RetryableError: it cannot be mapped.
        """
        with writing(self.target.path, rank=self.target.rank), self._used() as file:
            return file.window(offset, min(count, self.target.layout.size - offset))

    @contextlib.contextmanager
    def handed_out(self) -> Iterator[int | None]:
        """A descriptor of the file, for workers that write to it while the block runs; None once `error` is set.

        Raises:
            UnwritableError: it cannot be written, nor can other files.
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
        """Create the file, unless it exists or `error` is set.

        Raises:
            UnwritableError: it cannot be written, nor can other files.
        """
        with self.handed_out():
            pass

    def adopt(self, nbytes: int, checksums: list[Checksum] | None, error: ReshardError | None) -> None:
        """Add the `result` of a worker that has written a part."""
        if error is not None:
            self.fail(error)
        with self._lock:
            self.written += nbytes
            if self.checksums is not None:
                self.checksums += checksums or ()

    @property
    def result(self) -> tuple[int, list[Checksum] | None, ReshardError | None]:
        """Bytes written, their checksums, and the error after which the file is not finished."""
        return self.written, self.checksums, self.error

    def commit(self) -> None:
        """Flush the file to disk and give it its final name, unless `error` is set or is set by it.

        Raises:
            UnwritableError: it cannot be written, nor can other files; names file and rank.
            TargetError: another file was written in its place meanwhile.
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
        # An allocated file has its size from the beginning, so written bytes are counted, too.
        planned = self.target.layout.size
        crc = None if self.checksums is None or self.written != planned else self._crc(file, sorted(self.checksums))
        status = file.finish()
        if status.size != planned or self.written != planned:
            size = status.size if status.size != planned else self.written
            raise RetryableError(
                f"{self.target.path}: {size} bytes were written where {planned} were planned",
                file=self.target.path,
                rank=self.target.rank,
            )
        if self._finish is not None:
            self._finish(self.target, status, crc)
        file.publish()

    def _crc(self, file: NewFile, pieces: Sequence[Checksum]) -> int:
        """The CRC-32 of the file, with the CRCs that it holds, which are filled in."""
        layout = self.target.layout
        crcs: list[tuple[int, bytes]] = []
        number = 0
        for start, stop, places in layout.entries if file.rewritable else ():
            number = bisect_left(pieces, (start,), number)
            last = bisect_left(pieces, (stop,), number)
            crc = joined_crc(pieces[number:last], start).to_bytes(_CRC_BYTES, "little")
            crcs += [(place, crc) for place in places]
        # The change of the file's CRC up to a position. An archive of several tensors has all CRCs again at its end.
        change = position = 0
        for place, crc in sorted(crcs):
            file.write(place, memoryview(crc))
            end = place + _CRC_BYTES
            change = _times(change, _shift(end - position)) ^ zlib.crc32(crc) ^ zlib.crc32(bytes(_CRC_BYTES))
            position = end
        return joined_crc(pieces) ^ _times(change, _shift(layout.size - position))

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
        """The file, created at the first use; it is not closed while the block runs.

        Raises:
            OSError: it cannot be created, or was discarded.
        """
        with self._lock:
            if self._closed:
                raise OSError(errno.ECANCELED, "was given up")
            if self._file is None:
                size = self.target.layout.size
                self._file = new_file(self.target.path, size, self._sending)
                self.mapped = self._allocated and self._file.allocate(size)
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
        """Discard the file because of an error; later errors are ignored."""
        with self._lock:
            if self.error is None:
                self.error = error
        self.discard()

    def _fail(self, error: OSError) -> None:
        failure = writing_error(self.target.path, error, rank=self.target.rank)
        if isinstance(failure, (UnwritableError, UsageError)) or error.errno == errno.EROFS:
            # No other file can be written.
            raise failure from error
        self.fail(failure)


class PartBuffer:
    """Collects a part of a target file in order, and writes it in large requests.

    Callers fill the memory that `reserve` returns, so nothing is copied once more. The kernel lets one thread at a time
    write to a file, so with many writers this memory is a map of the file. The file has all of its space on disk by
    then: a full disk is an error, not a signal.
    """

    def __init__(self, memory: memoryview, writer: TargetWriter) -> None:
        self.size = len(memory)
        """Bytes that can be reserved at once."""
        self._memory = memory[:0] if writer.mapped else memory
        # The room that was reserved last at the beginning: equal rooms are one object, whose places are cached.
        self._first = memory[:0]
        self._used = 0
        self._offset = _NOWHERE
        self.writer = writer

    def reserve(self, count: int) -> memoryview:
        """The next ``count`` bytes of the file, at most `size`, to be filled by the caller."""
        if self._used + count > len(self._memory):
            self.flush()
            if self.writer.mapped:
                self._memory = self.writer.window(self._offset, self.size)
                self._first = self._memory[:0]
        room = self._first
        if self._used or len(room) != count:
            room = self._memory[self._used : self._used + count]
            if not self._used:
                self._first = room
        self._used += count
        return room

    @property
    def position(self) -> int:
        return self._offset + self._used

    @property
    def pending(self) -> int:
        """Bytes that are collected and not yet written."""
        return self._used

    def expect(self, offset: int) -> None:
        """Begin at this offset of the file, or check that the next byte belongs there.

        Segments in a wrong order would not change the size of the file, so they end the run.
        """
        if self._offset == _NOWHERE:
            self._offset = offset
        if self.position != offset:
            raise RuntimeError(f"bytes of offset {offset} would be written at {self.position}")

    def put(self, data: memoryview) -> None:
        for start in range(0, len(data), self.size):
            part = data[start : start + self.size]
            self.reserve(len(part))[:] = part

    def flush(self) -> None:
        if self._used:
            data = self._memory[: self._used]
            if self.writer.mapped:
                self.writer.wrote(self._offset, data)
                self._memory = data[:0]
            else:
                self.writer.write(self._offset, data)
            self._offset += self._used
            self._used = 0


def joined_crc(pieces: Iterable[tuple[int, int, int]], position: int = 0) -> int:
    """The CRC-32 of joined pieces, such as those of a file that several threads write.

    A CRC is a remainder of polynomials over GF(2). The CRC of two joined pieces is that of the first, times x to the
    number of bits of the second, plus that of the second.

    Args:
        pieces: (offset, bytes, CRC-32) of each, without gaps, in any order.
        position: offset of the first.

    Raises:
        ValueError: there is a gap or an overlap.
    """
    crc = 0
    for offset, length, piece_crc in sorted(pieces):
        if offset != position:
            raise ValueError(f"bytes {position} to {offset} have no checksum")
        crc = _times(crc, _shift(length)) ^ piece_crc
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


def _times(first: int, second: int) -> int:
    """The product of two polynomials modulo that of CRC-32."""
    product = 0
    bit = _ONE
    while bit:
        if first & bit:
            product ^= second
        second = second >> 1 ^ (_POLYNOMIAL if second & 1 else 0)
        bit >>= 1
    return product
