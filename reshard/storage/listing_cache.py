"""Cache of object listings and statuses for one step of a command.

Many rooms inspect a source independently: its form, its ranks, its directories. On file systems that is cheap.
In an object store each request takes a round trip, and results that change in between, because
another program writes there, would fit no checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Callable, Optional, TypeVar, Union, cast

from reshard.storage.store import DirectoryEntry, FileStatus, Store
from reshard.threads import thread_pool

if TYPE_CHECKING:
    from concurrent.futures import Future

_F = TypeVar("_F", bound=Callable[..., object])
_T = TypeVar("_T")
# Attributes of a store that do not write.
_LOOKS = ("costs", "open", "place", "space")
_FACTS = ("at_a_time", "flush", "part_bytes", "special_files")
_Absent = (FileNotFoundError, NotADirectoryError)
_Status = Union[FileStatus, OSError]
_Entries = Union[list[DirectoryEntry], OSError]


class _ListingCache:
    """Results, by path without a trailing slash.

    Attributes:
        valid: no write has happened since the first result.
    """

    def __init__(self) -> None:
        self.valid = True
        self.statuses: dict[str, _Status] = {}
        self.entries: dict[str, _Entries] = {}
        self._named: dict[str, dict[str, DirectoryEntry]] = {}

    def named(self, directory: str) -> dict[str, DirectoryEntry]:
        entries = self.entries.get(directory)
        if not isinstance(entries, list):
            return {}
        if directory not in self._named:
            self._named[directory] = {entry.name: entry for entry in entries}
        return self._named[directory]


_cache: ContextVar[Optional[_ListingCache]] = ContextVar("listings", default=None)


@contextlib.contextmanager
def listings_cached() -> Iterator[None]:
    """Cache statuses and listings of object stores in this block and thread.

    For blocks that inspect a source. The first write in a block ends the cache. Files are opened anew each time.
    """
    if _cache.get() is not None:
        yield
        return
    token = _cache.set(_ListingCache())
    try:
        yield
    finally:
        _cache.reset(token)


def caches_listings(function: _F) -> _F:
    """Run a function in such a block."""

    @functools.wraps(function)
    def cached(*arguments: object, **keywords: object) -> object:
        with listings_cached():
            return function(*arguments, **keywords)

    return cached  # type: ignore[return-value]


def cached_entry(path: str) -> Optional[DirectoryEntry]:
    """The entry of a path in the cached list of its directory; None outside such a block."""
    cache = _cache.get()
    if cache is None or not cache.valid:
        return None
    directory, _, name = path.rstrip("/").rpartition("/")
    return cache.named(directory).get(name)


def with_cache(store: Store) -> Store:
    """A store; inside such a block, with its cache."""
    cache = _cache.get()
    return store if cache is None or not cache.valid else cast(Store, _CachedStore(store, cache))


class _CachedStore:
    """A store with cached statuses and listings."""

    def __init__(self, store: Store, cache: _ListingCache) -> None:
        self._store = store
        self._cache = cache

    def status(self, path: str, through_links: bool = True) -> FileStatus:
        if not self._cache.valid:
            return self._store.status(path, through_links)
        key = path.rstrip("/")
        status = self._cache.statuses.get(key)
        if status is None:
            status = self._cache.statuses[key] = self._unlisted(key) or self._status(path)
        if isinstance(status, OSError):
            raise status
        return status

    def entries(self, directory: str) -> list[DirectoryEntry]:
        if not self._cache.valid:
            return self._store.entries(directory)
        entries = self._cache.entries.get(directory.rstrip("/"))
        if entries is None:
            entries = self._keep(directory, lambda: self._store.entries(directory))
        if isinstance(entries, OSError):
            raise entries
        return entries

    def __getattr__(self, name: str) -> Any:
        """The other attributes of the store; those that may write end the cache."""
        if name not in _LOOKS and name not in _FACTS:
            self._cache.valid = False
        return getattr(self._store, name)

    def _unlisted(self, key: str) -> Optional[OSError]:
        """The error for a path that is missing in the cached list of its directory; None otherwise."""
        directory, _, name = key.rpartition("/")
        if not isinstance(self._cache.entries.get(directory), list) or name in self._cache.named(directory):
            return None
        return FileNotFoundError(errno.ENOENT, "no object has this name", key)

    def _status(self, path: str) -> _Status:
        # A name without an ending is probably a directory: its listing in parallel takes no longer.
        if path.rstrip("/") in self._cache.entries or os.path.splitext(path)[1]:
            return _or_absent(lambda: self._store.status(path))
        with thread_pool(1) as pool:
            listing: Future[list[DirectoryEntry]] = pool.submit(self._store.entries, path)
            status = _or_absent(lambda: self._store.status(path))
        with contextlib.suppress(OSError):
            self._keep(path, listing.result)
        return status

    def _keep(self, directory: str, listing: Callable[[], list[DirectoryEntry]]) -> _Entries:
        entries = self._cache.entries[directory.rstrip("/")] = _or_absent(listing)
        return entries


def _or_absent(look: Callable[[], _T]) -> Union[_T, OSError]:
    """The result, or the error for a missing path; other errors are raised: a retry may help."""
    try:
        return look()
    except _Absent as error:
        return error
