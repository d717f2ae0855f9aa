"""Reading open files that anybody may have written, or may be writing.

A read that gives less than the file has is read on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Optional, Protocol

from reshard.errors import RetryableError
from reshard.storage.status import FileStatus

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

    def status(self) -> FileStatus:
        """What its store says of it."""

    def read(self, offset: int, count: int) -> bytes:
        """Bytes from an offset on: as many as a read gives, none at the end.

        Raises:
            ReshardError: what it holds cannot be told from its bytes.
            OSError: reading failed.
        """

    def read_into(self, offset: int, out: memoryview) -> int:
        """Likewise into ``out``, from its beginning; how many."""


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


def read_each(file: ReadableFile, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """Several (offset, bytes) ranges of an open file, all of which it has, in their order.

    Where every read takes a round trip they are read at the same time, else one by one, as they are taken.

    Raises:
        ReshardError, OSError: as `read_range`.
    """
    many = getattr(file, "read_each", None)
    if many is not None and len(ranges) > 1:
        return iter(many(ranges))
    return (read_range(file, offset, count) for offset, count in ranges)


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
