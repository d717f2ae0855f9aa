"""Opening files that anybody may have put there: what is no regular file is never waited for.

A small file has a bound.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from reshard.storage.read import ReadableFile, UnfitError, read_range
from reshard.storage.status import FileStatus
from reshard.storage.store import in_object_store, store_of


@contextlib.contextmanager
def opened_regular(path: str, through_links: bool = True) -> Iterator[ReadableFile]:
    """A regular file, open for reading while the block runs.

    Args:
        path: the file.
        through_links: it may be a symbolic link to one.

    Raises:
        UnfitError: it is something else.
        OSError: it is not there, or cannot be opened.
    """
    store = store_of(path)
    try:
        if not in_object_store(path):
            # To open a FIFO waits for its writer, and to open a device may do anything.
            _check_regular(store.status(path, through_links))
        file = store.open(path, through_links)
    except IsADirectoryError as error:
        raise UnfitError("is a directory") from error
    except ValueError as error:
        if isinstance(error, UnfitError):
            raise
        # A name with a NUL, or one that cannot be encoded: no file has it.
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
    try:
        _check_regular(file.status())
        yield file
    finally:
        file.close()


def _check_regular(status: FileStatus) -> None:
    if not status.regular:
        raise UnfitError("is a directory" if status.directory else "is not a regular file")


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
