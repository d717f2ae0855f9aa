"""A conversion's work on the workers of a Dask cluster that is there already.

1. The conversion is planned and checked here, like any other (`transform.prepare`).
2. Its target ranks are divided into items, several per worker thread, about equal in bytes; ranks that
   read the same rows stay together.
3. A worker that takes an item runs an ordinary conversion of these ranks. Whatever makes many runs fill
   one target directory together makes items safe too: an item that is lost with its worker and done
   again on another goes on where it was.
4. Items tell how far they are in events, and end when the file that stands for the client is gone.

Dask distributes the items, gives those of lost workers to others, and repeats those that failed for a
reason that may pass.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import pickle
import pydoc
import queue
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Callable, NamedTuple, Optional, TypeVar, Union

from distributed import Client, Future, Security, get_worker
from distributed.comm.addressing import get_address_host_port, parse_address
from distributed.comm.registry import get_backend
from distributed.scheduler import KilledWorker

from reshard._version import __version__
from reshard.checkpoints import CheckpointIndex, FileHandles, read_index
from reshard.errors import InputError, ReshardError, RetryableError, UnwritableError, UsageError
from reshard.execute import ExecutionOptions, Progress
from reshard.plan.conversion import Conversion, Request
from reshard.plan.shares import bundles
from reshard.report import Report
from reshard.source_crcs import check_source_crcs
from reshard.transform import Options, Part, prepare
from reshard.wording import rank_ranges, some_names

_TOPIC = "reshard"
_ITEMS_PER_THREAD = 4
# Workers may come while it runs.
_LEAST_ITEMS = 32
_RETRIES = 2
# Seconds: between a task's words, and between looks at the cluster.
_TICK = 0.5
_LOOK = 5.0
# Until a file made here is seen elsewhere, and until items notice that it is gone.
_SEEN_AFTER = 5.0
_ENDED_AFTER = 10.0

T = TypeVar("T")

# Before Python 3.11 a timeout of asyncio is no OSError.
_LOST = (OSError, asyncio.TimeoutError)
_CANCELLED = (asyncio.CancelledError, concurrent.futures.CancelledError)
_HOST_AND_PORT = re.compile(r"[^/\s]+:\d{1,5}")


def scheduler_address(typed: str) -> str:
    """The address of a scheduler, as typed or as its scheduler file says.

    Raises:
        UsageError: it is neither.
    """
    if "://" in typed:
        return typed
    if not os.path.exists(typed) and _HOST_AND_PORT.fullmatch(typed):
        return typed
    try:
        with open(typed, encoding="utf-8") as file:
            address = json.load(file)["address"]
        if not isinstance(address, str):
            raise TypeError
    except OSError as error:
        raise UsageError(
            f"{typed}: is no address such as tcp://host:8786, and cannot be read as a scheduler file: "
            f"{error.strerror or error}",
            file=typed,
        ) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(
            f"{typed}: is not a scheduler file", file=typed, hint="dask scheduler --scheduler-file FILE writes one"
        ) from error
    return address


def _check_address(address: str) -> None:
    """Refuse what Dask cannot connect to; a client that fails for such a reason does not close."""
    try:
        scheme, _ = parse_address(address)
        get_backend(scheme)
        get_address_host_port(address)
        if scheme == "tls" and Security().get_connection_args("client").get("ssl_context") is None:
            raise ValueError("Dask's configuration names no certificates for TLS")
    except (ValueError, ImportError, RuntimeError, OSError) as error:
        raise UsageError(f"{address}: Dask cannot use this address: {error}") from error


class _Item(NamedTuple):
    """Target ranks that one task writes, and the bytes of their tensor contents."""

    ranks: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class _Work:
    """What all items of a run have in common; paths are absolute.

    Attributes:
        run: a name for the run.
        request: what is converted to what.
        options: how; its jobs are the CPUs of one item at the most.
        sources: see `transform.Part`.
        sign: the file that is there while the client is.
        fixed_jobs: the worker's number of threads does not bound the jobs.
    """

    run: str
    request: Request
    options: Options
    sources: str
    sign: str
    fixed_jobs: bool


class Cluster:
    """The workers of a Dask cluster, to carry out a prepared conversion; a context manager.

    Connects when there is something to do. Security is as Dask's configuration says.

    Args:
        address: the scheduler's.
        options: how the conversion is carried out; memory is that of one item.
        jobs: CPUs of an item; by default the workers' threads are divided among the items.
        report: told when there are no workers.
    """

    def __init__(self, address: str, options: Options, jobs: Optional[int], report: Report) -> None:
        self._address = address
        self._options = options
        self._jobs = jobs
        self._report = report
        self._connected: Optional[Client] = None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        if self._connected is not None:
            # Where the scheduler is gone, that has been said.
            with contextlib.suppress(*_LOST, RuntimeError):
                self._connected.close(timeout=_ENDED_AFTER)

    def check(self, conversion: Conversion) -> None:
        """Connect, and see that everybody has this version of reshard, and workers the source files.

        Raises:
            UsageError: the address makes no sense to Dask.
            InputError: a worker lacks something.
            RetryableError: the scheduler cannot be reached.
        """
        # Of the standard library, so that those without reshard can answer, too.
        question = (pydoc.locate, "reshard._version.__version__")
        with self._lost_if_silent():
            _check_version(self._client.run_on_scheduler(*question), "the Dask scheduler")
        for worker, version in self._ask(*question).items():
            _check_version(version, f"Dask worker {worker}")
        paths = list(conversion.step.files.values())
        self._check_seen({paths[0], paths[-1]})

    def check_crcs(self, files: Sequence[CheckpointIndex]) -> None:
        """Check the CRCs of source files, each in a task of its own; see `transform.Workers`."""
        paths = [_absolute(index.path) for index in files]
        tasks = [(_check_crc, path, self._options.max_memory) for path in paths]
        with _Running(self._client, self._address, self._report, tasks) as running:
            for number, notes in running.outcomes():
                if isinstance(notes, ReshardError):
                    raise notes
                for note in notes:
                    self._report.note(note.replace(paths[number], files[number].path))

    def write(self, conversion: Conversion, sources: str, sign: str, progress: Progress) -> None:
        """Write and record every target of a conversion, in tasks; see `transform.Workers`."""
        self._check_seen({os.path.dirname(sign), sign})
        with self._lost_if_silent():
            threads = max(1, sum(self._client.nthreads().values()))
        items = _items(conversion, threads)
        options = replace(
            self._options,
            jobs=self._jobs or max(1, threads // len(items)),
            crc="never",
            adding=True,
            share=None,
        )
        run = os.urandom(8).hex()
        work = _packed(_Work(run, _elsewhere(conversion), options, sources, sign, self._jobs is not None))
        told = _Told(items, progress)
        failures: dict[int, ReshardError] = {}
        tasks = [(_write_targets, work, number, item.ranks) for number, item in enumerate(items)]
        with _Running(self._client, self._address, self._report, tasks, run, told.heard, sign) as running:
            for number, outcome in running.outcomes():
                if not isinstance(outcome, ReshardError):
                    told.finished(number, outcome)
                elif outcome.status != 1 or isinstance(outcome, UnwritableError):
                    raise outcome
                else:
                    failures[number] = outcome
        if failures:
            first = failures[min(failures)]
            left = [rank for number in failures for rank in told.left(number)]
            first.message += f"\nnot written: {rank_ranges(left)}"
            raise first

    @property
    def _client(self) -> Client:
        if self._connected is None:
            _check_address(self._address)
            try:
                self._connected = Client(self._address, name="reshard", set_as_default=False)
            except _LOST as error:
                raise RetryableError(
                    f"the Dask scheduler at {self._address} cannot be reached: {error}",
                    hint="check that it runs, and that its address can be reached from here",
                ) from error
        return self._connected

    @contextlib.contextmanager
    def _lost_if_silent(self) -> Iterator[None]:
        try:
            yield
        except _LOST as error:
            raise _gone(self._address) from error

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        """What every worker answers; those that are lost meanwhile do not."""
        with self._lost_if_silent():
            answers = self._client.run(function, *arguments, on_error="return")
        found = {worker: answer for worker, answer in answers.items() if not isinstance(answer, _LOST)}
        for answer in found.values():
            if isinstance(answer, Exception):
                raise answer
        return found

    def _check_seen(self, paths: Iterable[str]) -> None:
        for worker, unseen in self._ask(_unseen, sorted(map(_absolute, paths))).items():
            if unseen:
                raise _not_seen(unseen, worker)


class _Running:
    """Tasks on a cluster, until all have ended, or something keeps them from it; a context manager.

    Args:
        client: connected to the cluster.
        address: the scheduler's, for messages.
        report: told when there are no workers.
        tasks: functions and their arguments; the client's version goes before these.
        run: which events are of these tasks.
        heard: called with an event's task, by number, and the event.
        sign: the file without which tasks that are under way end.
    """

    def __init__(
        self,
        client: Client,
        address: str,
        report: Report,
        tasks: Sequence[tuple[Any, ...]],
        run: str = "",
        heard: Callable[[int, Mapping[str, Any]], None] = lambda number, message: None,
        sign: Optional[str] = None,
    ) -> None:
        self._client = client
        self._address = address
        self._report = report
        self._tasks = tasks
        self._run = run
        self._heard = heard
        self._sign = sign
        self._futures: list[Future] = []
        # Filled by Dask's threads: a future that has ended, or an event.
        self._news: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def __enter__(self) -> _Running:
        if self._run:
            self._client.subscribe_topic(_TOPIC, self._event)
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
            with contextlib.suppress(*_LOST, RuntimeError):
                self._client.cancel(self._futures)
                if self._run:
                    self._client.unsubscribe_topic(_TOPIC)

    def outcomes(self) -> Iterator[tuple[int, Any]]:
        """Number and result of every task as they end; the result may be a `ReshardError`.

        Raises:
            ReshardError: no more can be expected.
        """
        numbers = {future.key: number for number, future in enumerate(self._futures)}
        looked = time.monotonic()
        while numbers:
            if time.monotonic() - looked > _LOOK:
                self._look_around()
                looked = time.monotonic()
            try:
                news = self._news.get(timeout=_TICK)
            except queue.Empty:
                continue
            if isinstance(news, Future):
                yield numbers.pop(news.key), self._result(news)
            else:
                self._heard(news["item"], news)

    def _event(self, event: tuple[float, Mapping[str, Any]]) -> None:
        if event[1].get("run") == self._run:
            self._news.put(event[1])

    def _look_around(self) -> None:
        if self._sign is not None:
            # Untouched for long it would be taken for a dead run's, where locks tell nothing.
            with contextlib.suppress(OSError):
                os.utime(self._sign)
        if self._client.status != "running":
            raise _gone(self._address)
        with contextlib.suppress(*_LOST):
            if not self._client.nthreads():
                self._report.warn("the Dask cluster has no workers at this moment; waiting for them")

    def _result(self, future: Future) -> Any:
        try:
            error = future.exception()
            if error is None and not future.cancelled():
                return future.result()
        except (*_LOST, *_CANCELLED) as lost:
            raise _gone(self._address) from lost
        if error is None or isinstance(error, _CANCELLED):
            raise _gone(self._address)
        if isinstance(error, ReshardError):
            return error
        if isinstance(error, KilledWorker):
            worker = getattr(error.last_worker, "address", error.last_worker)
            return RetryableError(
                f"every worker that took the same ranks died, the last one was {worker}",
                hint="see the workers' logs; where memory ran out, fewer threads per worker or a smaller --max-memory "
                "help; then the same command goes on",
            )
        if isinstance(error, ImportError):
            raise InputError(f"a Dask worker cannot load reshard: {error}", hint=_INSTALL)
        raise error

    def _end(self) -> None:
        """End the tasks that are under way, so that whoever comes next does not meet their last writes."""
        assert self._sign is not None
        with contextlib.suppress(OSError):
            os.unlink(self._sign)
        if self._client.status != "running":
            return
        with contextlib.suppress(*_LOST, RuntimeError):
            at_work = {key for keys in self._client.processing().values() for key in keys}
            under_way = [future for future in self._futures if future.key in at_work and not future.done()]
            self._client.cancel([future for future in self._futures if future not in under_way])
            deadline = time.monotonic() + _ENDED_AFTER
            while time.monotonic() < deadline and not all(future.done() for future in under_way):
                time.sleep(0.05)


class _Told:
    """What is known of how far items are; a task that is done anew does not count twice."""

    def __init__(self, items: Sequence[_Item], progress: Progress) -> None:
        self._items = items
        self._progress = progress
        self._bytes = [0] * len(items)
        self._committed: set[int] = set()

    def heard(self, number: int, message: Mapping[str, Any]) -> None:
        """A task tells how many bytes it has written, and which ranks, with their files' sizes."""
        self._wrote(number, message["bytes"])
        for rank, size in message["committed"]:
            self._commit(rank, size)

    def finished(self, number: int, sizes: Mapping[int, int]) -> None:
        """A task has written all of its ranks."""
        self._wrote(number, self._items[number].nbytes)
        for rank, size in sizes.items():
            self._commit(rank, size)

    def left(self, number: int) -> list[int]:
        """Ranks of an item that are not known to be written."""
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


