"""Files on file systems of this machine, or mounted there.

The round trip of network file systems is measured with the opening of a file and its first read. Later reads
measure less: a file system reads ahead, so this machine answers many of them, and large ones
take the time of their bytes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import time
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Optional

from reshard.storage import directories, locks, temporary
from reshard.storage.costs import FileSystems, Measured, Storage
from reshard.storage.new_local_file import NewLocalFile
from reshard.storage.registry import absolute
from reshard.storage.store import DirectoryEntry, FileStatus, Notify, OpenFile, Sending, Store

# Larger reads take the time of their bytes.
_SMALL = 64 << 10
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK)


class LocalFile:
    """A file that is open through a descriptor.

    Args:
        descriptor: open for reading; its position is not used.
        path: its name, for messages.
        measured: collects the time of the first read, for files on a network.
    """

    # Other programs may write to it, or replace it.
    pinned = False

    def __init__(self, descriptor: int, path: str, measured: Optional[Measured] = None) -> None:
        self.descriptor = descriptor
        self.path = path
        self._measured = measured

    def size(self) -> int:
        """Its current size in bytes."""
        return os.fstat(self.descriptor).st_size

    def status(self) -> FileStatus:
        """Its status in the file system."""
        return FileStatus.of(os.fstat(self.descriptor))

    def read(self, offset: int, count: int) -> bytes:
        """Bytes from an offset on: as many as one read returns, none at the end."""
        measured, self._measured = self._measured, None
        if measured is None:
            return os.pread(self.descriptor, count, offset)
        begun = time.perf_counter()
        data = os.pread(self.descriptor, count, offset)
        if 0 < len(data) <= _SMALL:
            measured.request(time.perf_counter() - begun)
        return data

    def read_into(self, offset: int, out: memoryview) -> int:
        """Likewise into ``out``, from its beginning; the number of bytes read."""
        return self.scatter(offset, [out])

    def scatter(self, offset: int, outs: Sequence[memoryview]) -> int:
        """Likewise into several buffers, one after the other."""
        self._measured = None
        return os.preadv(self.descriptor, outs, offset)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


class LocalStore(Store):
    """All paths of this machine."""

    special_files = True

    def __init__(self) -> None:
        self._file_systems = FileSystems()

    def status(self, path: str, through_links: bool = True) -> FileStatus:
        """The status of a path."""
        return FileStatus.of(os.stat(path) if through_links else os.lstat(path))

    def entries(self, directory: str) -> list[DirectoryEntry]:
        """The entries of a directory."""
        with os.scandir(directory) as entries:
            return list(entries)

    def open(self, path: str, through_links: bool = True) -> OpenFile:
        """Open a file for reading, a FIFO without waiting for its writer."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        begun = time.perf_counter()
        descriptor = os.open(path, flags | (0 if through_links else os.O_NOFOLLOW))
        took = time.perf_counter() - begun
        measured = self._file_systems.measured(os.fstat(descriptor).st_dev, path)
        if measured is not None:
            measured.request(took)
        return LocalFile(descriptor, path, measured)

    def costs(self, path: str) -> Storage:
        """Costs of requests on the file system of a path, from the measurements so far."""
        return self._file_systems.costs(path)

    def new_file(self, path: str, size: int, sending: Optional[Sending] = None) -> NewLocalFile:
        """Begin to write a file under a temporary name, in a directory that is made if missing."""
        return NewLocalFile(path)

    def write_whole(self, path: str, data: bytes) -> None:
        """Write a small file atomically, in an existing directory."""
        temporary.write_whole(path, data)

    def create(self, path: str, data: bytes) -> bool:
        """Write a small file atomically, in an existing directory, unless it exists."""
        fd, unnamed = temporary.create(os.path.dirname(path))
        try:
            temporary.fill(fd, data)
            os.link(unnamed, path)
        except FileExistsError:
            return False
        except OSError as error:
            # File systems without links: callers hold a lock, or run alone.
            if error.errno not in _NO_LINKS:
                raise
            if os.path.lexists(path):
                return False
            temporary.write_whole(path, data)
        finally:
            with contextlib.suppress(OSError):
                temporary.remove(unnamed)
            os.close(fd)
        directories.sync(os.path.dirname(path))
        return True

    def make_empty(self, path: str) -> None:
        """Make an empty file."""
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666))

    def make_directory(self, path: str) -> bool:
        """Make a directory."""
        return directories.make(path)

    def flush(self, directory: str) -> None:
        """Flush a directory to disk."""
        directories.sync(directory)

    def place(self, path: str) -> Hashable:
        """Device and inode: the same file may have several names, and a directory several mounts."""
        status = self._status_or_none(path)
        return None if status is None else (status.device, status.inode)

    def volume(self, directory: str) -> Optional[tuple[int, str]]:
        """The file system of a directory, or of its nearest existing parent."""
        existing = absolute(directory)
        while True:
            status = self._status_or_none(existing)
            if status is not None and status.directory:
                return status.device, existing
            existing = os.path.dirname(existing)

    def free(self, place: str) -> Optional[int]:
        """Free bytes; None for a file system that reports no blocks."""
        status = os.statvfs(place)
        return status.f_bavail * status.f_frsize if status.f_blocks else None

    def missing_right(self, path: str) -> str:
        """A permission to write to its directory, and to it."""
        places = [os.path.dirname(path) or os.curdir, *([path] if os.path.lexists(path) else [])]
        return f"write permission: `{shlex.join(['ls', '-ld', *places])}` shows owner and rights"

    def remove(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)

    def remove_directory(self, path: str) -> None:
        """Remove a directory that is empty."""
        os.rmdir(path)

    def remove_dead(self, directory: str) -> None:
        """Remove temporary files that no living process is writing."""
        temporary.remove_dead(directory)

    def lock(self, path: str, notify: Notify) -> AbstractContextManager[None]:
        """Hold a file's lock exclusively."""
        return locks.lock(path, notify)

    def _status_or_none(self, path: str) -> Optional[FileStatus]:
        """The status of what a path leads to, if it leads to anything."""
        try:
            return self.status(path)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                return None
            raise


LOCAL_STORE: Store = LocalStore()
