"""Files on file systems of this machine, or mounted there."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from typing import NamedTuple, Optional

from reshard.storage import directories, temporary
from reshard.storage.costs import Storage
from reshard.storage.network import FileSystems, NetworkFile
from reshard.storage.new_local_file import NewLocalFile
from reshard.storage.status import FileStatus
from reshard.storage.store import Entry, Expected, OpenFile, Sending, Store

# Seconds: no single write takes longer.
_MOMENT = 600.0


class LocalFile(NamedTuple):
    """A file that is read through a descriptor.

    Attributes:
        descriptor: open for reading; its position is not used.
        path: its name, for messages.
    """

    descriptor: int
    path: str

    @property
    def cipher(self) -> Optional[str]:
        """None: its bytes are read as they lie."""
        return None

    @property
    def pinned(self) -> bool:
        """False: another may write to it meanwhile, or put another in its place."""
        return False

    def size(self) -> int:
        """Bytes that it has at this moment."""
        return os.fstat(self.descriptor).st_size

    def status(self) -> FileStatus:
        """What the file system says of it."""
        return FileStatus.of(os.fstat(self.descriptor))

    def read(self, offset: int, count: int) -> bytes:
        """Bytes from an offset on: as many as a read gives, none at the end."""
        return os.pread(self.descriptor, count, offset)

    def read_into(self, offset: int, out: memoryview) -> int:
        """Likewise into ``out``, from its beginning; how many."""
        return os.preadv(self.descriptor, [out], offset)

    def being_written(self) -> bool:
        """Whether it was changed a moment ago, and a process of this machine has it open for writing.

        A large write changes the file's times when it begins: who opens the file in the middle of it sees no other
        times afterwards. Where the kernel does not say who has it open, this is False.
        """
        if abs(time.time() - os.fstat(self.descriptor).st_mtime) > _MOMENT:
            return False
        try:
            # Whoever opens it for writing between the two calls has a signal sent, which would end this process.
            fcntl.fcntl(self.descriptor, fcntl.F_SETSIG, signal.SIGURG)
            # Refused where somebody has it open for writing.
            fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError as error:
            return error.errno == errno.EAGAIN
        fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


class LocalStore:
    """Whatever has a path on this machine."""

    def __init__(self) -> None:
        self._file_systems = FileSystems()

    def status(self, path: str, through_links: bool = True) -> FileStatus:
        """What is at a path."""
        return FileStatus.of(os.stat(path) if through_links else os.lstat(path))

    def entries(self, directory: str) -> list[Entry]:
        """What is in a directory."""
        with os.scandir(directory) as entries:
            return list(entries)

    def open(self, path: str, through_links: bool = True) -> OpenFile:
        """Open a file for reading, a FIFO without waiting for its writer."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        begun = time.perf_counter()
        descriptor = os.open(path, flags | (0 if through_links else os.O_NOFOLLOW))
        took = time.perf_counter() - begun
        measured = self._file_systems.measured(os.fstat(descriptor).st_dev, path)
        if measured is None:
            return LocalFile(descriptor, path)
        measured.request(took)
        return NetworkFile(descriptor, path, measured)

    def costs(self, path: str) -> Storage:
        """What requests cost on the file system that a path lies on, by those that were made."""
        return self._file_systems.costs(path)

    def new_file(
        self, path: str, size: int, expected: Optional[Expected] = None, sending: Optional[Sending] = None
    ) -> NewLocalFile:
        """Begin to write a file under a temporary name, in a directory that is made where it is not there."""
        return NewLocalFile(path)

    def part_bytes(self, size: int) -> int:
        """Nothing is held."""
        return 0

    def write_whole(self, path: str, data: bytes) -> None:
        """Write a small file whole, in a directory that is there."""
        temporary.write_whole(path, data)

    def make_directory(self, path: str) -> bool:
        """Make a directory."""
        return directories.make_directory(path)

    def touch(self, path: str) -> bool:
        """Give a file, or a link, the time of now."""
        try:
            with directories.opened_above(path) as (name, fd):
                os.utime(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def flush(self, directory: str) -> None:
        """Flush a directory to disk."""
        directories.sync_directory(directory)

    def check_root(self, path: str) -> None:
        """File systems have a root."""

    def remove(self, path: str) -> None:
        """Remove a file."""
        directories.remove_file(path)

    def remove_directory(self, path: str) -> None:
        """Remove a directory that is empty."""
        directories.remove_directory(path)

    def remove_dead(self, directory: str, complete: bool) -> None:
        """Remove temporary files that no living process is writing."""
        temporary.remove_dead(directory, complete)


LOCAL_STORE: Store = LocalStore()
