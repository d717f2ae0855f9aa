"""Pools of threads, whose library is loaded with the first pool, and locks that are free in forked children."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

_T = TypeVar("_T")


class Renewed(Protocol):
    """Has threads, locks or connections that a forked child must not use."""

    def renew(self) -> None:
        """Begin anew, in a child, without them."""


_RENEWED: weakref.WeakSet[Renewed] = weakref.WeakSet()


def _renew_all() -> None:
    for owner in list(_RENEWED):
        owner.renew()


os.register_at_fork(after_in_child=_renew_all)


def renew_in_children(owner: Renewed) -> None:
    """Call ``owner.renew()`` in every forked child: the parent's other threads do not run there."""
    _RENEWED.add(owner)


class cached_property(functools.cached_property[_T]):
    """A property that is computed at its first use, perhaps by several threads; without its lock before Python 3.12."""

    def __init__(self, function: Callable[[Any], _T]) -> None:
        super().__init__(function)
        # One lock for all objects, which a forked child would wait for.
        self.lock = contextlib.nullcontext()


class ThreadLock:
    """A lock that is free in forked children, where no thread would release it."""

    def __init__(self) -> None:
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def thread_pool(threads: int, name: str = "reshard") -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(threads, name)


def wait_for(futures: Sequence[Future[Any]]) -> None:
    if futures:
        from concurrent.futures import wait

        wait(futures)