def _items(conversion: Conversion, threads: int) -> list[_Item]:
    sizes = conversion.data_bytes_by_rank()
    # Better several workers read the same rows than that some have nothing to do.
    together = max(1, min(conversion.most_together, len(conversion.ranks) // threads))
    groups = conversion.reading_groups(conversion.ranks, together)
    count = max(_LEAST_ITEMS, _ITEMS_PER_THREAD * threads)
    return [_Item(ranks, sum(sizes[rank] for rank in ranks)) for ranks in bundles(groups, sizes, count)]


def _elsewhere(conversion: Conversion) -> Request:
    """The request as another process has to be given it; a step that is saved meanwhile changes nothing."""
    request = conversion.request
    src = request.src
    return replace(
        request,
        src=_absolute(src) if isinstance(src, str) else {rank: _absolute(path) for rank, path in src.items()},
        dst=_absolute(request.dst),
        step=request.step if conversion.step.step is None else str(conversion.step.step),
    )


def _absolute(path: str) -> str:
    """Not normalised, because links may make `a/..` something else."""
    return os.path.join(os.getcwd(), path)


_INSTALL = "the scheduler and all workers need the version of reshard that is installed here"


def _check_version(version: Optional[str], who: str) -> None:
    if version != __version__:
        has = "has no reshard" if version is None else f"has reshard {version}"
        raise InputError(f"{who} {has}, here is {__version__}", hint=_INSTALL)


def _not_seen(paths: Sequence[str], worker: str) -> InputError:
    return InputError(
        f"Dask worker {worker} does not see {some_names(paths, 1)}",
        file=paths[0],
        hint="SRC and DST must be there under the same paths on all workers, and on this machine",
    )


def _gone(address: str) -> RetryableError:
    return RetryableError(
        f"the Dask scheduler at {address} is gone, or has dropped the work",
        hint="when it is there again, the same command goes on",
    )


def _packed(work: _Work) -> bytes:
    # Packed here, because a worker with another version could not unpack what Dask would hand it.
    return zlib.compress(pickle.dumps(work))


# What follows runs on workers.


def _unseen(paths: Sequence[str]) -> list[str]:
    """Those of these paths that do not exist here."""
    deadline = time.monotonic() + _SEEN_AFTER
    while True:
        unseen = [path for path in paths if not os.path.exists(path)]
        if not unseen or time.monotonic() > deadline:
            return unseen
        time.sleep(0.1)


def _check_crc(version: str, path: str, max_memory: int) -> Union[list[str], ReshardError]:
    """Check a source file's CRC; returns what is to be noted."""

    def check() -> list[str]:
        report = Report()
        with FileHandles() as handles:
            check_source_crcs([read_index(handles, path)], ExecutionOptions(1, max_memory), handles, report, Progress())
        return report.notes

    return _answer(version, check)


def _write_targets(
    version: str, packed: bytes, number: int, ranks: tuple[int, ...]
) -> Union[dict[int, int], ReshardError]:
    """Write target ranks; returns the sizes of their files in bytes."""

    def write() -> dict[int, int]:
        work: _Work = pickle.loads(zlib.decompress(packed))
        worker = get_worker()
        if _unseen([os.path.dirname(work.sign)]):
            raise _not_seen([os.path.dirname(work.sign)], worker.address)
        telling = _Telling(work, number, worker.log_event)
        telling.see_client()
        jobs = work.options.jobs if work.fixed_jobs else min(work.options.jobs, worker.state.nthreads)
        options = replace(work.options, jobs=jobs, part=Part(frozenset(ranks), work.sources))
        with prepare(work.request, options, progress=telling) as prepared:
            # Planning may have taken long.
            telling.see_client()
            summary = prepared.carry_out(telling)
        return {rank: os.stat(path).st_size for rank, path in summary.target_files.items()}

    return _answer(version, write)


def _answer(version: str, function: Callable[[], T]) -> Union[T, ReshardError]:
    """What a function returns, or its error: raised where Dask is to try again, else returned."""
    worker = get_worker().address
    if version != __version__:
        return InputError(f"Dask worker {worker} has reshard {__version__}, not {version}", hint=_INSTALL)
    try:
        return function()
    except _ClientGone as error:
        return RetryableError(f"{error} is gone, so work on Dask worker {worker} ended")
    except ReshardError as error:
        error.message += f" (Dask worker {worker})"
        if error.status == 1:
            raise
        return error


class _ClientGone(Exception):
    """Nobody wants the work any more; names the file that stood for the client."""


class _Telling(Progress):
    """Tells the client how far an item is, and ends the work when the client is gone."""

    def __init__(self, work: _Work, number: int, log_event: Callable[[str, Any], None]) -> None:
        self._work = work
        self._number = number
        self._log_event = log_event
        self._bytes = 0
        self._committed: list[tuple[int, int]] = []
        self._last = time.monotonic()

    def wrote(self, count: int) -> None:
        """Count, and tell now and then."""
        self._bytes += count
        if time.monotonic() - self._last > _TICK:
            self._tell()

    def committed(self, rank: int, size: int) -> None:
        """Tell."""
        self._committed.append((rank, size))
        self._tell()

    def see_client(self) -> None:
        """See that the client is still there.

        Raises:
            _ClientGone: it is not.
        """
        # Where it cannot be told, it is there.
        with contextlib.suppress(OSError):
            try:
                os.stat(self._work.sign)
            except FileNotFoundError:
                raise _ClientGone(self._work.sign) from None

    def _tell(self) -> None:
        self._last = time.monotonic()
        self.see_client()
        message = {
            "run": self._work.run,
            "item": self._number,
            "bytes": self._bytes,
            "committed": self._committed,
        }
        self._log_event(_TOPIC, message)
        self._committed = []
