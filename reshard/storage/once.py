"""Finding out what lies in an object store without asking the same twice.

What a source is, is found out by many that know nothing of each other: is it a directory, is it of this form, of
that one, which ranks are there. On file systems that costs nothing. In an object store each question is a round
trip, and answers that differ, since somebody writes there meanwhile, would make sense to nobody.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Callable, Optional, TypeVar, Union

from reshard.storage.costs import Storage
from reshard.storage.status import FileStatus
from reshard.storage.store import Entry, Expected, NewFile, OpenFile, Sending, Store

_F = TypeVar("_F", bound=Callable[..., object])
_T = TypeVar("_T")
_Absent = (FileNotFoundError, NotADirectoryError)
_Status = Union[FileStatus, OSError]
_Entries = Union[list[Entry], OSError]


class _Said:
    """What was said of paths so far, by path without a slash in the end.

    Attributes:
        counts: whether it still does: nobody has written anything.
    """

    def __init__(self) -> None:
        self.counts = True
        self.statuses: dict[str, _Status] = {}
        self.entries: dict[str, _Entries] = {}
        self._named: dict[str, dict[str, Entry]] = {}

    def named(self, directory: str) -> dict[str, Entry]:
        """What is in a directory, by name; nothing where it was not listed."""
        entries = self.entries.get(directory)
        if not isinstance(entries, list):
            return {}
        if directory not in self._named:
            self._named[directory] = {entry.name: entry for entry in entries}
        return self._named[directory]


_said: ContextVar[Optional[_Said]] = ContextVar("said", default=None)


@contextlib.contextmanager
def asked_once() -> Iterator[None]:
    """In this block, and in this thread, object stores are asked once what is at a path, and what is in a directory.

    For blocks that find out what is there; once something is written in one, all is asked anew. Files are opened anew
    each time.
    """
    if _said.get() is not None:
        yield
        return
    token = _said.set(_Said())
    try:
        yield
    finally:
        _said.reset(token)


def asks_once(function: _F) -> _F:
    """A function whose body is such a block."""

    @functools.wraps(function)
    def asking(*arguments: object, **named: object) -> object:
        with asked_once():
            return function(*arguments, **named)

    return asking  # type: ignore[return-value]


def listed(path: str) -> Optional[Entry]:
    """What stands at a path by the list of its directory, where such a block has seen one that has it; else None."""
    said = _said.get()
    if said is None or not said.counts:
        return None
    directory, _, name = path.rstrip("/").rpartition("/")
    return said.named(directory).get(name)


def through(store: Store) -> Store:
    """A store, or in such a block what it has said."""
    said = _said.get()
    return store if said is None or not said.counts else _Once(store, said)


class _Once:
    """A store that is not asked again what it has said.

    Args:
        store: the store.
        said: what it has said.
    """

    def __init__(self, store: Store, said: _Said) -> None:
        self._store = store
        self._said = said

    def status(self, path: str, through_links: bool = True) -> FileStatus:
        """What is at a path; no links are there."""
        if not self._said.counts:
            return self._store.status(path, through_links)
        key = path.rstrip("/")
        found = self._said.statuses.get(key)
        if found is None:
            found = self._said.statuses[key] = self._unlisted(key) or self._ask(path)
        if isinstance(found, OSError):
            raise found
        return found

    def entries(self, directory: str) -> list[Entry]:
        """What is in a directory."""
        if not self._said.counts:
            return self._store.entries(directory)
        found = self._said.entries.get(directory.rstrip("/"))
        if found is None:
            found = self._keep(directory, lambda: self._store.entries(directory))
        if isinstance(found, OSError):
            raise found
        return found

    def open(self, path: str, through_links: bool = True) -> OpenFile:
        """Open a file for reading."""
        return self._store.open(path, through_links)

    def costs(self, path: str) -> Storage:
        """What requests cost."""
        return self._store.costs(path)

    def new_file(
        self, path: str, size: int, expected: Optional[Expected] = None, sending: Optional[Sending] = None
    ) -> NewFile:
        """Begin to write a file."""
        return self._written().new_file(path, size, expected, sending)

    def part_bytes(self, size: int) -> int:
        """Bytes of a new file that are held until they are written."""
        return self._store.part_bytes(size)

    def write_whole(self, path: str, data: bytes) -> None:
        """Write a small file."""
        self._written().write_whole(path, data)

    def make_directory(self, path: str) -> bool:
        """Make a directory."""
        return self._written().make_directory(path)

    def touch(self, path: str) -> bool:
        """Give a file the time of now."""
        return self._written().touch(path)

    def flush(self, directory: str) -> None:
        """See that names outlast a crash."""
        self._store.flush(directory)

    def check_root(self, path: str) -> None:
        """Insist on the bucket."""
        self._store.check_root(path)

    def remove(self, path: str) -> None:
        """Remove a file."""
        self._written().remove(path)

    def remove_directory(self, path: str) -> None:
        """Remove a directory."""
        self._written().remove_directory(path)

    def remove_dead(self, directory: str, complete: bool) -> None:
        """Remove what dead runs left."""
        self._written().remove_dead(directory, complete)

    def _written(self) -> Store:
        """The store, in which something is about to change."""
        self._said.counts = False
        return self._store

    def _unlisted(self, key: str) -> Optional[OSError]:
        """The error for a path that is not in the list of its directory, if there is one."""
        directory, _, name = key.rpartition("/")
        if not isinstance(self._said.entries.get(directory), list) or name in self._said.named(directory):
            return None
        return FileNotFoundError(errno.ENOENT, "there is no such object", key)

    def _ask(self, path: str) -> _Status:
        # Of what has no ending it is asked next what is in it, which takes no longer when it is asked now.
        if path.rstrip("/") in self._said.entries or os.path.splitext(path)[1]:
            return _or_absent(lambda: self._store.status(path))
        with ThreadPoolExecutor(1) as pool:
            listing: Future[list[Entry]] = pool.submit(self._store.entries, path)
            status = _or_absent(lambda: self._store.status(path))
        with contextlib.suppress(OSError):
            self._keep(path, listing.result)
        return status

    def _keep(self, directory: str, ask: Callable[[], list[Entry]]) -> _Entries:
        found = self._said.entries[directory.rstrip("/")] = _or_absent(ask)
        return found


def _or_absent(ask: Callable[[], _T]) -> Union[_T, OSError]:
    """What is said, or the error that says that there is nothing; others may pass."""
    try:
        return ask()
    except _Absent as error:
        return error
