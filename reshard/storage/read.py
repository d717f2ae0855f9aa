"""Reading files that anybody may have written, or may be writing.

What is no regular file is never waited for, a small file has a bound, and a read that gives less than
the file has is read on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple, Optional, Protocol

from reshard.errors import RetryableError

# Reads in which nothing came, though the file has more.
_TIMES = 3


class UnfitError(ValueError):
    """A file is not what it should be; the text goes on after its name, as in ``is larger than ...``."""


class ReadableFile(Protocol):
    """A file that is open for reading, whatever its bytes go through on the way.

    Offsets and sizes count bytes of what it holds. Any number of threads may read at a time.
    """

    @property
    def path(self) -> str:
        """Its name, for messages."""

    @property
    def descriptor(self) -> Optional[int]:
        """What to map into memory; None where the bytes do not lie in a file as they are read."""

    @property
    def cipher(self) -> Optional[str]:
        """How its bytes are encrypted where they lie, in MindSpore's words; None where they are not."""

    def size(self) -> int:
        """Bytes that it has at this moment."""

    def status(self) -> os.stat_result:
        """What the file system says of it."""

    def read(self, offset: int, count: int) -> bytes:
        """Bytes from an offset on: as many as a read gives, none at the end.

        Raises:
            ReshardError: what it holds cannot be told from its bytes.
            OSError: reading failed.
        """

    def read_into(self, offset: int, out: memoryview) -> int:
        """Likewise into ``out``, from its beginning; how many."""


class LocalFile(NamedTuple):
    """A file that is read through a descriptor.

    Attributes:
        descriptor: open for reading; its position is not used.
        path: its name, for messages.
    """

    descriptor: int
    path: str

    @property
    def cipher(self) -> Optional[str]:
        """None: its bytes are read as they lie."""
        return None

    def size(self) -> int:
        """Bytes that it has at this moment."""
        return os.fstat(self.descriptor).st_size

    def status(self) -> os.stat_result:
        """What the file system says of it."""
        return os.fstat(self.descriptor)

    def read(self, offset: int, count: int) -> bytes:
        """Bytes from an offset on: as many as a read gives, none at the end."""
        return os.pread(self.descriptor, count, offset)

    def read_into(self, offset: int, out: memoryview) -> int:
        """Likewise into ``out``, from its beginning; how many."""
        return os.preadv(self.descriptor, [out], offset)


@contextlib.contextmanager
def opened_regular(path: str, through_links: bool = True) -> Iterator[LocalFile]:
    """A regular file, open for reading while the block runs.

    Args:
        path: the file.
        through_links: it may be a symbolic link to one.

    Raises:
        UnfitError: it is something else.
        OSError: it is not there, or cannot be opened.
    """
    try:
        # To open a FIFO waits for its writer, and to open a device may do anything.
        _check_regular(os.stat(path) if through_links else os.lstat(path))
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        fd = os.open(path, flags | (0 if through_links else os.O_NOFOLLOW))
    except ValueError as error:
        if isinstance(error, UnfitError):
            raise
        # A name with a NUL, or one that cannot be encoded: no file has it.
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
    try:
        _check_regular(os.fstat(fd))
        yield LocalFile(fd, path)
    finally:
        os.close(fd)


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UnfitError("is a directory" if stat.S_ISDIR(status.st_mode) else "is not a regular file")


def read_small(path: str, most: int, through_links: bool = True) -> bytes:
    """The content of a small file.

    Args:
        path: the file.
        most: bytes that it may have.
        through_links: it may be a symbolic link to one.

    Raises:
        UnfitError: it is no regular file, or larger.
        RetryableError: it does not give what it has.
        OSError: it is not there, or cannot be read.
    """
    with opened_regular(path, through_links) as file:
        size = file.size()
        if size > most:
            raise UnfitError(f"is larger than any such file: it has {size:,} bytes, and {most:,} are allowed")
        return read_range(file, 0, size)


def read_range(file: ReadableFile, offset: int, least: int, most: Optional[int] = None) -> bytes:
    """Bytes of an open file from an offset on.

    A read may give less than was asked for, on network file systems above all, and that says nothing of
    the file: it is read on, and what stays missing is an error that may pass, never damage.

    Args:
        file: the file.
        offset: where to begin.
        least: bytes that the file had there when it was opened; all of them are read.
        most: bytes to ask for.

    Raises:
        RetryableError: the file became shorter, or does not give what it has.
        OSError: reading failed.
    """
    data = file.read(offset, max(least, most or 0))
    idle = 0
    while len(data) < least:
        more = file.read(offset + len(data), least - len(data))
        data += more
        if more:
            continue
        idle += 1
        if file.size() < offset + least:
            raise cut_short(file.path)
        if idle == _TIMES:
            raise RetryableError(
                f"{file.path}: cannot be read: it gives {len(data)} bytes at byte {offset}, and has {least}",
                file=file.path,
            )
    return data


def fill(file: ReadableFile, offset: int, out: memoryview, rank: Optional[int] = None) -> None:
    """Fill ``out`` with the bytes of an open file from an offset on.

    Args:
        file: the file, which had these bytes when it was opened.
        offset: where to begin.
        out: where they go.
        rank: whose file it is, for messages.

    Raises:
        RetryableError: the file became shorter.
        OSError: reading failed.
    """
    done = 0
    while done < len(out):
        count = file.read_into(offset + done, out[done:])
        if count == 0:
            raise cut_short(file.path, rank)
        done += count


def cut_short(path: str, rank: Optional[int] = None) -> RetryableError:
    """The error to show for a file that ended earlier than when it was opened."""
    whose = f" (rank {rank})" if rank is not None else ""
    return RetryableError(
        f"{path}: became shorter while it was read{whose}",
        file=path,
        rank=rank,
        hint="wait until nothing writes the source any more, then give the same command again",
    )
