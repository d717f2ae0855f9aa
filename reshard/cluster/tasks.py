"""What runs on the workers of a Dask cluster."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
# Seconds between a task's words.
TICK = 0.5
# Seconds until a file made elsewhere is seen here.
_SEEN_AFTER = 5.0

INSTALL = "the scheduler and all workers need the version of reshard that is installed here"

T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """What all items of a run have in common; paths are absolute.

    Attributes:
        run: a name for the run.
        request: what is converted to what.
        options: how; its jobs are the CPUs of one item at the most.
        sources: see `convert.Part`.
        sign: the file that is there while the client is.
        fixed_jobs: the worker's number of threads does not bound the jobs.
    """

    run: str
    request: Request
    options: Options
    sources: str
    sign: str
    fixed_jobs: bool


def packed(given: object) -> bytes:
    """What tasks are handed; Dask is not to unpack it, which a worker with another version could not."""
    return zlib.compress(pickle.dumps(given))


def _unpacked(given: bytes) -> Any:
    return pickle.loads(zlib.decompress(given))


def unseen_paths(paths: Sequence[str]) -> list[str]:
    """Those of these paths that do not exist here."""
    deadline = time.monotonic() + _SEEN_AFTER
    while True:
        unseen = [path for path in paths if status_at(path) is None]
        if not unseen or time.monotonic() > deadline:
            return unseen
        time.sleep(0.1)


def not_seen(paths: Sequence[str], worker: str) -> InputError:
    """The error for paths that a worker lacks."""
    return InputError(
        f"Dask worker {worker} does not see {some_names(paths, 1)}",
        file=paths[0],
        hint="SRC, DST and the file of a key must be there under the same paths on all workers, and on this machine",
    )


def check_crc(version: str, packed: bytes, path: str, max_memory: int) -> Union[list[str], ReshardError]:
    """Check a source file's CRC; returns what is to be noted, or the error where the file is damaged.

    Args:
        version: the client's.
        packed: the key of encrypted files, if there is one.
        path: the file.
        max_memory: bytes for all buffers.
    """

    def check() -> list[str]:
        report = Report()
        with FileHandles(decryption=_unpacked(packed)) as handles:
            indexes = [read_index(handles, path)]
            for error in damaged_files(indexes, ExecutionOptions(1, max_memory), handles, report, Progress()).values():
                raise error
        return report.notes

    return _answer(version, check)


def write_targets(
    version: str, packed: bytes, number: int, ranks: tuple[int, ...]
) -> Union[dict[int, int], ReshardError]:
    """Write target ranks; returns the sizes of their files in bytes."""

    def write() -> dict[int, int]:
        work: Work = _unpacked(packed)
        worker = get_worker()
        if unseen_paths([os.path.dirname(work.sign)]):
            raise not_seen([os.path.dirname(work.sign)], worker.address)
        telling = _Telling(work, number, worker.log_event)
        telling.see_client()
        jobs = work.options.jobs if work.fixed_jobs else min(work.options.jobs, worker.state.nthreads)
        options = replace(work.options, jobs=jobs, part=Part(frozenset(ranks), work.sources))
        with prepare(work.request, options, progress=telling) as prepared:
            # Planning may have taken long.
            telling.see_client()
            summary = prepared.carry_out(telling)
        return {rank: store_of(path).status(path).size for rank, path in summary.target_files.items()}

    return _answer(version, write)


def _answer(version: str, function: Callable[[], T]) -> Union[T, ReshardError]:
    """What a function returns, or its error: raised where Dask is to try again, else returned."""
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
    """Nobody wants the work any more; names the file that stood for the client."""


class _Telling(Progress):
    """Tells the client how far an item is, and ends the work when the client is gone."""

    def __init__(self, work: Work, number: int, log_event: Callable[[str, Any], None]) -> None:
        self._work = work
        self._number = number
        self._log_event = log_event
        self._bytes = 0
        self._committed: list[tuple[int, int]] = []
        self._overflows: Counter[str] = Counter()
        self._last = time.monotonic()

    def wrote(self, count: int) -> None:
        """Count, and tell now and then."""
        self._bytes += count
        if time.monotonic() - self._last > TICK:
            self._tell()

    def committed(self, rank: int, size: int) -> None:
        """Tell."""
        self._committed.append((rank, size))
        self._tell()

    def overflowed(self, name: str, count: int) -> None:
        """Count; it is told with the next file."""
        self._overflows[name] += count

    def see_client(self) -> None:
        """See that the client is still there.

        Raises:
            _ClientGone: it is not.
        """
        # Where it cannot be told, it is there.
        with contextlib.suppress(RetryableError, InputError):
            if status_at(self._work.sign) is None:
                raise _ClientGone(self._work.sign)

    def _tell(self) -> None:
        self._last = time.monotonic()
        self.see_client()
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
