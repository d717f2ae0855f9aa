"""Running tasks on a Dask cluster, and their progress."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Callable, Optional

from distributed import Client, Future
from distributed.scheduler import KilledWorker

from reshard._version import __version__
from reshard.cluster.tasks import INSTALL, TICK, TOPIC
from reshard.errors import InputError, ReshardError, RetryableError
from reshard.execute import Progress
from reshard.named_tuple import NamedTuple
from reshard.storage import remove_file, store_of, unlinked
from reshard.text.report import Report

_RETRIES = 2
# Seconds between checks of the cluster.
_CHECK_SECONDS = 5.0
# Timeout for items to end.
MAX_END_SECONDS = 10.0

# Before Python 3.11 a timeout of asyncio is not an OSError.
LOST = (OSError, asyncio.TimeoutError)
_CANCELLED = (asyncio.CancelledError, concurrent.futures.CancelledError)


class Item(NamedTuple):
    """Target ranks that one task writes, and the bytes of their tensor contents."""

    ranks: tuple[int, ...]
    nbytes: int


class Running:
    """Tasks on a cluster until all have ended, or an error stops them; a context manager.

    Args:
        client: connected to the cluster.
        address: the scheduler's, for messages.
        report: gets a warning if there are no workers.
        tasks: functions and their arguments; the client's version is added before these.
        run: name of the run in the tasks' events.
        on_event: called with an event's task number and the event.
        sign: file that represents the client: running tasks end when it is removed.
    """

    def __init__(
        self,
        client: Client,
        address: str,
        report: Report,
        tasks: Sequence[tuple[Any, ...]],
        run: str = "",
        on_event: Callable[[int, Mapping[str, Any]], None] = lambda number, message: None,
        sign: Optional[str] = None,
    ) -> None:
        self._client = client
        self._address = address
        self._report = report
        self._tasks = tasks
        self._run = run
        self._on_event = on_event
        self._sign = sign
        self._futures: list[Future] = []
        # Finished futures and events, from Dask's threads.
        self._news: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def __enter__(self) -> Running:
        if self._run:
            self._client.subscribe_topic(TOPIC, self._event)
        for function, *arguments in self._tasks:
            future = self._client.submit(function, __version__, *arguments, pure=False, retries=_RETRIES)
            self._futures.append(future)
            future.add_done_callback(self._news.put)
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        try:
            if self._sign is not None and error is not None:
                self._end()
        finally:
            with contextlib.suppress(*LOST, RuntimeError):
                self._client.cancel(self._futures)
                if self._run:
                    self._client.unsubscribe_topic(TOPIC)

    def outcomes(self) -> Iterator[tuple[int, Any]]:
        """Number and result of every task as they end; the result may be a `ReshardError`.

        Raises:
            ReshardError: the scheduler or the workers are lost.
        """
        numbers = {future.key: number for number, future in enumerate(self._futures)}
        looked = time.monotonic()
        while numbers:
            if time.monotonic() - looked > _CHECK_SECONDS:
                self._look_around()
                looked = time.monotonic()
            try:
                news = self._news.get(timeout=TICK)
            except queue.Empty:
                continue
            if isinstance(news, Future):
                yield numbers.pop(news.key), self._result(news)
            else:
                self._on_event(news["item"], news)

    def _event(self, event: tuple[float, Mapping[str, Any]]) -> None:
        if event[1].get("run") == self._run:
            self._news.put(event[1])

    def _look_around(self) -> None:
        if self._sign is not None:
            # Without locks, an old file counts as that of a dead run.
            with contextlib.suppress(OSError):
                store_of(self._sign).touch(unlinked(self._sign))
        if self._client.status != "running":
            raise lost_scheduler(self._address)
        with contextlib.suppress(*LOST):
            if not self._client.nthreads():
                self._report.warn("the Dask cluster has no workers at this moment; waiting for them")

    def _result(self, future: Future) -> Any:
        try:
            error = future.exception()
            if error is None and not future.cancelled():
                return future.result()
        except (*LOST, *_CANCELLED) as lost:
            raise lost_scheduler(self._address) from lost
        if error is None or isinstance(error, _CANCELLED):
            raise lost_scheduler(self._address)
        if isinstance(error, ReshardError):
            return error
        if isinstance(error, KilledWorker):
            worker = getattr(error.last_worker, "address", error.last_worker)
            return RetryableError(
                f"every worker that took the same ranks died; the last one was {worker}",
                hint="see the workers' logs; if memory ran out, use fewer threads per worker or a smaller --max-memory;"
                " then repeat the command",
            )
        if isinstance(error, ImportError):
            raise InputError(f"a Dask worker cannot load reshard: {error}", hint=INSTALL)
        raise error

    def _end(self) -> None:
        """End running tasks, so that the next run does not meet their last writes."""
        assert self._sign is not None
        with contextlib.suppress(OSError):
            remove_file(unlinked(self._sign))
        if self._client.status != "running":
            return
        with contextlib.suppress(*LOST, RuntimeError):
            at_work = {key for keys in self._client.processing().values() for key in keys}
            under_way = [future for future in self._futures if future.key in at_work and not future.done()]
            self._client.cancel([future for future in self._futures if future not in under_way])
            deadline = time.monotonic() + MAX_END_SECONDS
            while time.monotonic() < deadline and not all(future.done() for future in under_way):
                time.sleep(0.05)


class ItemProgress:
    """Progress of the items; a repeated task counts once."""

    def __init__(self, items: Sequence[Item], progress: Progress) -> None:
        self._items = items
        self._progress = progress
        self._bytes = [0] * len(items)
        self._committed: set[int] = set()

    def add_event(self, number: int, message: Mapping[str, Any]) -> None:
        """Add a task's event: written bytes, and committed ranks with their files' sizes."""
        self._wrote(number, message["bytes"])
        for name, count in message["overflows"].items():
            self._progress.overflowed(name, count)
        for rank, size in message["committed"]:
            self._commit(rank, size)

    def finished(self, number: int, sizes: Mapping[int, int]) -> None:
        """A task has written all of its ranks."""
        self._wrote(number, self._items[number].nbytes)
        for rank, size in sizes.items():
            self._commit(rank, size)

    def missing(self, number: int) -> list[int]:
        """Ranks of an item that may not be written."""
        ranks = self._items[number].ranks
        return [rank for rank in ranks if rank not in self._committed] or list(ranks)

    def _wrote(self, number: int, nbytes: int) -> None:
        nbytes = min(nbytes, self._items[number].nbytes)
        if nbytes > self._bytes[number]:
            self._progress.wrote(nbytes - self._bytes[number])
            self._bytes[number] = nbytes

    def _commit(self, rank: int, size: int) -> None:
        if rank not in self._committed:
            self._committed.add(rank)
            self._progress.committed(rank, size)


def lost_scheduler(address: str) -> RetryableError:
    """The error for a lost scheduler."""
    return RetryableError(
        f"the Dask scheduler at {address} is gone, or has dropped the work",
        hint="start it again and repeat the command",
    )
