"""Files on file systems of this machine, or mounted there.

While it is written, a file has a temporary name in its directory; it is flushed, then renamed.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager

from reshard.storage import temporary
from reshard.storage.registry import absolute
from reshard.storage.store import (
    Costs,
    DirectoryEntry,
    FileStatus,
    NewFile,
    Notify,
    OpenFile,
    Sending,
    Store,
    costs_on,
    file_system_of,
    status_or_none,
)

_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK)
_TIMES = 4
# File systems that guarantee allocated space, and allocate it without writing.
_ALLOCATING = frozenset(["ext4", "xfs", "tmpfs"])


class LocalFile:
    """A file that is open through a descriptor.

    Args:
        descriptor: open for reading; its position is not used.
        path: its name, for messages.
    """

    # Other programs may write to it, or replace it.
    pinned = False

    def __init__(self, descriptor: int, path: str) -> None:
        self.descriptor = descriptor
        self.path = path

    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def status(self) -> FileStatus:
        return FileStatus.of(os.fstat(self.descriptor))

    def read(self, offset: int, count: int) -> bytes:
        return os.pread(self.descriptor, count, offset)

    def read_into(self, offset: int, out: memoryview) -> int:
        return self.scatter(offset, [out])

    def scatter(self, offset: int, outs: Sequence[memoryview]) -> int:
        """Read into several buffers, one after the other; the number of bytes read."""
        return os.preadv(self.descriptor, outs, offset)

    def close(self) -> None:
        os.close(self.descriptor)


class WrittenFile(NewFile):
    """A file without a final name of which another process writes parts; the process that made it finishes it."""

    rewritable = True

    def __init__(self, descriptor: int) -> None:
        self._fd = descriptor

    @property
    def descriptor(self) -> int | None:
        return self._fd

    def write(self, offset: int, data: memoryview) -> None:
        written_bytes = 0
        while written_bytes < len(data):
            written_bytes += os.pwrite(self._fd, data[written_bytes:], offset + written_bytes)
        # Writing to disk starts now, not at the flush; see docs/benchmarks.md.
        os.posix_fadvise(self._fd, offset, written_bytes, os.POSIX_FADV_DONTNEED)

    def window(self, offset: int, count: int) -> memoryview:
        first = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(self._fd, offset + count - first, offset=first)
        return memoryview(mapped)[offset - first :]

    def finish(self) -> FileStatus:
        raise OSError(errno.EPERM, "is finished by the process that made it")

    def publish(self) -> None:
        self.finish()

    def discard(self) -> None:
        """Nothing: the file belongs to another process."""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)


class NewLocalFile(WrittenFile):
    """A file under a temporary name; its directory is made if missing."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._directory = os.path.dirname(path)
        for times in range(_TIMES):
            self._made_directory = temporary.make_directory(self._directory or os.curdir)
            try:
                fd, self._temporary = temporary.create(self._directory)
                break
            except FileNotFoundError:
                # Another run that gave up may remove the directory between the two calls.
                if times + 1 == _TIMES:
                    raise
        super().__init__(fd)

    def allocate(self, size: int) -> bool:
        if not size or file_system_of(self._directory or os.curdir) not in _ALLOCATING:
            return False
        os.posix_fallocate(self._fd, 0, size)
        return True

    def finish(self) -> FileStatus:
        os.fsync(self._fd)
        if self._made_directory:
            temporary.sync_directory(os.path.dirname(self._directory))
        return FileStatus.of(os.fstat(self._fd))

    def publish(self) -> None:
        temporary.rename(self._temporary, self._path)
        self._temporary = ""

    def discard(self) -> None:
        path, self._temporary = self._temporary, ""
        if path:
            with contextlib.suppress(OSError):
                temporary.remove(path)
                if self._made_directory:
                    os.rmdir(self._directory)


class LocalStore(Store):
    """All paths of this machine."""

    special_files = True

    def __init__(self) -> None:
        self._costs: dict[int, Costs] = {}

    def status(self, path: str, through_links: bool = True) -> FileStatus:
        return FileStatus.of(os.stat(path) if through_links else os.lstat(path))

    def entries(self, directory: str) -> list[DirectoryEntry]:
        with os.scandir(directory) as entries:
            return list(entries)

    def open(self, path: str, through_links: bool = True) -> OpenFile:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        return LocalFile(os.open(path, flags | (0 if through_links else os.O_NOFOLLOW)), path)

    def costs(self, path: str) -> Costs:
        try:
            device = os.stat(path).st_dev
        except OSError:
            return costs_on(path)
        if device not in self._costs:
            self._costs[device] = costs_on(path)
        return self._costs[device]

    def new_file(self, path: str, size: int, sending: Sending | None = None) -> NewLocalFile:
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
        temporary.sync_directory(os.path.dirname(path))
        return True

    def make_empty(self, path: str) -> None:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666))

    def make_directory(self, path: str) -> bool:
        return temporary.make_directory(path)

    def flush(self, directory: str) -> None:
        temporary.sync_directory(directory)

    def place(self, path: str) -> Hashable:
        """Device and inode: the same file may have several names, and a directory several mounts."""
        status = self._status_or_none(path)
        return None if status is None else (status.device, status.inode)

    def space(self, directory: str) -> tuple[int, str, int | None] | None:
        """That of the directory's file system, or of its nearest existing parent's."""
        existing = absolute(directory)
        while (status := self._status_or_none(existing)) is None or not status.directory:
            existing = os.path.dirname(existing)
        volume = os.statvfs(existing)
        # Some file systems report no blocks.
        return status.device, existing, volume.f_bavail * volume.f_frsize if volume.f_blocks else None

    def remove(self, path: str) -> None:
        os.unlink(path)

    def remove_directory(self, path: str) -> None:
        os.rmdir(path)

    def remove_dead(self, directory: str) -> None:
        temporary.remove_dead(directory)

    def lock(self, path: str, notify: Notify) -> AbstractContextManager[None]:
        return temporary.lock(path, notify)

    def _status_or_none(self, path: str) -> FileStatus | None:
        return status_or_none(lambda: self.status(path))


LOCAL_STORE: Store = LocalStore()
