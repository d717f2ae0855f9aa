"""Directories of file systems: making and flushing them."""

from __future__ import annotations

import errno
import os

OWN = ".reshard"
"""The directory of all records in a target directory."""


def make(path: str) -> bool:
    """Make a directory and its missing parents; whether it was missing.

    Raises:
        OSError: it cannot be made.
    """
    if os.path.isdir(path):
        return False
    try:
        os.makedirs(path, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from error
    return True


def sync(path: str) -> None:
    """Make creations and renames in a directory survive a crash.

    Raises:
        OSError: it cannot be flushed.
    """
    fd = os.open(path or os.curdir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems cannot flush a directory; they flush it themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)
