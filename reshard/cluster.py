"""A conversion on the workers of a Dask cluster: each writes a share of the target, as ``--shard I/N`` does.

Workers see source and target under the same paths, and have the same version of reshard. Records in the target join
the shares, so a lost worker's share is written again by another, and the same command continues.
"""

from __future__ import annotations

import contextlib
import logging
import pydoc
from collections.abc import Iterator, Sequence
from dataclasses import replace

from distributed import Client, as_completed

from reshard._version import __version__
from reshard.asked import Conversion
from reshard.convert import WriteElsewhere, run
from reshard.convert.ends import request_of
from reshard.errors import InputError, ReshardError, RetryableError
from reshard.execute import Progress
from reshard.storage import exists, read_json, status_of_each
from reshard.text.messages import Report

# Shares of each thread: the last ones to end are small.
_SHARES = 2
_RETRIES = 2
_CONNECT_SECONDS = "30s"
_MAX_FILE = 1 << 20


def writer(scheduler: str, conversion: Conversion, report: Report) -> WriteElsewhere:
    """A function that writes target files of a conversion on a cluster, for `convert.run`.

    Args:
        scheduler: its address, or its scheduler file.
        conversion: the conversion, which is planned and checked here.
        report: gets warnings of the workers.

    Raises:
        ReshardError: the scheduler file cannot be read.
    """
    address = scheduler
    if "://" not in scheduler and exists(scheduler):
        hint = "dask scheduler --scheduler-file FILE writes one"
        address = str((read_json(scheduler, _MAX_FILE, hint=hint) or {}).get("address"))

    def write(files: Sequence[int], progress: Progress) -> None:
        with _connected(address) as client:
            _write_shares(client, conversion, files, report, progress)

    return write


def _write_shares(
    client: Client, conversion: Conversion, files: Sequence[int], report: Report, progress: Progress
) -> None:
    threads = max(1, sum(client.nthreads().values()))
    count = min(len(files), _SHARES * threads)
    jobs = conversion.effort.jobs or max(1, threads // count)
    effort = replace(conversion.effort, jobs=jobs, check_replicas="never")
    shares = [replace(conversion, effort=effort, files=tuple(files[number::count])) for number in range(count)]
    futures = client.map(_convert, shares, pure=False, retries=_RETRIES)
    failures: list[ReshardError] = []
    try:
        for future in as_completed(futures):
            try:
                sizes, warnings = future.result()
            except ReshardError as error:
                failures.append(error)
                continue
            except Exception as error:
                failures.append(RetryableError(f"a Dask worker failed: {type(error).__name__}: {error}"))
                continue
            for text in warnings:
                report.warn(text)
            for file, size in sizes.items():
                progress.wrote(size)
                progress.committed(file, size)
    finally:
        client.cancel(futures)
    if failures:
        raise failures[0]


def _convert(conversion: Conversion) -> tuple[dict[int, int], list[str]]:
    """Write a share, on a worker: the sizes of its files, and warnings."""
    report = Report()
    summary = run(request_of(conversion, report), report).summary
    paths = summary.target_files
    return {file: status.size for file, status in zip(paths, status_of_each([*paths.values()])) if status}, [
        *summary.warnings
    ]


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Client]:
    """The client of a cluster whose workers have this version of reshard.

    Raises:
        InputError: a worker has another version.
        RetryableError: the scheduler cannot be reached.
    """
    # Dask logs the same errors with tracebacks.
    for name in ("distributed", "distributed.client", "tornado.application", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        client = Client(address, name="reshard", timeout=_CONNECT_SECONDS)
    except (OSError, ValueError, RuntimeError) as error:
        raise RetryableError(
            f"the Dask scheduler at {address} cannot be reached: {error}",
            hint="an address is of the form tcp://host:8786; check that the scheduler runs and is reachable from here",
        ) from error
    with client:
        # A function of the standard library also runs where reshard is missing.
        versions = client.run(pydoc.locate, "reshard._version.__version__")
        if not versions:
            raise RetryableError(f"the Dask cluster at {address} has no workers", hint="start workers: dask worker")
        for worker, version in versions.items():
            if version != __version__:
                state = "has no reshard" if version is None else f"has reshard {version}"
                raise InputError(
                    f"Dask worker {worker} {state}, this machine has {__version__}",
                    hint="install the same version of reshard for all workers",
                )
        yield client
