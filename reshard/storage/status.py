"""What a store says of what lies at a path."""

from __future__ import annotations

import os
import stat
from typing import NamedTuple


class FileStatus(NamedTuple):
    """A file or directory as a store knows it without reading it.

    Attributes:
        regular: whether it is a regular file, which an object is.
        directory: whether it is a directory; in an object store, whether any key begins so.
        size: bytes.
        modified: time of last modification, in nanoseconds. Writers can set it, and copies have others.
        changed: what becomes another with every change: the time of last change, of attributes and names too, in
            nanoseconds; of an object a digest of its ETag.
        device: what it lies on, as this machine numbers it; of an object a digest of service and bucket.
        inode: its number there; of an object a digest of its key.
        version: what a store tells its versions by, where it may be written under a condition: the ETag of an object.
    """

    regular: bool
    directory: bool
    size: int
    modified: int
    changed: int
    device: int
    inode: int
    version: str = ""

    @classmethod
    def of(cls, status: os.stat_result) -> FileStatus:
        """What the file system says of a local file."""
        mode = status.st_mode
        return cls(
            stat.S_ISREG(mode),
            stat.S_ISDIR(mode),
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_dev,
            status.st_ino,
        )
