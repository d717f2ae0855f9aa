"""Which stores there are, and which of them a path lies in.

A path says so by its scheme: ``s3://bucket/prefix`` lies in an object store, a path without a scheme on a file
system.
"""

from __future__ import annotations

import contextvars
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Optional, TypeVar

from reshard.errors import UsageError
from reshard.storage.costs import Storage
from reshard.storage.store import Store

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(?!/)")
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

_endpoint: Optional[str] = None


def use_endpoint(url: Optional[str]) -> None:
    """Ask another service for objects than environment and profile name; None for that one again."""
    global _endpoint
    _endpoint = url


def endpoint() -> Optional[str]:
    """The URL of the service that is asked for objects; None for the one that environment and profile name."""
    return _endpoint


def _local(path: str) -> Store:
    from reshard.storage.local import LOCAL_STORE

    return LOCAL_STORE


def _s3(path: str) -> Store:
    # Loaded where a path asks for it: it takes half a second.
    from reshard.storage.s3 import s3_store

    return s3_store(path)


STORES: dict[str, Callable[[str], Store]] = {"": _local, "s3": _s3}
"""What gives the store of a path, by scheme; of paths without a scheme first."""


def scheme_of(path: str) -> str:
    """What a path begins with, as in ``s3://``; empty for a local one."""
    match = _SCHEME.match(path)
    return match[0] if match is not None and match[1] in STORES else ""


def store_of(path: str) -> Store:
    """The store that a path lies in.

    Raises:
        UsageError: the path is none that its store can have.
        InputError: a package is missing.
    """
    scheme = scheme_of(path)
    if scheme:
        from reshard.storage.once import through

        return through(STORES[scheme[:-3]](path))
    check_scheme(path)
    return STORES[""](path)


def check_scheme(path: str) -> None:
    """Refuse what begins as a URL of no store, and would be taken for the name of a directory.

    Raises:
        UsageError: it does.
    """
    almost = _ONE_SLASH.match(path)
    if almost is not None and almost[1] in STORES:
        # A name that was put together, or typed, with one slash.
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


def same_store(path: str, other: str) -> bool:
    """Whether two paths lie in one store."""
    return scheme_of(path) == scheme_of(other)


def storage_of(path: str) -> Storage:
    """What requests cost where a path lies, as far as that is known by now.

    Raises:
        UsageError: the path is none that its store can have.
        InputError: a package is missing.
    """
    return store_of(path).costs(path)


def for_each(ask: Callable[[str], T], paths: Sequence[str]) -> list[T]:
    """What a function returns for each of several paths, in their order; `Store.at_a_time` of them together."""
    together = store_of(paths[0]).at_a_time if paths else 1
    if len(paths) < 2 or together == 1:
        return [ask(path) for path in paths]
    # What was said in a block of `asked_once` is said in these threads, too.
    contexts = [contextvars.copy_context() for _ in paths]
    with ThreadPoolExecutor(min(together, len(paths))) as pool:
        return list(pool.map(lambda context, path: context.run(ask, path), contexts, paths))


def absolute(path: str) -> str:
    """A path from everywhere, whatever directory a command is given in."""
    if scheme_of(path):
        return path.rstrip("/")
    found = os.path.abspath(path)
    if os.pardir in path.split(os.sep) and os.path.realpath(path) != os.path.realpath(found):
        # Above what a link leads to is another directory than above the link.
        return os.path.realpath(path)
    return found


def is_absolute(path: str) -> bool:
    """Whether a path is one from everywhere."""
    return bool(scheme_of(path)) or os.path.isabs(path)


def common_directory(directories: Iterable[str]) -> str:
    """The directory that some directories, absolute and of one store, lie in or are."""
    paths = list(directories)
    scheme = scheme_of(paths[0])
    return scheme + os.path.commonpath([path[len(scheme) :] for path in paths])


def real(path: str) -> str:
    """A path without links."""
    return path.rstrip("/") if scheme_of(path) else os.path.realpath(path)


def unlinked(path: str) -> str:
    """A path for what is written, which goes through no link: as typed, or where links in it lead to."""
    if scheme_of(path):
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
