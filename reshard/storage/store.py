"""A store: the one class through which files are reached, wherever they lie."""

from __future__ import annotations

import errno
import os
import stat
import threading
from abc import abstractmethod
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Callable, NamedTuple, Optional, Protocol

from reshard.storage.costs import Storage


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


class ReadableFile(Protocol):
    """A file that is open for reading, whatever its bytes go through on the way.

    Offsets and sizes count bytes of what it holds. Any number of threads may read at a time.
    """

    @property
    def path(self) -> str:
        """Its name, for messages."""

    @property
    def descriptor(self) -> Optional[int]:
        """What to map into memory; None where the bytes do not lie in a file as they are read."""

    @property
    def cipher(self) -> Optional[str]:
        """How its bytes are encrypted where they lie, in MindSpore's words; None where they are not."""

    def size(self) -> int:
        """Bytes that it has at this moment."""

    def status(self) -> FileStatus:
        """What its store says of it."""

    def read(self, offset: int, count: int) -> bytes:
        """Bytes from an offset on: as many as a read gives, none at the end.

        Raises:
            ReshardError: what it holds cannot be told from its bytes.
            OSError: reading failed.
        """

    def read_into(self, offset: int, out: memoryview) -> int:
        """Likewise into ``out``, from its beginning; how many."""


class DirectoryEntry(Protocol):
    """A name in a directory, and what it leads to; `os.DirEntry` is one."""

    @property
    def name(self) -> str:
        """The name, without its directory."""

    def is_dir(self) -> bool:
        """Whether it leads to a directory.

        Raises:
            OSError: nobody can tell.
        """

    def is_file(self) -> bool:
        """Whether it leads to a regular file.

        Raises:
            OSError: nobody can tell.
        """


class OpenFile(ReadableFile, Protocol):
    """A file that is open until it is closed. Whatever is read of it is of the version that was opened, or an error."""

    @property
    def pinned(self) -> bool:
        """Whether every read insists on that version by itself; if not, who needs it has to look again."""

    def being_written(self) -> bool:
        """Whether somebody writes to it at this moment, as far as the store tells."""

    def close(self) -> None:
        """Read no more."""


