"""All stores, and the store of a path.

The scheme determines the store: ``s3://bucket/prefix`` is in an object store, a path without a scheme on a file
system.

Many rooms inspect a source independently: its form, its ranks, its directories. On file systems that is cheap. In an
object store each request takes a round trip, and results that change in between, because another program writes there,
would fit no checkpoint. So listings and statuses of object stores are cached for one step of a command.
"""

from __future__ import annotations

import contextlib
import contextvars
import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar, cast

from reshard.errors import UsageError
from reshard.storage.store import DirectoryEntry, FileStatus, Storage, Store
from reshard.threads import thread_pool

if TYPE_CHECKING:
    from concurrent.futures import Future

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(?!/)")
_HOSTS = ("http", "https")
# URLs of services with S3's protocol, by the schemes of their own clients.
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
# Attributes of a store that do not write.
_READING = ("at_a_time", "costs", "flush", "open", "part_bytes", "place", "space", "special_files")
_Absent = (FileNotFoundError, NotADirectoryError)
_Status = FileStatus | OSError
_Entries = list[DirectoryEntry] | OSError

_endpoint: str | None = None


def use_endpoint(url: str | None) -> None:
    global _endpoint
    _endpoint = url


def endpoint() -> str | None:
    """The URL of the service for objects; None for the setting in environment or profile."""
    return _endpoint


def _local(path: str) -> Store:
    from reshard.storage.local import LOCAL_STORE

    return LOCAL_STORE


def _s3(path: str) -> Store:
    # Imported on demand: it takes half a second.
    from reshard.storage.s3.store import s3_store

    return s3_store(path)


STORES: dict[str, Callable[[str], Store]] = {"": _local, "s3": _s3}
"""Functions that return the store of a path, by scheme; local paths, without a scheme, first."""


def scheme_of(path: str) -> str:
    """The scheme of a path, as in ``s3://``; empty for a local one."""
    match = _SCHEME.match(path)
    return match[0] if match is not None and match[1] in STORES else ""


def store_of(path: str) -> Store:
    """The store of a path.

    Raises:
        UsageError: the store allows no such path.
        InputError: a package is missing.
    """
    scheme = scheme_of(path)
    if scheme:
        store, cache = STORES[scheme[:-3]](path), _cache.get()
        return store if cache is None or not cache.valid else cast(Store, _CachedStore(store, cache))
    check_scheme(path)
    return STORES[""](path)


def check_scheme(path: str) -> None:
    """Refuse a URL of an unsupported scheme, which is also a valid name of a directory."""
    almost = _ONE_SLASH.match(path)
    if almost is not None and almost[1] in STORES:
        # A joined or mistyped path with one slash.
        raise UsageError(f"{path}: an object's path is {almost[1]}://bucket/key, with two slashes", file=path)
    match = _SCHEME.match(path)
    if match is None or match[1] in STORES:
        return
    scheme = match[1]
    hint = "write local paths without a scheme, and objects as s3://bucket/key"
    if scheme.lower() in _ENDPOINTS:
        place = "bucket/key" if scheme.lower() in _HOSTS else path[match.end() :]
        hint = f"objects of such services are read as s3://{place} --endpoint-url {_ENDPOINTS[scheme.lower()]}"
    raise UsageError(
        f"{path}: paths with {scheme}:// are not supported, only s3:// and local paths", file=path, hint=hint
    )


def same_store(first: str, second: str) -> bool:
    return scheme_of(first) == scheme_of(second)


def storage_of(path: str) -> Storage:
    """Costs of requests to a path."""
    return store_of(path).costs(path)


def for_each(call: Callable[[str], T], paths: Sequence[str]) -> list[T]:
    """The results of a function for each path, in order; `Store.at_a_time` paths concurrently."""
    together = store_of(paths[0]).at_a_time if paths else 1
    if len(paths) < 2 or together == 1:
        return [call(path) for path in paths]
    # The cache of `listings_cached` is shared with these threads.
    contexts = [contextvars.copy_context() for _ in paths]
    with thread_pool(min(together, len(paths))) as pool:
        return list(pool.map(lambda context, path: context.run(call, path), contexts, paths))


def absolute(path: str) -> str:
    """An absolute path, whatever the working directory."""
    if scheme_of(path):
        return path.rstrip("/")
    result = os.path.abspath(path)
    if os.pardir in path.split(os.sep) and os.path.realpath(path) != os.path.realpath(result):
        # The parent of a link's target is not the parent of the link.
        return os.path.realpath(path)
    return result


def is_absolute(path: str) -> bool:
    return bool(scheme_of(path)) or os.path.isabs(path)


def common_directory(directories: Iterable[str]) -> str:
    """The deepest directory that contains some directories, absolute and of one store."""
    paths = list(directories)
    scheme = scheme_of(paths[0])
    return scheme + os.path.commonpath([path[len(scheme) :] for path in paths])


def real(path: str) -> str:
    """A path without links."""
    return path.rstrip("/") if scheme_of(path) else os.path.realpath(path)


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


_cache: ContextVar[_ListingCache | None] = ContextVar("listings", default=None)


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


def cached_entry(path: str) -> DirectoryEntry | None:
    """The entry of a path in the cached list of its directory; None outside such a block."""
    cache = _cache.get()
    if cache is None or not cache.valid:
        return None
    directory, _, name = path.rstrip("/").rpartition("/")
    return cache.named(directory).get(name)


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
        """The other attributes of the store; an attribute that may write ends the cache."""
        if name not in _READING:
            self._cache.valid = False
        return getattr(self._store, name)

    def _unlisted(self, key: str) -> OSError | None:
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


def _or_absent(look: Callable[[], T]) -> T | OSError:
    """The result, or the error for a missing path; other errors are raised: a retry may help."""
    try:
        return look()
    except _Absent as error:
        return error
