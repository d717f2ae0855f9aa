"""Files on file systems while they are written: under a temporary name in their directory, flushed, renamed."""

from __future__ import annotations

import contextlib
import errno
import os

from reshard.storage import directories, temporary
from reshard.storage.store import FileStatus

_TIMES = 4


class NewLocalFile:
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
        self._fd, self._directory_fd, self._temporary = self._create(os.path.dirname(path) or ".")

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

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], offset + done)
        # Writing to disk starts now, not at the flush; see docs/benchmarks.md.
        os.posix_fadvise(self._fd, offset, done, os.POSIX_FADV_DONTNEED)

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
                    directories.remove_directory(os.path.dirname(path))

    def close(self) -> None:
        """Close the descriptors."""
        for fd in (self._fd, self._directory_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
