"""The client's side: what the workers are to do, and whether they can."""

from __future__ import annotations

import contextlib
import os
import pydoc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Callable, Optional

from distributed import Client
from distributed.comm.core import FatalCommClosedError

from reshard._version import __version__
from reshard.checkpoints import CheckpointIndex
from reshard.cluster.address import check_address
from reshard.cluster.running import ENDED_AFTER, LOST, Item, Running, Told, gone
from reshard.cluster.tasks import INSTALL, Work, check_crc, not_seen, packed, unseen_paths, write_targets
from reshard.convert import Options
from reshard.errors import DamagedCheckpointError, InputError, ReshardError, RetryableError, UnwritableError, UsageError
from reshard.execute import Progress
from reshard.forms.registry import counted_as
from reshard.plan.groups import MOST_MEMBERS, bundles
from reshard.plan.plan import Plan
from reshard.plan.request import Request
from reshard.storage import is_absolute
from reshard.text.report import Report
from reshard.text.wording import rank_ranges

_ITEMS_PER_THREAD = 4
# Workers may come while it runs.
_LEAST_ITEMS = 32


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
            with contextlib.suppress(*LOST, RuntimeError):
                self._connected.close(timeout=ENDED_AFTER)

    def check(self, plan: Plan) -> None:
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
        paths = list(plan.checkpoint.files.values())
        keys = [] if self._options.decryption is None else [self._options.decryption.shared_file]
        self._check_seen({paths[0], paths[-1], *keys})

    def check_crcs(self, files: Sequence[CheckpointIndex]) -> Mapping[str, DamagedCheckpointError]:
        """Check the CRCs of source files, each in a task of its own; see `convert.Workers`."""
        paths = [_absolute(index.path) for index in files]
        key = packed(self._options.decryption)
        tasks = [(check_crc, key, path, self._options.max_memory) for path in paths]
        damaged: dict[str, DamagedCheckpointError] = {}
        with Running(self._client, self._address, self._report, tasks) as running:
            for number, outcome in running.outcomes():
                path = files[number].path
                if isinstance(outcome, DamagedCheckpointError):
                    outcome.message = outcome.message.replace(paths[number], path)
                    damaged[path] = outcome
                elif isinstance(outcome, ReshardError):
                    raise outcome
                else:
                    for note in outcome:
                        self._report.note(note.replace(paths[number], path))
        return damaged

    def write(self, plan: Plan, work: Sequence[int], sources: str, sign: str, progress: Progress) -> None:
        """Write and record targets of a conversion, in tasks; see `convert.Workers`."""
        self._check_seen({os.path.dirname(sign), sign})
        with self._lost_if_silent():
            threads = max(1, sum(self._client.nthreads().values()))
        items = _items(plan, work, threads)
        options = replace(
            self._options,
            jobs=self._jobs or max(1, threads // len(items)),
            crc="never",
            adding=True,
            share=None,
        )
        run = os.urandom(8).hex()
        handed = packed(Work(run, _elsewhere(plan), options, sources, sign, self._jobs is not None))
        told = Told(items, progress)
        failures: dict[int, ReshardError] = {}
        tasks = [(write_targets, handed, number, item.ranks) for number, item in enumerate(items)]
        with Running(self._client, self._address, self._report, tasks, run, told.heard, sign) as running:
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
            first.message += f"\nnot written: {rank_ranges(left, counted_as(plan.form.name))}"
            raise first

    @property
    def _client(self) -> Client:
        if self._connected is None:
            check_address(self._address)
            try:
                self._connected = Client(self._address, name="reshard", set_as_default=False)
            except FatalCommClosedError as error:
                raise UsageError(
                    f"the Dask scheduler at {self._address} and this machine do not agree on encryption: "
                    f"{error if str(error) else error.__cause__}",
                    hint="certificates of one authority are needed everywhere; "
                    "docs/many-machines.md tells how Dask is given them",
                ) from error
            except LOST as error:
                raise RetryableError(
                    f"the Dask scheduler at {self._address} cannot be reached: {error}",
                    hint="check that it runs, and that its address can be reached from here",
                ) from error
        return self._connected

    @contextlib.contextmanager
    def _lost_if_silent(self) -> Iterator[None]:
        try:
            yield
        except LOST as error:
            raise gone(self._address) from error

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        """What every worker answers; those that are lost meanwhile do not."""
        with self._lost_if_silent():
            answers = self._client.run(function, *arguments, on_error="return")
        found = {worker: answer for worker, answer in answers.items() if not isinstance(answer, LOST)}
        for answer in found.values():
            if isinstance(answer, Exception):
                raise answer
        return found

    def _check_seen(self, paths: Iterable[str]) -> None:
        for worker, unseen in self._ask(unseen_paths, sorted(map(_absolute, paths))).items():
            if unseen:
                raise not_seen(unseen, worker)


def _items(plan: Plan, work: Sequence[int], threads: int) -> list[Item]:
    sizes = plan.data_bytes(work)
    # Better several workers read the same rows than that some have nothing to do.
    together = max(1, min(MOST_MEMBERS, len(work) // threads))
    groups = plan.reading_groups(work, together)
    count = max(_LEAST_ITEMS, _ITEMS_PER_THREAD * threads)
    return [Item(ranks, sum(sizes[rank] for rank in ranks)) for ranks in bundles(groups, sizes, count)]


def _elsewhere(plan: Plan) -> Request:
    """The request as another process has to be given it; a step that is saved meanwhile changes nothing."""
    request = plan.request
    src = request.src
    return replace(
        request,
        src=_absolute(src) if isinstance(src, str) else {rank: _absolute(path) for rank, path in src.items()},
        dst=_absolute(request.dst),
        damaged={_absolute(path): why for path, why in request.damaged.items()},
        step=plan.checkpoint.step or request.step,
    )


def _absolute(path: str) -> str:
    """Not normalised, because links may make `a/..` something else."""
    return path if is_absolute(path) else os.path.join(os.getcwd(), path)


def _check_version(version: Optional[str], who: str) -> None:
    if version != __version__:
        has = "has no reshard" if version is None else f"has reshard {version}"
        raise InputError(f"{who} {has}, here is {__version__}", hint=INSTALL)
