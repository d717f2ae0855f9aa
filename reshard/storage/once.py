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
from typing import Any, Callable, Optional, TypeVar, Union, cast

from reshard.storage.store import DirectoryEntry, FileStatus, Store

_F = TypeVar("_F", bound=Callable[..., object])
_T = TypeVar("_T")
# Attributes of a store that change nothing that was looked at.
_LOOKS = ("at_a_time", "check_root", "conditional", "costs", "free", "missing_right", "open", "part_bytes", "place", "volume")
_CHANGES_NOTHING = frozenset(["check_own", "flush", "own_names", "special_files", "try_lock", *_LOOKS])
_Absent = (FileNotFoundError, NotADirectoryError)
_Status = Union[FileStatus, OSError]
_Entries = Union[list[DirectoryEntry], OSError]


class _Answers:
    """What was said of paths so far, by path without a slash in the end.

    Attributes:
        counts: whether it still does: nobody has written anything.
    """

    def __init__(self) -> None:
        self.counts = True
        self.statuses: dict[str, _Status] = {}
        self.entries: dict[str, _Entries] = {}
        self._named: dict[str, dict[str, DirectoryEntry]] = {}

    def named(self, directory: str) -> dict[str, DirectoryEntry]:
        """What is in a directory, by name; nothing where it was not listed."""
        entries = self.entries.get(directory)
        if not isinstance(entries, list):
            return {}
        if directory not in self._named:
            self._named[directory] = {entry.name: entry for entry in entries}
        return self._named[directory]


_said: ContextVar[Optional[_Answers]] = ContextVar("said", default=None)


@contextlib.contextmanager
def asked_once() -> Iterator[None]:
    """In this block, and in this thread, object stores are asked once what is at a path, and what is in a directory.

    For blocks that find out what is there; once something is written in one, all is asked anew. Files are opened anew
    each time.
    """
    if _said.get() is not None:
        yield
        return
    token = _said.set(_Answers())
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


def listed(path: str) -> Optional[DirectoryEntry]:
    """What stands at a path by the list of its directory, where such a block has seen one that has it; else None."""
    said = _said.get()
    if said is None or not said.counts:
        return None
    directory, _, name = path.rstrip("/").rpartition("/")
    return said.named(directory).get(name)


def through(store: Store) -> Store:
    """A store, or in such a block what it has said."""
    said = _said.get()
    return store if said is None or not said.counts else cast(Store, _Once(store, said))


class _Once:
    """A store that is not asked again what it has said.

    Args:
        store: the store.
        said: what it has said.
    """

    def __init__(self, store: Store, said: _Answers) -> None:
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

    def entries(self, directory: str) -> list[DirectoryEntry]:
        """What is in a directory."""
        if not self._said.counts:
            return self._store.entries(directory)
        found = self._said.entries.get(directory.rstrip("/"))
        if found is None:
            found = self._keep(directory, lambda: self._store.entries(directory))
        if isinstance(found, OSError):
            raise found
        return found

    def __getattr__(self, name: str) -> Any:
        """Everything else of the store; whatever may change something ends that answers count."""
        if name not in _CHANGES_NOTHING:
            self._said.counts = False
        return getattr(self._store, name)

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
            listing: Future[list[DirectoryEntry]] = pool.submit(self._store.entries, path)
            status = _or_absent(lambda: self._store.status(path))
        with contextlib.suppress(OSError):
            self._keep(path, listing.result)
        return status

    def _keep(self, directory: str, ask: Callable[[], list[DirectoryEntry]]) -> _Entries:
        found = self._said.entries[directory.rstrip("/")] = _or_absent(ask)
        return found


def _or_absent(ask: Callable[[], _T]) -> Union[_T, OSError]:
    """What is said, or the error that says that there is nothing; others may pass."""
    try:
        return ask()
    except _Absent as error:
        return error
