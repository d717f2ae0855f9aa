"""Target files: written once, seen by nobody until they are whole, on disk or in their store, and recorded."""

from __future__ import annotations

import contextlib
import errno
import threading
import zlib
from collections.abc import Iterator
from typing import Callable, Optional

import numpy as np
import numpy.typing as npt

from reshard.errors import ReshardError, RetryableError, UnwritableError, UsageError
from reshard.execute.checksum import joined_crc
from reshard.plan.pieces import TargetFile
from reshard.storage import Expected, FileStatus, NewFile, Sending, new_file, writing_error

Finish = Callable[[TargetFile, FileStatus, Optional[int], bool], None]
"""Told of a target whose bytes are on disk, before it gets its name and after: status, CRC-32, which."""

Expect = Callable[[TargetFile], Optional[Expected]]
"""Says what a target may replace; None for anything."""


class TargetWriter:
    """One target file while it is being written; several threads may write parts of it.

    Args:
        target: what is written.
        finish: called when its bytes are on disk, before it gets its name and after.
        checksum: compute a CRC-32 of the whole file on the way.
        expected: what it may replace; None for anything.
        sending: sends its parts, where its store takes files in parts.

    Attributes:
        error: why the file was given up, if it was; others can still be finished.
    """

    def __init__(
        self,
        target: TargetFile,
        finish: Finish,
        checksum: bool = False,
        expected: Optional[Expected] = None,
        sending: Optional[Sending] = None,
    ) -> None:
        self.target = target
        self._finish = finish
        self._expected = expected
        self._sending = sending
        self._checksums: Optional[list[tuple[int, int, int]]] = [] if checksum else None
        self._file: Optional[NewFile] = None
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
        if self._checksums is not None:
            self._checksums.append((offset, len(data), zlib.crc32(data)))

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
        if status.size != self.target.layout.size:
            raise RetryableError(
                f"{self.target.path}: {status.size} bytes were written where {self.target.layout.size} were planned "
                f"(rank {self.target.rank})",
                file=self.target.path,
                rank=self.target.rank,
            )
        crc = None if self._checksums is None else joined_crc(self._checksums)
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

    What is asked for with `reserve` is filled in place, so nothing is copied on its way out.
    """

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        """Args: memory: the buffer, at least one byte."""
        self._memory: memoryview = memory.data
        self._used = 0
        self._offset = 0
        self._writer: Optional[TargetWriter] = None

    @property
    def size(self) -> int:
        """Bytes that can be reserved at once."""
        return len(self._memory)

    def start(self, writer: TargetWriter, offset: int) -> None:
        """Begin a part of a file at an offset."""
        self._writer, self._offset, self._used = writer, offset, 0

    def reserve(self, count: int) -> memoryview:
        """The next ``count`` bytes of the file, at most `size`, to be filled by the caller."""
        if self._used + count > len(self._memory):
            self.flush()
        room = self._memory[self._used : self._used + count]
        self._used += count
        return room

    @property
    def position(self) -> int:
        """Where in the file the next byte goes."""
        return self._offset + self._used

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
            assert self._writer is not None
            self._writer.write(self._offset, self._memory[: self._used])
            self._offset += self._used
            self._used = 0
