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

    def publish(self) -> Optional[FileStatus]:
        """Refused: the process that made it publishes it."""
        raise OSError(errno.EPERM, "is published by the process that made it")

    def discard(self) -> None:
        """Do nothing: the file belongs to another process."""

    def close(self) -> None:
        """Close the descriptor."""
        with contextlib.suppress(OSError):
            os.close(self._fd)


class NewLocalFile(WrittenFile):
    """A file under a temporary name; its directory is made if missing, and held open until the rename.

    Args:
        path: the final name.

    Raises:
        OSError: it cannot be created.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._made_directory = False
        # The file's own directory, even if its name leads to another one by now.
        fd, self._directory_fd, self._temporary = self._create(os.path.dirname(path) or ".")
        super().__init__(fd)

    def _create(self, directory: str) -> tuple[int, int, str]:
        for _ in range(_TIMES):
            # Another run that gave up may remove the directory between the two calls.
            with contextlib.suppress(FileNotFoundError):
                directory_fd, self._made_directory = directories.open_directory(directory, make=True)
                try:
                    fd, unnamed = temporary.create(directory, directory_fd)
                except BaseException:
                    os.close(directory_fd)
                    raise
                return fd, directory_fd, unnamed
        raise FileNotFoundError(errno.ENOENT, "its directory was removed repeatedly")

    @cached_property
    def _file_system(self) -> str:
        return file_system_of(os.path.dirname(self._temporary) or os.curdir)

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
            directories.sync_directory(os.path.dirname(os.path.dirname(self._path) or ".") or ".")
        return FileStatus.of(os.fstat(self._fd))

    def publish(self) -> None:
        """Rename it, and flush the rename to disk."""
        temporary.rename(self._temporary, self._path, self._directory_fd)
        self._temporary = ""
        directories.sync(self._directory_fd)

    def discard(self) -> None:
        """Remove it, and its directory if it was made for this file and is empty."""
        path, self._temporary = self._temporary, ""
        if path:
            with contextlib.suppress(OSError):
                temporary.remove(path, self._directory_fd)
                if self._made_directory:
                    with directories.opened_above(os.path.dirname(path)) as (name, fd):
                        os.rmdir(name, dir_fd=fd)

    def close(self) -> None:
        """Close the descriptors."""
        super().close()
        with contextlib.suppress(OSError):
            os.close(self._directory_fd)
