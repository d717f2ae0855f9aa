"""Pools of threads. Their library is loaded with the first pool: short commands on local files need none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor


def thread_pool(threads: int, name: str = "reshard") -> ThreadPoolExecutor:
    """A pool of at most this number of threads, whose names begin with ``name``."""
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(threads, name)


def wait_for(futures: Sequence[Future[Any]]) -> None:
    """Wait until all have ended in any way."""
    if futures:
        from concurrent.futures import wait

        wait(futures)
