"""Target files: written once under a temporary name, flushed to disk, renamed.

A temporary file lies in the target's own directory, so that renaming it is atomic, and is locked by
the process that writes it. One whose lock can be had belongs to a run that is dead, and the next run
removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import threading
from typing import Optional

import numpy as np
import numpy.typing as npt

from reshard.errors import RetryableError
from reshard.plan.pieces import TargetFile

TEMPORARY_MARK = ".reshard-tmp-"


class TargetWriter:
    """One target file while it is being written; several threads may write parts of it.

    Args:
        target: what is written.
    """

    def __init__(self, target: TargetFile) -> None:
        self.target = target
        self._fd: Optional[int] = None
        self._temporary = ""
        self._lock = threading.Lock()
        self._open_parts = 0
        self._sealed = False
        self._closed = False
        self._made_directory = False

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
        """Write bytes at an offset of the file.

        Raises:
            RetryableError: the bytes cannot be written; names file and rank.
        """
        try:
            fd = self._open()
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], offset + done)
        except OSError as error:
            raise self._error(error) from error

    def commit(self) -> None:
        """Flush the file to disk and give it its final name.

        Raises:
            RetryableError: it cannot be done; names file and rank.
        """
        directory = os.path.dirname(self.target.path) or "."
        try:
            fd = self._open()
            written = os.fstat(fd).st_size
            if written != self.target.layout.size:
                raise RetryableError(
                    f"{self.target.path}: {written} bytes were written where {self.target.layout.size} were planned "
                    f"(rank {self.target.rank})",
                    file=self.target.path,
                    rank=self.target.rank,
                )
            os.fsync(fd)
            os.rename(self._temporary, self.target.path)
            self._temporary = ""
            sync_directory(directory)
        except OSError as error:
            raise self._error(error) from error
        finally:
            self.discard()

    def discard(self) -> None:
        """Close the file, and remove it if it was not committed."""
        with self._lock:
            self._closed = True
            fd, self._fd = self._fd, None
            temporary, self._temporary = self._temporary, ""
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
                if self._made_directory:
                    os.rmdir(os.path.dirname(temporary))
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _open(self) -> int:
        with self._lock:
            if self._fd is not None:
                return self._fd
            if self._closed:
                raise OSError(errno.ECANCELED, "was given up")
            directory, name = os.path.split(self.target.path)
            directory = directory or "."
            self._made_directory = not os.path.isdir(directory)
            os.makedirs(directory, exist_ok=True)
            remove_dead_temporaries(directory, name)
            temporary = os.path.join(directory, f".{name}{TEMPORARY_MARK}{secrets.token_hex(6)}")
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self._fd, self._temporary = fd, temporary
            lock(fd)
            return fd

    def _error(self, error: OSError) -> RetryableError:
        what = "no space is left" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "cannot be written"
        return RetryableError(
            f"{self.target.path}: {what} (rank {self.target.rank}): {error.strerror or error}",
            file=self.target.path,
            rank=self.target.rank,
        )


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

    def put(self, data: bytes) -> None:
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


def lock(fd: int) -> None:
    """Mark an open file as in use, as far as the file system can."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_dead_temporaries(directory: str, name: str) -> None:
    """Remove temporary files of ``name`` that no living process is writing."""
    start = f".{name}{TEMPORARY_MARK}"
    for entry in os.listdir(directory):
        if not entry.startswith(start):
            continue
        path = os.path.join(directory, entry)
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(fd)


def sync_directory(path: str) -> None:
    """Make a rename in a directory last through a crash."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems cannot flush a directory; their rename is synchronous.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)