class NewFile(Protocol):
    """A file that is being written and has no name yet: nobody sees any of it, and what is left of it is removed.

    Several threads may write. Whatever fails is an `OSError`.
    """

    @property
    def descriptor(self) -> Optional[int]:
        """What other processes may write through; None where they cannot."""
        return None

    @property
    def copies(self) -> bool:
        """Whether the file system copies ranges of files by itself."""
        return False

    def copy(self, descriptor: int, start: int, offset: int, count: int) -> bool:
        """Have the file system copy a range of another file, open as ``descriptor``, to an offset; whether it has."""
        return False

    def allocate(self, size: int) -> bool:
        """Give the file all of its room before anything is written, where that can be done; whether it has it."""
        return False

    def window(self, offset: int, count: int) -> memoryview:
        """A map of some bytes of the file, once it has all of its room, to be written."""
        raise OSError(errno.ENODEV, "cannot be mapped")

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset; each byte of the file once, in any order."""

    def finish(self) -> FileStatus:
        """See that all bytes are where they outlast this machine; the status that the file will have under its name.

        Nobody writes any more.
        """

    def publish(self) -> Optional[FileStatus]:
        """Give the file its name, in place of another of that name; at once and for good. After `finish`.

        Returns:
            None; or the status of a file that another run of the same conversion has put there first, which stays.
        """

    def discard(self) -> None:
        """Remove what has got no name, as far as possible. Others may be writing at this moment."""

    def close(self) -> None:
        """Nobody uses it any more."""


class Expected(NamedTuple):
    """What stands under the name of a new file when it gets it, where the store has conditional writes.

    Attributes:
        version: of the file there, see `FileStatus`; empty where there is none.
        run: the conversion and its sources: a file that another run of these has written is as good.
    """

    version: str
    run: str


class Sending:
    """Threads that send parts of new files, so many at a time; whoever fills parts waits for them.

    Args:
        at_a_time: parts.
    """

    def __init__(self, at_a_time: int) -> None:
        self._pool = ThreadPoolExecutor(at_a_time, thread_name_prefix="reshard-sending")
        self._free = threading.BoundedSemaphore(at_a_time)

    def submit(self, send: Callable[[], None]) -> Future[None]:
        """Send a part, once another is sent if all threads have one."""
        self._free.acquire()
        sent = self._pool.submit(send)
        sent.add_done_callback(lambda _: self._free.release())
        return sent

    def close(self) -> None:
        """No more parts will come; returns when all are sent."""
        self._pool.shutdown()


Tell = Callable[[str], None]
"""Called with a message, once, when something is waited for."""

SIGNS = ("lock.", "sign.")
"""What the names of files in directories of records begin with that are there while a process lives."""


class Lock(Protocol):
    """A lock that is held."""

    def check(self) -> None:
        """Insist that it is still held: in an object store another run removes it when this one was silent for long.

        Raises:
            OSError: it is not, or nobody can tell.
        """

    def release(self) -> None:
        """Give it up."""


class Sign(Protocol):
    """A file that is there until it is released, or its process has died."""

    @property
    def path(self) -> str:
        """Of the file."""

    def release(self) -> None:
        """Remove it."""


class Store(Protocol):
    """Looks at files, opens, writes and locks them, by path.

    A new store implements the abstract methods. The others suit a store of whole files by name, as object stores
    are, which has neither links nor directories of its own; `LocalStore` overrides them.

    All methods raise `FileNotFoundError` or `NotADirectoryError` where there is nothing, `PermissionError` where
    one may not, `ValueError` for what can be no path, and another `OSError` for what may pass.
    """

    special_files: bool = False
    """Whether links, pipes and devices may stand at a path."""
    conditional: bool = False
    """Whether new files replace only what is expected, see `Expected`."""
    at_a_time: int = 1
    """How many paths are worth being looked at together."""

    # Looking and reading.

    @abstractmethod
    def status(self, path: str, through_links: bool = True) -> FileStatus:
        """What is at a path.

        Args:
            path: the path.
            through_links: of a symbolic link, what it leads to.
        """

    @abstractmethod
    def entries(self, directory: str) -> list[DirectoryEntry]:
        """What is in a directory, in no order; however many pages a list of it has."""

    @abstractmethod
    def open(self, path: str, through_links: bool = True) -> OpenFile:
        """Open a file for reading, never waiting for a writer; anything may stand there."""

    @abstractmethod
    def costs(self, path: str) -> Storage:
        """What requests cost there, as far as that is known by now."""

    def place(self, path: str) -> Hashable:
        """What tells the file or directory at a path from all others, whatever names it has; None where there is none.

        A store in which each has one name need not look whether it is there.
        """
        return path.rstrip("/")

    def volume(self, directory: str) -> Optional[tuple[int, str]]:
        """What files below a directory are written to: its number, and a directory there that exists.

        None where nothing tells how much room there is.
        """
        return None

    def free(self, place: str) -> Optional[int]:
        """Bytes that may be written below a directory that exists; None where nothing tells."""
        return None

    def check_root(self, path: str) -> None:
        """Insist that what no conversion makes is there, for a file to be written below: a bucket.

        Raises:
            InputError: it is missing.
        """
        return None

    def missing_right(self, path: str) -> str:
        """What to get where a path may not be written, for messages."""
        return "the permissions that docs/stores.md lists"

    # Writing.

    @abstractmethod
    def new_file(
        self, path: str, size: int, expected: Optional[Expected] = None, sending: Optional[Sending] = None
    ) -> NewFile:
        """Begin to write a file, in a directory that is made where it is missing.

        Args:
            path: the name that it is to get.
            size: bytes that it will have.
            expected: what it may replace; None for anything. Stores without conditional writes pass over it.
            sending: sends parts, in a store that takes files in parts; None to send them where they are written.
        """

    def part_bytes(self, size: int) -> int:
        """Bytes of a new file of a size that are held until they are written together; 0 where none are."""
        return 0

    @abstractmethod
    def write_whole(self, path: str, data: bytes) -> None:
        """Write a small file in place of another of its name, so that it is whole or not there; for good."""

    def make_empty(self, path: str) -> None:
        """Make an empty file, unless it is there."""
        self.write_whole(path, b"")

    def touch(self, path: str) -> bool:
        """Give a file the time of now; False where it has to be written again for that, or is not there."""
        return False

    @abstractmethod
    def remove(self, path: str, if_same: Optional[Callable[[FileStatus], bool]] = None) -> None:
        """Remove a file, for good. An object store may not tell that there was none.

        Args:
            path: the file.
            if_same: leave it unless its status is as expected.
        """

    def make_directory(self, path: str) -> bool:
        """Make a directory, and those above it, for files to be written there; whether it was made by this."""
        return False

    def remove_directory(self, path: str) -> None:
        """Remove a directory that is empty, where that is left when its files are gone."""
        return None

    def flush(self, directory: str) -> None:
        """See that names that were made in a directory outlast a crash."""
        return None

    def remove_dead(self, directory: str, complete: bool) -> None:
        """Remove what dead runs left of new files in a directory, as far as possible.

        Args:
            directory: where.
            complete: nothing is left to be written there.
        """
        return None

    # Records, and who is alive. Paths lead below a directory of records, see `directories.OWN`.

    @abstractmethod
    def make_empty_directory(self, path: str) -> None:
        """Make a directory, unless it is there, that can be listed while it is empty."""

    @abstractmethod
    def remove_empty_directory(self, path: str) -> None:
        """Remove such a directory."""

    def own_names(self, directory: str) -> list[str]:
        """The names in a directory of records, which is reached through no link.

        Raises:
            TargetError: it, or one on the way from the directory of all records on, is a link or no directory.
        """
        return [entry.name for entry in self.entries(directory)]

    def check_own(self, path: str, directory: bool) -> None:
        """Insist that a file or directory of records is one of its own, if it is there.

        Raises:
            TargetError: it, or a directory that it is in, is a link or something else.
        """
        return None

    @abstractmethod
    def lock(self, path: str, again: Callable[[], None], tell: Tell) -> AbstractContextManager[Callable[[], None]]:
        """Hold a lock alone while a block runs, waiting for it; without locks, hold nothing.

        The block is given what insists that it is still held, and raises `OSError` if not.

        Args:
            path: the file to lock, made if need be. Who holds it may remove it.
            again: makes the file's directory again, should it have been removed meanwhile.
            tell: told when it takes long.

        Raises:
            RetryableError: another holds it for too long.
        """

    @abstractmethod
    def share(self, path: str, tell: Tell) -> Lock:
        """Hold a lock beside others who share it, waiting for it; without locks, hold nothing.

        Args:
            path: the file to lock, made if need be.
            tell: told when it takes long.

        Raises:
            RetryableError: another holds it alone for too long.
        """

    @abstractmethod
    def try_lock(self, path: str) -> AbstractContextManager[Optional[bool]]:
        """Try to hold alone what others `share`, while a block runs; stores may only look who has it.

        True where nobody has it, False where somebody has, None where nobody knows. A file that does not exist is
        locked by nobody.
        """

    @abstractmethod
    def sign_in(self, directory: str) -> Sign:
        """A file in a directory that is there until it is released, or this process has died."""

    def remove_dead_signs(self, directory: str) -> None:
        """Remove what dead processes left in a directory of records, as far as possible."""
        self.remove_dead(directory, complete=False)
