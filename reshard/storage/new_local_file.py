"""Files on file systems while they are written: under a temporary name in their directory, flushed, renamed."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from typing import Optional

from reshard.storage import directories, temporary
from reshard.storage.costs import file_system_of
from reshard.storage.store import FileStatus, NewFile
from reshard.threads import cached_property

_TIMES = 4
# File systems that guarantee allocated space, and allocate it without writing.
_ALLOCATING = frozenset(["ext4", "xfs", "tmpfs"])
# File systems whose server copies a range of a file, or that share it; on others the kernel reads and writes it.
_COPYING = frozenset(["btrfs", "xfs", "bcachefs", "ocfs2", "nfs4", "ceph", "cifs", "smb3"])


class WrittenFile(NewFile):
    """A file without a final name of which another process writes parts; the process that made it finishes it.

    Args:
        descriptor: of the file, open for reading and writing.
    """

    def __init__(self, descriptor: int) -> None:
        self._fd = descriptor

    @property
    def descriptor(self) -> Optional[int]:
        """The descriptor through which other processes may write."""
        return self._fd

    @property
    def rewritable(self) -> bool:
        """It is."""
        return True

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset."""
        written_bytes = 0
        while written_bytes < len(data):
            written_bytes += os.pwrite(self._fd, data[written_bytes:], offset + written_bytes)
        # Writing to disk starts now, not at the flush; see docs/benchmarks.md.
        os.posix_fadvise(self._fd, offset, written_bytes, os.POSIX_FADV_DONTNEED)

    def copy(self, descriptor: int, start: int, offset: int, count: int) -> bool:
        """Copy a range in the kernel."""
        copied_bytes = 0
        while copied_bytes < count:
            copied = os.copy_file_range(
                descriptor, self._fd, count - copied_bytes, start + copied_bytes, offset + copied_bytes
            )
            if not copied:
                return False
            copied_bytes += copied
        return True

    def window(self, offset: int, count: int) -> memoryview:
        """A map of some bytes of the file, whose space is allocated."""
        first = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(self._fd, offset + count - first, offset=first)
        return memoryview(mapped)[offset - first :]

    def finish(self) -> FileStatus:
        """Refused: the process that made it finishes it."""
        raise OSError(errno.EPERM, "is finished by the process that made it")

    def publish(self) -> None:
        """Refused: the process that made it publishes it."""
        raise OSError(errno.EPERM, "is published by the process that made it")

    def discard(self) -> None:
        """Do nothing: the file belongs to another process."""

    def close(self) -> None:
        """Close the descriptor."""
        with contextlib.suppress(OSError):
            os.close(self._fd)


class NewLocalFile(WrittenFile):
    """A file under a temporary name; its directory is made if missing.

    Args:
        path: the final name.

    Raises:
        OSError: it cannot be created.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._directory = os.path.dirname(path)
        for times in range(_TIMES):
            self._made_directory = directories.make(self._directory or os.curdir)
            try:
                fd, self._temporary = temporary.create(self._directory)
                break
            except FileNotFoundError:
                # Another run that gave up may remove the directory between the two calls.
                if times + 1 == _TIMES:
                    raise
        super().__init__(fd)

    @cached_property
    def _file_system(self) -> str:
        return file_system_of(self._directory or os.curdir)

    @property
    def copies(self) -> bool:
        """Whether its file system copies ranges of files by itself."""
        return self._file_system in _COPYING and hasattr(os, "copy_file_range")

    def allocate(self, size: int) -> bool:
        """Allocate all of its space, on file systems that guarantee it; whether it is allocated."""
        if not size or self._file_system not in _ALLOCATING:
            return False
        os.posix_fallocate(self._fd, 0, size)
        return True

    def finish(self) -> FileStatus:
        """Flush it to disk."""
        os.fsync(self._fd)
        if self._made_directory:
            directories.sync(os.path.dirname(self._directory))
        return FileStatus.of(os.fstat(self._fd))

    def publish(self) -> None:
        """Rename it, and flush the rename to disk."""
        temporary.rename(self._temporary, self._path)
        self._temporary = ""

    def discard(self) -> None:
        """Remove it, and its directory if it was made for this file and is empty."""
        path, self._temporary = self._temporary, ""
        if path:
            with contextlib.suppress(OSError):
                temporary.remove(path)
                if self._made_directory:
                    os.rmdir(self._directory)
