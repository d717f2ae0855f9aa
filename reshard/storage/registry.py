"""All stores, and the store of a path.

The scheme determines the store: ``s3://bucket/prefix`` is in an object store, a path without a scheme on a file
system.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from reshard.errors import UsageError
from reshard.storage.store import Costs, Store
from reshard.threads import thread_pool

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
        return STORES[scheme[:-3]](path)
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


def costs_of(path: str) -> Costs:
    """Costs of requests to a path."""
    return store_of(path).costs(path)


def for_each(call: Callable[[str], T], paths: Sequence[str]) -> list[T]:
    """The results of a function for each path, in order; `Store.at_a_time` paths concurrently."""
    together = store_of(paths[0]).at_a_time if paths else 1
    if len(paths) < 2 or together == 1:
        return [call(path) for path in paths]
    with thread_pool(min(together, len(paths))) as pool:
        return list(pool.map(call, paths))


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
