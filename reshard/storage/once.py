"""Cache of looks at object stores while one step of a command finds out what is there.

Many rooms look at a source and know nothing of each other: is it a directory, of which form, which ranks are there.
On file systems that costs nothing. In an object store each look is a round trip, and answers that differ, because
somebody writes there meanwhile, would fit no checkpoint.
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
# Attributes of a store that write nothing.
_LOOKS = ("check_own", "check_root", "costs", "free", "open", "own_names", "place", "try_lock", "volume")
_FACTS = ("at_a_time", "conditional", "flush", "missing_right", "part_bytes", "special_files")
_Absent = (FileNotFoundError, NotADirectoryError)
_Status = Union[FileStatus, OSError]
_Entries = Union[list[DirectoryEntry], OSError]


class _LookCache:
    """Results of looks, by path without a slash in the end.

    Attributes:
        valid: nothing was written since the first.
    """

    def __init__(self) -> None:
        self.valid = True
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


_cache: ContextVar[Optional[_LookCache]] = ContextVar("looks", default=None)


@contextlib.contextmanager
def asked_once() -> Iterator[None]:
    """Cache looks at object stores in this block and thread: what is at a path, and what is in a directory.

    For blocks that find out what is there. The first write in one ends the cache. Files are opened anew each time.
    """
    if _cache.get() is not None:
        yield
        return
    token = _cache.set(_LookCache())
    try:
        yield
    finally:
        _cache.reset(token)


def asks_once(function: _F) -> _F:
    """Run a function in such a block."""

    @functools.wraps(function)
    def asking(*arguments: object, **named: object) -> object:
        with asked_once():
            return function(*arguments, **named)

    return asking  # type: ignore[return-value]


def listed(path: str) -> Optional[DirectoryEntry]:
    """The entry of a path in the list of its directory, if such a block has cached that; else None."""
    cache = _cache.get()
    if cache is None or not cache.valid:
        return None
    directory, _, name = path.rstrip("/").rpartition("/")
    return cache.named(directory).get(name)


def through(store: Store) -> Store:
    """A store; in such a block with its cache."""
    cache = _cache.get()
    return store if cache is None or not cache.valid else cast(Store, _Once(store, cache))


class _Once:
    """A store whose looks are cached.

    Args:
        store: the store.
        cache: results so far.
    """

    def __init__(self, store: Store, cache: _LookCache) -> None:
        self._store = store
        self._cache = cache

    def status(self, path: str, through_links: bool = True) -> FileStatus:
        """What is at a path; no links are there."""
        if not self._cache.valid:
            return self._store.status(path, through_links)
        key = path.rstrip("/")
        found = self._cache.statuses.get(key)
        if found is None:
            found = self._cache.statuses[key] = self._unlisted(key) or self._ask(path)
        if isinstance(found, OSError):
            raise found
        return found

    def entries(self, directory: str) -> list[DirectoryEntry]:
        """What is in a directory."""
        if not self._cache.valid:
            return self._store.entries(directory)
        found = self._cache.entries.get(directory.rstrip("/"))
        if found is None:
            found = self._keep(directory, lambda: self._store.entries(directory))
        if isinstance(found, OSError):
            raise found
        return found

    def __getattr__(self, name: str) -> Any:
        """Everything else of the store; whatever may write ends the cache."""
        if name not in _LOOKS and name not in _FACTS:
            self._cache.valid = False
        return getattr(self._store, name)

    def _unlisted(self, key: str) -> Optional[OSError]:
        """The error for a path that is not in the list of its directory, if there is one."""
        directory, _, name = key.rpartition("/")
        if not isinstance(self._cache.entries.get(directory), list) or name in self._cache.named(directory):
            return None
        return FileNotFoundError(errno.ENOENT, "there is no such object", key)

    def _ask(self, path: str) -> _Status:
        # Of what has no ending it is asked next what is in it, which takes no longer when it is asked now.
        if path.rstrip("/") in self._cache.entries or os.path.splitext(path)[1]:
            return _or_absent(lambda: self._store.status(path))
        with ThreadPoolExecutor(1) as pool:
            listing: Future[list[DirectoryEntry]] = pool.submit(self._store.entries, path)
            status = _or_absent(lambda: self._store.status(path))
        with contextlib.suppress(OSError):
            self._keep(path, listing.result)
        return status

    def _keep(self, directory: str, ask: Callable[[], list[DirectoryEntry]]) -> _Entries:
        found = self._cache.entries[directory.rstrip("/")] = _or_absent(ask)
        return found


def _or_absent(ask: Callable[[], _T]) -> Union[_T, OSError]:
    """The result, or the error for a path where nothing is; other errors are raised, as a retry may help."""
    try:
        return ask()
    except _Absent as error:
        return error
