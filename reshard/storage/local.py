"""Files on file systems of this machine, or mounted there.

While it is written, a file has a temporary name in its directory; it is flushed, then renamed. A temporary file is in
its final file's directory, so that renaming it is atomic, and is locked by the process that writes it. On this machine,
a file whose lock is free belongs to a dead process. Locks may not reach other machines, or not work: a file of another
machine must also have been unchanged for an hour. When a process ends, it removes its own temporary files, unless it is
killed: signals are safe at every moment.

Locks of other files are here too. Some file systems have none, on others they do not reach other machines: then nothing
is held.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import re
import time
import zlib
from collections.abc import Hashable, Iterator, Sequence

from reshard import signals
from reshard.errors import RetryableError
from reshard.storage.registry import absolute
from reshard.storage.store import (
    LOCAL,
    REMOTE,
    Costs,
    DirectoryEntry,
    FileStatus,
    NewFile,
    Notify,
    OpenFile,
    Sending,
    Store,
    status_or_none,
)

MESSAGE_AFTER = 2.0
"""Seconds of waiting for a lock before a message."""
GIVEN_UP_AFTER = 120.0
"""Seconds of waiting for a lock before an error: no run holds one for so long."""

_MAX_PAUSE = 0.1
_UNCHANGED_SECONDS = 3600.0
# The machine that writes the file, since its start.
_NAME = re.compile(r"\.reshard-tmp-(?P<machine>[0-9a-f]{8})-[0-9a-f]{12}")
_BUSY = (errno.EWOULDBLOCK, errno.EACCES)
# Maximum new files that were locked by others at once: with more, locks do not work here.
_MAX_LOCKED = 100
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK)
# Maximum attempts to create a file in a directory that another run removes.
_TIMES = 4
# File systems that guarantee allocated space, and allocate it without writing.
_ALLOCATING = frozenset(["ext4", "xfs", "tmpfs"])
# Where a page fault is a memory access or a disk read and never a round trip.
_LOCAL_FILE_SYSTEMS = frozenset(
    ["ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "ramfs", "zfs", "f2fs", "overlay", "bcachefs", "jfs", "reiserfs"]
)

# Paths of unfinished files, each with the process that writes it: a forked child leaves its parent's files alone.
_unfinished: set[tuple[int, str]] = set()


def create_temporary(directory: str) -> tuple[int, str]:
    """Create and lock a temporary file: its descriptor, open for reading and writing, and its path."""
    for times in range(_MAX_LOCKED + 1):
        path = os.path.join(directory, f".reshard-tmp-{machine()}-{os.urandom(6).hex()}")
        _unfinished.add((os.getpid(), path))
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError:
            _unfinished.discard((os.getpid(), path))
            raise
        # Another run may test the lock of a new file before it is locked here, and remove the file.
        if (try_lock(fd) or times == _MAX_LOCKED) and os.path.lexists(path):
            return fd, path
        os.close(fd)
        with contextlib.suppress(OSError):
            remove_temporary(path)
    raise FileNotFoundError(errno.ENOENT, "temporary files are removed at once", directory)


def try_lock(fd: int) -> bool:
    """Lock an open file; whether no other process has locked it. True on file systems without locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _BUSY
    return True


def rename(path: str, final: str) -> None:
    """Give a temporary file its final name, in its own directory, and flush that to disk."""
    os.rename(path, final)
    _unfinished.discard((os.getpid(), path))
    sync_directory(os.path.dirname(final))


def remove_temporary(path: str) -> None:
    os.unlink(path)
    _unfinished.discard((os.getpid(), path))


def _remove_unfinished() -> None:
    for process, path in list(_unfinished):
        if process == os.getpid():
            with contextlib.suppress(OSError):
                remove_temporary(path)


signals.at_end.append(_remove_unfinished)


def _write_all(fd: int, data: bytes | memoryview, offset: int = 0) -> None:
    written_bytes = 0
    while written_bytes < len(data):
        written_bytes += os.pwrite(fd, data[written_bytes:], offset + written_bytes)


def _remove_if_dead(path: str, of_this_machine: bool) -> None:
    with contextlib.suppress(OSError):
        # Network file systems allow exclusive locks only on files that are open for writing.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            unchanged = time.time() - os.fstat(fd).st_mtime > _UNCHANGED_SECONDS
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                # Without locks, the age decides alone.
                if error.errno in _BUSY or not unchanged:
                    return
            if of_this_machine or unchanged:
                os.unlink(path)
        finally:
            os.close(fd)


