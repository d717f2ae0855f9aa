"""Where files lie: on file systems, or in an object store; the one protocol through which they are reached.

A path says by itself which store it is of: ``s3://bucket/prefix`` lies in an object store, everything else on
a file system. Stores say what goes wrong in the words of the system, as `OSError`, whatever they are.
"""

from __future__ import annotations

import contextlib
import contextvars
import errno
import os
import re
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, NamedTuple, Optional, Protocol, TypeVar, Union

from reshard.errors import UsageError
from reshard.storage.costs import Storage
from reshard.storage.read import ReadableFile
from reshard.storage.status import FileStatus

OBJECTS = "s3://"
"""What paths in an object store begin with."""

_NEARLY = "s3:/"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_HOSTS = ("http", "https")
# Addresses of services that speak S3's protocol, by the schemes of their own clients.
_ENDPOINTS = {
    "obs": "https://obs.REGION.myhuaweicloud.com",
    "oss": "https://oss-REGION.aliyuncs.com",
    "cos": "https://cos.REGION.myqcloud.com",
    "gs": "https://storage.googleapis.com",
    "minio": "http://HOST:9000",
    "http": "http://HOST",
    "https": "https://HOST",
}
T = TypeVar("T")

# Looks and listings that are worth having under way, where each takes a round trip.
_AT_A_TIME = 32
# Bytes of smaller parts that are put together before they are written.
_WORTH_WRITING = 1 << 20


class Entry(Protocol):
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


class Store(Protocol):
    """Looks at files, opens and writes them, by path.

    All methods raise `FileNotFoundError` or `NotADirectoryError` where there is nothing, `PermissionError` where
    one may not, `ValueError` for what can be no path, and another `OSError` for what may pass.
    """

    def status(self, path: str, through_links: bool = True) -> FileStatus:
        """What is at a path.

        Args:
            path: the path.
            through_links: of a symbolic link, what it leads to; links are nowhere but on file systems.
        """

    def entries(self, directory: str) -> list[Entry]:
        """What is in a directory, in no order; however many pages a list of it has."""

    def open(self, path: str, through_links: bool = True) -> OpenFile:
        """Open a file for reading, never waiting for a writer; anything may stand there."""

    def costs(self, path: str) -> Storage:
        """What requests cost there, as far as that is known by now."""

    def new_file(
        self, path: str, size: int, expected: Optional[Expected] = None, sending: Optional[Sending] = None
    ) -> NewFile:
        """Begin to write a file, in a directory that is made where it is not there.

        Args:
            path: the name that it is to get.
            size: bytes that it will have.
            expected: what it may replace; None for anything. Stores without conditional writes pass over it.
            sending: sends parts, in a store that takes files in parts; None to send them where they are written.
        """

    def part_bytes(self, size: int) -> int:
        """Bytes of a new file of a size that are held until they are written together; 0 where none are."""

    def write_whole(self, path: str, data: bytes) -> None:
        """Write a small file in place of another of its name, so that it is whole or not there; for good."""

    def make_directory(self, path: str) -> bool:
        """Make a directory, and those above it, unless it is there; whether it was made by this."""

    def touch(self, path: str) -> bool:
        """Give a file the time of now; False where it has to be written again for that, or is not there."""

    def flush(self, directory: str) -> None:
        """See that names that were made in a directory outlast a crash."""

    def check_root(self, path: str) -> None:
        """Insist that what nobody of ours makes is there, for a file to be written below: a bucket.

        Raises:
            InputError: it is not.
        """

    def remove(self, path: str) -> None:
        """Remove a file. An object store may not tell that there was none."""

    def remove_directory(self, path: str) -> None:
        """Remove a directory that is empty, and be it of marks that it is there."""

    def remove_dead(self, directory: str, complete: bool) -> None:
        """Remove what dead runs left of new files in a directory, as far as possible.

        Args:
            directory: where.
            complete: nothing is left to be written there.
        """


_endpoint: Optional[str] = None


def use_endpoint(url: Optional[str]) -> None:
    """Ask another service for objects than environment and profile name; None for that one again."""
    global _endpoint
    _endpoint = url


def endpoint() -> Optional[str]:
    """The URL of the service that is asked for objects; None for the one that environment and profile name."""
    return _endpoint


def in_object_store(path: str) -> bool:
    """Whether a path leads to an object store."""
    return path.startswith(OBJECTS)


def store_of(path: str) -> Store:
    """The store that a path lies in.

    Raises:
        UsageError: the path is none that its store can have.
        InputError: a package is missing.
    """
    if not in_object_store(path):
        check_scheme(path)
    if in_object_store(path):
        # Loaded where it is needed: it takes half a second.
        from reshard.storage.once import through
        from reshard.storage.s3 import s3_store

        return through(s3_store(path))
    from reshard.storage.local import LOCAL_STORE

    return LOCAL_STORE


