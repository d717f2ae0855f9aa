"""--scheduler: the Dask cluster whose workers do the work."""

from __future__ import annotations

import contextlib
import logging
from typing import Optional

from reshard.convert import Options, Workers
from reshard.errors import UsageError
from reshard.text.report import Report


def cluster_of(
    scheduler: Optional[str], how: Options, jobs: Optional[int], report: Report
) -> contextlib.AbstractContextManager[Optional[Workers]]:
    """The Dask cluster of a scheduler, by address or scheduler file as typed; None where none was typed.

    Args:
        scheduler: as typed.
        how: how the conversion is carried out.
        jobs: CPUs of a work item, if typed.
        report: told what is found on the way.

    Raises:
        UsageError: it is neither, Dask is not installed, this is already one of several runs, or the workers could not
            have the key of encrypted files.
    """
    if scheduler is None:
        return contextlib.nullcontext()
    if how.share is not None:
        raise UsageError(
            "--shard and --scheduler exclude each other: a Dask cluster divides the target ranks by itself",
            hint="pass one of them",
        )
    if how.decryption is not None:
        # Refused before anything is done.
        _ = how.decryption.shared_file
    try:
        from reshard.cluster import Cluster, scheduler_address
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--scheduler needs Dask, which is not installed ({error})",
            hint="in the clone of reshard: pip install '.[dask]'",
        ) from error
    # Dask logs with tracebacks what is said here in words.
    for name in ("distributed", "distributed.client", "tornado.application", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return Cluster(scheduler_address(scheduler), how, jobs, report)
