"""Functions that run on the workers of a Dask cluster."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, TypeVar, Union

from distributed import get_worker

from reshard._version import __version__
from reshard.checkpoints import FileHandles, read_index
from reshard.convert import Options, Part, prepare
from reshard.convert.source_crcs import damaged_files
from reshard.errors import InputError, ReshardError, RetryableError
from reshard.execute import ExecutionOptions, Progress
from reshard.plan.request import Request
from reshard.storage import status_at, store_of
from reshard.text.report import Report
from reshard.text.wording import some_names

TOPIC = "reshard"
# Seconds between a task's events.
TICK = 0.5
# Timeout for a new file of another machine to appear.
_MAX_SEEN_SECONDS = 5.0

INSTALL = "the scheduler and all workers need the version of reshard that is installed here"

T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """The common parameters of a run's items; paths are absolute.

    Attributes:
        run: name of the run.
        request: the conversion.
        options: its options; the jobs are the limit of one item.
        sources: see `convert.Part`.
        sign: file that represents the client.
        fixed_jobs: the worker's number of threads does not limit the jobs.
    """

    run: str
    request: Request
    options: Options
    sources: str
    sign: str
    fixed_jobs: bool


def packed(parameters: object) -> bytes:
    """Bytes of a task's parameters: Dask must not unpack them, because another version of reshard could not."""
    return zlib.compress(pickle.dumps(parameters))


def _unpacked(data: bytes) -> Any:
    return pickle.loads(zlib.decompress(data))


def invisible_paths(paths: Sequence[str]) -> list[str]:
    """The paths that do not exist on this machine."""
    deadline = time.monotonic() + _MAX_SEEN_SECONDS
    while True:
        invisible = [path for path in paths if status_at(path) is None]
        if not invisible or time.monotonic() > deadline:
            return invisible
        time.sleep(0.1)


def not_visible(paths: Sequence[str], worker: str) -> InputError:
    """The error for paths that a worker lacks."""
    return InputError(
        f"Dask worker {worker} does not see {some_names(paths, 1)}",
        file=paths[0],
        hint="SRC, DST and the key file need the same paths on all workers and on this machine",
    )


def check_crc(version: str, packed: bytes, path: str, max_memory: int) -> Union[list[str], ReshardError]:
    """Check a source file's CRC; returns notes, or the error if the file is damaged.

    Args:
        version: the client's.
        packed: the key of encrypted files, or None; and of archives the tensors to check and their places, or None.
        path: the file.
        max_memory: bytes for all buffers.
    """

    def check() -> list[str]:
        report = Report()
        key, archive = _unpacked(packed)
        with FileHandles(decryption=key) as handles:
            if archive is not None:
                handles.place(path, archive[1])
            index = read_index(handles, path) if archive is None else archive[0]._replace(path=path)
            for error in damaged_files([index], ExecutionOptions(1, max_memory), handles, report, Progress()).values():
                raise error
        return report.notes

    return _outcome(version, check)


def write_targets(
    version: str, packed: bytes, number: int, ranks: tuple[int, ...]
) -> Union[dict[int, int], ReshardError]:
    """Write target ranks; returns the sizes of their files in bytes."""

    def write() -> dict[int, int]:
        work: Work = _unpacked(packed)
        worker = get_worker()
        if invisible_paths([os.path.dirname(work.sign)]):
            raise not_visible([os.path.dirname(work.sign)], worker.address)
        reporter = _Reporter(work, number, worker.log_event)
        reporter.check_client()
        jobs = work.options.jobs if work.fixed_jobs else min(work.options.jobs, worker.state.nthreads)
        options = work.options._replace(jobs=jobs, part=Part(frozenset(ranks), work.sources))
        with prepare(work.request, options, progress=reporter) as prepared:
            # The client may have ended while the worker planned.
            reporter.check_client()
            summary = prepared.carry_out()
        return {rank: store_of(path).status(path).size for rank, path in summary.target_files.items()}

    return _outcome(version, write)


def _outcome(version: str, function: Callable[[], T]) -> Union[T, ReshardError]:
    """The result of a function, or its error: raised if Dask should retry, otherwise returned."""
    worker = get_worker().address
    if version != __version__:
        return InputError(f"Dask worker {worker} has reshard {__version__}, not {version}", hint=INSTALL)
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
    """The client has ended; the message is the file that represented it."""


class _Reporter(Progress):
    """Reports an item's progress to the client, and ends the work if the client has ended."""

    def __init__(self, work: Work, number: int, log_event: Callable[[str, Any], None]) -> None:
        self._work = work
        self._number = number
        self._log_event = log_event
        self._bytes = 0
        self._committed: list[tuple[int, int]] = []
        self._overflows: Counter[str] = Counter()
        self._last = time.monotonic()

    def wrote(self, count: int) -> None:
        """Add bytes, and report from time to time."""
        self._bytes += count
        if time.monotonic() - self._last > TICK:
            self._report()

    def committed(self, rank: int, size: int) -> None:
        """Report."""
        self._committed.append((rank, size))
        self._report()

    def overflowed(self, name: str, count: int) -> None:
        """Add; the next file's report contains it."""
        self._overflows[name] += count

    def check_client(self) -> None:
        """Check that the client is running.

        Raises:
            _ClientGone: it has ended.
        """
        # An unreachable file is no sign of an ended client.
        with contextlib.suppress(RetryableError, InputError):
            if status_at(self._work.sign) is None:
                raise _ClientGone(self._work.sign)

    def _report(self) -> None:
        self._last = time.monotonic()
        self.check_client()
        message = {
            "run": self._work.run,
            "item": self._number,
            "bytes": self._bytes,
            "committed": self._committed,
            "overflows": dict(self._overflows),
        }
        self._log_event(TOPIC, message)
        self._committed = []
        self._overflows.clear()