def check_scheme(path: str) -> None:
    """Refuse what begins as a URL, and would be taken for the name of a directory.

    Raises:
        UsageError: it does, and not with s3://.
    """
    if path.startswith(_NEARLY) and not in_object_store(path):
        # A name that was put together, or typed, with one slash.
        raise UsageError(f"{path}: an object's path is s3://bucket/key, with two slashes", file=path)
    match = _SCHEME.match(path)
    if match is None or in_object_store(path):
        return
    scheme = match[1]
    hint = "write local paths without a scheme, and objects as s3://bucket/key"
    if scheme.lower() in _ENDPOINTS:
        place = "bucket/key" if scheme.lower() in _HOSTS else path[match.end() :]
        hint = f"objects of such services are read as s3://{place} --endpoint-url {_ENDPOINTS[scheme.lower()]}"
    raise UsageError(
        f"{path}: paths with {scheme}:// are not supported, only s3:// and local paths", file=path, hint=hint
    )


def storage_of(path: str) -> Storage:
    """What requests cost where a path lies, as far as that is known by now.

    Raises:
        UsageError: the path is none that its store can have.
        InputError: a package is missing.
    """
    return store_of(path).costs(path)


def entries_of_each(directories: Iterable[str]) -> Iterator[list[Entry]]:
    """What is in each of several directories, in their order; asked for at a time where a request takes a round trip.

    Raises:
        OSError: one cannot be listed.
    """
    return iter(for_each(lambda path: store_of(path).entries(path), list(directories)))


def for_each(ask: Callable[[str], T], paths: Sequence[str]) -> list[T]:
    """What is said of each of several paths, in their order; asked at a time where a request takes a round trip."""
    if len(paths) < 2 or not in_object_store(paths[0]):
        return [ask(path) for path in paths]
    # What was said in a block of `asked_once` is said in these threads, too.
    contexts = [contextvars.copy_context() for _ in paths]
    with ThreadPoolExecutor(min(_AT_A_TIME, len(paths))) as pool:
        return list(pool.map(lambda context, path: context.run(ask, path), contexts, paths))


def absolute(path: str) -> str:
    """A path from everywhere, whatever directory a command is given in."""
    if in_object_store(path):
        return path.rstrip("/")
    found = os.path.abspath(path)
    if os.pardir in path.split(os.sep) and os.path.realpath(path) != os.path.realpath(found):
        # Above what a link leads to is another directory than above the link.
        return os.path.realpath(path)
    return found


def is_absolute(path: str) -> bool:
    """Whether a path is one from everywhere."""
    return in_object_store(path) or os.path.isabs(path)


def common_directory(directories: Iterable[str]) -> str:
    """The directory that some directories, absolute and of one store, lie in or are."""
    found = os.path.commonpath(directories)
    # What stands before the first name has two slashes, of which one is lost.
    mark = OBJECTS.rstrip("/") + "/"
    return OBJECTS + found[len(mark) :] if found.startswith(mark) else found


def real(path: str) -> str:
    """A path without links."""
    return path.rstrip("/") if in_object_store(path) else os.path.realpath(path)


def unlinked(path: str) -> str:
    """A path for what is written, which goes through no link: as typed, or where links in it lead to."""
    if in_object_store(path):
        return path
    place = os.path.abspath(path)
    if os.path.realpath(path) == place:
        # Links that are left again with .. are in what was typed, and not on the way.
        return os.path.normpath(path) if os.pardir in path.split(os.sep) else path
    while not os.path.exists(place):
        if os.path.islink(place):
            # What a link leads to is not made: it may be a disk that is not mounted.
            return path
        place = os.path.dirname(place)
    return os.path.realpath(path)


def new_file(path: str, size: int, expected: Optional[Expected] = None, sending: Optional[Sending] = None) -> NewFile:
    """Begin to write a file, in a directory that is made where it is not there; see `Store.new_file`.

    Raises:
        OSError: it cannot be written.
    """
    return store_of(path).new_file(path, size, expected, sending)


def write_parts(path: str, size: int, parts: Iterable[Union[bytes, memoryview]]) -> int:
    """Write a file part by part; it gets its name when the last part has come.

    Args:
        path: the file; its directory is made where it is missing.
        size: bytes of all parts.
        parts: what is written, in order; an error that comes from them is passed on.

    Returns:
        A CRC-32 of all.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    offset = crc = 0
    with contextlib.closing(new_file(path, size)) as file:
        try:
            for data in _gathered(parts):
                file.write(offset, data)
                offset, crc = offset + len(data), zlib.crc32(data, crc)
            if offset != size or file.finish().size != size:
                raise OSError(errno.EIO, f"it is not of the {size:,} bytes that it should have", path)
            file.publish()
        finally:
            file.discard()
    return crc


def _gathered(parts: Iterable[Union[bytes, memoryview]]) -> Iterator[memoryview]:
    """The same bytes in parts that are worth a request."""
    held = bytearray()
    for part in parts:
        data = memoryview(part).cast("B")
        if not held and len(data) >= _WORTH_WRITING:
            yield data
            continue
        held += data
        if len(held) >= _WORTH_WRITING:
            yield memoryview(held)
            held = bytearray()
    yield memoryview(held)


def write_whole(path: str, data: bytes) -> None:
    """Write a small file so that under its name it is whole, or not there; for good. Its directory has to be there.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    store_of(path).write_whole(path, data)


def make_directory(path: str) -> bool:
    """Make a directory, and those above it, unless it is there; whether it was made. Object stores need none.

    Raises:
        OSError: it cannot be made.
    """
    return not in_object_store(path) and store_of(path).make_directory(path)


def remove_file(path: str) -> None:
    """Remove a file, if it is there.

    Raises:
        OSError: it cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        store_of(path).remove(path)