@functools.cache
def machine() -> str:
    """This machine since its start, in a few characters."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            boot = file.read()
    except OSError:
        boot = ""
    # Not hashlib, which loads OpenSSL: some commands need no other digest.
    return f"{zlib.crc32(f'{os.uname().nodename} {boot}'.encode()):08x}"


def make_directory(path: str) -> bool:
    """Make a directory and its missing parents; whether it was missing."""
    if os.path.isdir(path):
        return False
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        # Parents that are missing are made first: the nearest name that exists is no directory.
        while path and not os.path.lexists(path):
            path = os.path.dirname(path)
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from error
    return True


def sync_directory(path: str) -> None:
    """Make creations and renames in a directory survive a crash."""
    fd = os.open(path or os.curdir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems cannot flush a directory; they flush it themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)


def _costs_on(path: str) -> Costs:
    """The costs of requests to a local path; an unknown file system counts as remote."""
    return LOCAL if file_system_of(path) in _LOCAL_FILE_SYSTEMS else REMOTE


def file_system_of(path: str) -> str:
    """The type of a path's file system, as the kernel names it; empty if unknown."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            lines = mounts.read().splitlines()
    except OSError:
        return ""
    real = os.path.realpath(path)
    mount_point, kind = "", ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4].replace("\\040", " ")
        inside = point == "/" or real == point or real.startswith(point + "/")
        if inside and len(point) >= len(mount_point):
            mount_point, kind = point, after.split(" ")[0]
    return kind


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
        _write_all(self._fd, data, offset)
        # Writing to disk starts now, not at the flush; see CONTRIBUTING.md, Measured.
        os.posix_fadvise(self._fd, offset, len(data), os.POSIX_FADV_DONTNEED)

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
            self._made_directory = make_directory(self._directory or os.curdir)
            try:
                fd, self._temporary = create_temporary(self._directory)
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
            sync_directory(os.path.dirname(self._directory))
        return FileStatus.of(os.fstat(self._fd))

    def publish(self) -> None:
        rename(self._temporary, self._path)
        self._temporary = ""

    def discard(self) -> None:
        path, self._temporary = self._temporary, ""
        if path:
            with contextlib.suppress(OSError):
                remove_temporary(path)
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
            return _costs_on(path)
        if device not in self._costs:
            self._costs[device] = _costs_on(path)
        return self._costs[device]

    def new_file(self, path: str, size: int, sending: Sending | None = None) -> NewLocalFile:
        return NewLocalFile(path)

    def write_whole(self, path: str, data: bytes) -> None:
        """Write a small file atomically, in an existing directory."""
        fd, unnamed = create_temporary(os.path.dirname(path))
        try:
            _write_all(fd, data)
            os.fsync(fd)
            rename(unnamed, path)
        except BaseException:
            with contextlib.suppress(OSError):
                remove_temporary(unnamed)
            raise
        finally:
            os.close(fd)

    def create(self, path: str, data: bytes) -> bool:
        """Write a small file atomically, in an existing directory, unless it exists."""
        fd, unnamed = create_temporary(os.path.dirname(path))
        try:
            _write_all(fd, data)
            os.fsync(fd)
            os.link(unnamed, path)
        except FileExistsError:
            return False
        except OSError as error:
            # File systems without links: callers hold a lock, or run alone.
            if error.errno not in _NO_LINKS:
                raise
            if os.path.lexists(path):
                return False
            self.write_whole(path, data)
        finally:
            with contextlib.suppress(OSError):
                remove_temporary(unnamed)
            os.close(fd)
        sync_directory(os.path.dirname(path))
        return True

    def make_empty(self, path: str) -> None:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666))

    def make_directory(self, path: str) -> bool:
        return make_directory(path)

    def flush(self, directory: str) -> None:
        sync_directory(directory)

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
        # A directory that cannot be listed is ignored.
        with contextlib.suppress(OSError):
            for name in os.listdir(directory or os.curdir):
                match = _NAME.fullmatch(name)
                if match is not None:
                    _remove_if_dead(os.path.join(directory, name), match["machine"] == machine())

    @contextlib.contextmanager
    def lock(self, path: str, notify: Notify) -> Iterator[None]:
        began, pause, notified = time.monotonic(), 0.005, False
        while True:
            make_directory(os.path.dirname(path))
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
                try:
                    # Its last holder may have removed it, with its directory.
                    if try_lock(fd) and os.path.samestat(os.stat(path), os.fstat(fd)):
                        yield
                        return
                finally:
                    os.close(fd)
            waited = time.monotonic() - began
            if waited > GIVEN_UP_AFTER:
                raise RetryableError(
                    f"{path}: another process has held this lock for {GIVEN_UP_AFTER:.0f} s",
                    file=path,
                    hint=f"`fuser {path}` on each machine that writes there lists the process; end it if it hangs",
                )
            if waited > MESSAGE_AFTER and not notified:
                notified = True
                notify(f"waiting for {path}, which another process has locked")
            # Random pauses: waiting processes do not try at the same times.
            time.sleep(pause * (0.5 + os.urandom(1)[0] / 512))
            pause = min(2 * pause, _MAX_PAUSE)

    def _status_or_none(self, path: str) -> FileStatus | None:
        return status_or_none(lambda: self.status(path))


LOCAL_STORE: Store = LocalStore()
