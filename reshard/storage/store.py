"""Where files lie: on file systems, or in an object store; the one protocol through which sources are reached.

A path says by itself which store it is of: ``s3://bucket/prefix`` lies in an object store, everything else on
a file system. Stores say what goes wrong in the words of the system, as `OSError`, whatever they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Optional, Protocol

from reshard.errors import UsageError
from reshard.storage.costs import Storage
from reshard.storage.read import ReadableFile
from reshard.storage.status import FileStatus

OBJECTS = "s3://"
"""What paths in an object store begin with."""

# Listings that are worth having under way, where each takes a round trip.
_LISTINGS = 32


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


class Store(Protocol):
    """Looks at files and opens them, by path.

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


_endpoint: Optional[str] = None


def use_endpoint(url: Optional[str]) -> None:
    """Ask another service for objects than environment and profile name; None for that one again."""
    global _endpoint
    _endpoint = url


def endpoint() -> Optional[str]:
    """The URL of the service that is asked for objects; None for the one that environment and profile name."""
    return _endpoint


def refuse_object_store(path: str) -> None:
    """Refuse to write to an object store.

    Raises:
        UsageError: the path leads there.
    """
    if in_object_store(path):
        raise UsageError(
            f"{path}: lies in an object store, to which this is not written", file=path, hint="name a local path"
        )


def in_object_store(path: str) -> bool:
    """Whether a path leads to an object store."""
    return path.startswith(OBJECTS)


def store_of(path: str) -> Store:
    """The store that a path lies in.

    Raises:
        UsageError: the path is none that its store can have.
        InputError: a package is missing.
    """
    if in_object_store(path):
        # Loaded where it is needed: it takes half a second.
        from reshard.storage.s3 import s3_store

        return s3_store(path)
    from reshard.storage.local import LOCAL_STORE

    return LOCAL_STORE


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
    paths = list(directories)
    if not paths or not in_object_store(paths[0]):
        for path in paths:
            yield store_of(path).entries(path)
        return
    with ThreadPoolExecutor(min(_LISTINGS, len(paths))) as pool:
        yield from pool.map(lambda path: store_of(path).entries(path), paths)


def absolute(path: str) -> str:
    """A path from everywhere, whatever directory a command is given in."""
    return path.rstrip("/") if in_object_store(path) else os.path.abspath(path)


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
