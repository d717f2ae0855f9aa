"""A store: the class through which all files are accessed.

A request on a local file system costs microseconds, on a network file system a round trip. So requests there are
larger, read more bytes that are not needed, and many are in flight at a time. The constants were measured with
`benchmarks/slow_storage.py`.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from abc import abstractmethod
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reshard.defaults import usable_cpus
from reshard.threads import thread_pool

if TYPE_CHECKING:
    from concurrent.futures import Future


class Costs(NamedTuple):
    """The costs of requests to a store.

    Attributes:
        remote: whether a request takes a round trip.
        in_flight: requests worth having in flight, per CPU.
        worth_skipping: a request costs about as much as reading this many unneeded bytes.
        window: bytes read at once where small requests are close together.
        small: requests up to this size are answered from such windows.
        held: bytes held during a request, in addition to the buffer that it fills.
        round_trip: measured seconds until the first byte of a request; None if not measured.
        mappable: whether files can be mapped into memory.
    """

    remote: bool
    in_flight: int
    worth_skipping: int
    window: int
    small: int
    held: int = 0
    round_trip: float | None = None
    mappable: bool = True


LOCAL = Costs(remote=False, in_flight=1, worth_skipping=16 << 10, window=64 << 10, small=16 << 10)
REMOTE = Costs(remote=True, in_flight=4, worth_skipping=256 << 10, window=256 << 10, small=64 << 10)
"""A network file system."""
OBJECTS = Costs(remote=True, in_flight=4, worth_skipping=64 << 10, window=256 << 10, small=64 << 10, mappable=False)
"""An object store: minimum values, for short round trips."""


def busy_cpus(jobs: int, *ends: Costs) -> int:
    """How many of ``jobs`` CPUs to keep busy: between local files at most this machine's, as more would take turns.

    Requests to other stores wait for them, and more of them can be in flight.
    """
    return jobs if any(each.remote for each in ends) else min(jobs, usable_cpus())


OWN = ".reshard"
"""The directory of all records in a target directory."""


class FileStatus(NamedTuple):
    """Status of a file or directory, without reading it.

    Attributes:
        regular: whether it is a regular file; objects are.
        directory: whether it is a directory; in an object store, whether a key begins with its name.
        size: bytes.
        modified: time of last modification, in nanoseconds. Writers can set it, and copies differ.
        changed: differs after every change: the time of last change, of attributes and names too, in
            nanoseconds; for an object, a digest of its ETag.
        device: number of its device on this machine; for an object, a digest of service and bucket.
        inode: its number there; for an object, a digest of its key.
    """

    regular: bool
    directory: bool
    size: int
    modified: int
    changed: int
    device: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStatus:
        """The status of a local file."""
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


def status_or_none(look: Callable[[], FileStatus]) -> FileStatus | None:
    """The status that ``look`` returns; None if nothing is at its path."""
    try:
        return look()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        # ValueError: no file can have a name with a NUL, or one that cannot be encoded.
        return None
    except OSError as error:
        # A circle of links counts as missing, like a dangling link.
        if error.errno == errno.ELOOP:
            return None
        raise


class ReadableFile(Protocol):
    """A file that is open for reading, by any number of threads at a time.

    A failed read is an `OSError`.
    """

    @property
    def path(self) -> str:
        """Its name, for messages."""

    @property
    def descriptor(self) -> int | None:
        """Descriptor to map into memory; None if the bytes are not stored as they are read."""

    def size(self) -> int:
        """Its current size in bytes."""

    def status(self) -> FileStatus:
        """Its status in its store."""

    def read(self, offset: int, count: int) -> bytes:
        """Bytes from an offset on: as many as one read returns, none at the end."""

    def read_into(self, offset: int, out: memoryview) -> int:
        """Likewise into ``out``, from its beginning; the number of bytes read."""


class OpenFile(ReadableFile, Protocol):
    """A file that is open until it is closed. Reads return bytes of the opened version, or fail."""

    @property
    def pinned(self) -> bool:
        """Whether every read checks the version itself; if not, the caller checks the status again."""

    def close(self) -> None: ...


class DirectoryEntry(Protocol):
    """A name in a directory; `os.DirEntry` is one.

    Links are followed. A status that cannot be read is an `OSError`.
    """

    @property
    def name(self) -> str: ...

    def is_dir(self) -> bool: ...

    def is_file(self) -> bool: ...


class NewFile(Protocol):
    """A file that is being written without a name: it is invisible, and partial files are removed.

    Several threads may write. Every failure is an `OSError`.
    """

    @property
    def descriptor(self) -> int | None:
        """The descriptor through which other processes may write; None where they cannot."""
        return None

    @property
    def rewritable(self) -> bool:
        """Whether written bytes may be written again until `finish`."""
        return False

    def allocate(self, size: int) -> bool:
        """Allocate all of the file's space before anything is written, if possible; whether it is allocated."""
        return False

    def window(self, offset: int, count: int) -> memoryview:
        """A writable map of some bytes of the file, after `allocate`."""
        raise OSError(errno.ENODEV, "cannot be mapped")

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset; each byte of the file once, in any order, unless it is `rewritable`."""

    def finish(self) -> FileStatus:
        """Make all bytes durable; the status that the file will have under its name.

        No writes may follow.
        """

    def publish(self) -> None:
        """Give the file its name, replacing another of that name; atomic and durable. After `finish`."""

    def discard(self) -> None:
        """Remove a file without a name, if possible. Other threads may be writing."""

    def close(self) -> None:
        """Close it, after all other calls."""


class Sending:
    """Threads that send some parts of new files at a time; the threads that fill parts wait for them.

    The memory of sent parts is filled again: new memory costs a page fault for every page.
    """

    def __init__(self, at_a_time: int) -> None:
        self._at_a_time = at_a_time
        self._pool = thread_pool(at_a_time, "reshard-sending")
        self._free = threading.BoundedSemaphore(at_a_time)
        self._buffers: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def buffer(self, size: int) -> mmap.mmap:
        """Memory for a part; its content is arbitrary."""
        with self._lock:
            # Memory of another size is released, so that buffers never exceed the parts at a time.
            while self._buffers:
                buffer = self._buffers.pop()
                if len(buffer) == size:
                    return buffer
        return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def give_back(self, buffer: mmap.mmap) -> None:
        """Keep the memory of a sent part for another."""
        with self._lock:
            if len(self._buffers) < self._at_a_time:
                self._buffers.append(buffer)

    def submit(self, send: Callable[[], None]) -> Future[None]:
        """Send a part; waits until a thread is free."""
        self._free.acquire()
        sent = self._pool.submit(send)
        sent.add_done_callback(lambda _: self._free.release())
        return sent

    def close(self) -> None:
        """End submission; returns when all parts are sent."""
        self._pool.shutdown()
        self._buffers.clear()


Notify = Callable[[str], None]
"""Called with a message, once, at the start of a long wait."""


class Store(Protocol):
    """Status, reading, writing and locking of files, by path.

    A new store implements the abstract methods. The other methods suit object stores: whole files by name,
    no links, no real directories. `LocalStore` overrides them.

    All methods raise `FileNotFoundError` or `NotADirectoryError` for missing paths, `PermissionError` for missing
    permission, `ValueError` for invalid paths, `InputError` for a missing bucket, and another `OSError` for failures
    that may pass.
    """

    special_files: bool = False
    """Whether links, pipes and devices are possible."""
    at_a_time: int = 1
    """Number of paths worth being inspected concurrently."""

    # Inspecting and reading.

    @abstractmethod
    def status(self, path: str, through_links: bool = True) -> FileStatus: ...

    @abstractmethod
    def entries(self, directory: str) -> list[DirectoryEntry]:
        """The entries of a directory, unordered; all pages of a long list."""

    def listed(self, path: str) -> DirectoryEntry | None:
        """The entry of a path if it is known without a request; None otherwise."""
        return None

    @abstractmethod
    def open(self, path: str, through_links: bool = True) -> OpenFile:
        """Open a file for reading without waiting for a writer; the path may be of any kind."""

    @abstractmethod
    def costs(self, path: str) -> Costs:
        """Costs of requests to a path."""

    def place(self, path: str) -> Hashable:
        """The identity of the file or directory at a path, the same for all of its names; None if it is missing.

        A store with one name for each file need not check that it exists.
        """
        return path.rstrip("/")

    def space(self, directory: str) -> tuple[int, str, int | None] | None:
        """Of the volume of files below a directory: its number, an existing directory, and free bytes if known."""
        return None

    # Writing.

    @abstractmethod
    def new_file(self, path: str, size: int, sending: Sending | None = None) -> NewFile:
        """Begin to write a file of ``size`` bytes, in a directory that is made if missing.

        ``sending`` sends parts, in a store that takes files in parts; without it, the writing thread sends them.
        """

    def part_bytes(self, size: int) -> int:
        """Bytes of a new file that are held until they are written together; 0 if none."""
        return 0

    @abstractmethod
    def write_whole(self, path: str, data: bytes) -> None:
        """Write a small file, replacing another of its name, atomically and durably."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Write a small file durably unless one of its name exists; whether this call wrote it.

        Of several processes that create a file at once, one writes it.
        """

    def make_empty(self, path: str) -> None:
        """Make an empty file if it is missing; durable after `flush`."""
        self.write_whole(path, b"")

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file. An object store may not report a missing one."""

    def make_directory(self, path: str) -> bool:
        """Make a directory and its missing parents; whether this call made it."""
        return False

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory, in stores where it outlives its files."""
        return None

    def flush(self, directory: str) -> None:
        """Make names created in a directory durable."""
        return None

    def remove_dead(self, directory: str) -> None:
        """Remove files that dead runs left unfinished in a directory, if possible."""
        return None

    def lock(self, path: str, notify: Notify) -> AbstractContextManager[None]:
        """Hold a lock exclusively while a block runs, after waiting for it; without locks, hold nothing.

        The locked file is made if missing; its holder may remove it. ``notify`` is called when the wait is long, and a
        lock that another process holds for too long is a `RetryableError`.
        """
        return nullcontext()
