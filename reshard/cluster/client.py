"""The client: checks addresses and workers, and distributes the items."""

from __future__ import annotations

import contextlib
import errno
import os
import pydoc
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Callable, Optional

from distributed import Client, Security
from distributed.comm.addressing import get_address_host_port, parse_address
from distributed.comm.core import FatalCommClosedError
from distributed.comm.registry import get_backend

from reshard._version import __version__
from reshard.checkpoints import CheckpointIndex, FileHandles
from reshard.cluster.running import LOST, MAX_END_SECONDS, Item, ItemProgress, Running, lost_scheduler
from reshard.cluster.tasks import INSTALL, Work, check_crc, invisible_paths, not_visible, packed, write_targets
from reshard.convert import Options
from reshard.errors import DamagedCheckpointError, InputError, ReshardError, RetryableError, UnwritableError, UsageError
from reshard.execute import Progress
from reshard.forms.registry import counted_as
from reshard.plan.groups import MAX_GROUP, bundles
from reshard.plan.plan import Plan
from reshard.plan.request import Request
from reshard.storage import UnfitError, exists, is_absolute, read_small, too_long
from reshard.storage.json_text import Fields, parse_json
from reshard.text.report import Report
from reshard.text.wording import rank_ranges

# A scheduler file of many workers has some hundred KB.
_MAX_FILE = 64 << 20
# Optional scheme, name or address (IPv6 in brackets), port.
_ADDRESS = re.compile(
    r"(?:[a-z][a-z0-9]{0,31}://)?(?:[\w.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}(?:%[\w.-]{1,32})?\]):(\d{1,5})", re.ASCII
)
_ENCRYPTED = ("tls", "wss")
_ITEMS_PER_THREAD = 4
# More workers may come during the run.
_MIN_ITEMS = 32


class Cluster:
    """The workers of a Dask cluster for a prepared conversion; a context manager.

    Connects on the first request, with the security settings of Dask's configuration.

    Args:
        address: the scheduler's.
        options: of the conversion; memory is that of one item.
        jobs: CPUs of an item; by default the workers' threads are divided among the items.
        report: gets a warning if there are no workers.
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
            # A lost scheduler was reported before.
            with contextlib.suppress(*LOST, RuntimeError):
                self._connected.close(timeout=MAX_END_SECONDS)

    def check(self, plan: Plan) -> None:
        """Connect, and check the version of reshard everywhere and the source files on the workers.

        Raises:
            UsageError: Dask cannot use the address.
            InputError: a worker lacks something.
            RetryableError: the scheduler cannot be reached.
        """
        # A function of the standard library also runs where reshard is missing.
        question = (pydoc.locate, "reshard._version.__version__")
        with self._lost_if_silent():
            _check_version(self._client.run_on_scheduler(*question), "the Dask scheduler")
        for worker, version in self._ask(*question).items():
            _check_version(version, f"Dask worker {worker}")
        paths = list(plan.checkpoint.files.values())
        keys = [] if self._options.decryption is None else [self._options.decryption.shared_file]
        self._check_visible({paths[0], paths[-1], *keys})

    def check_crcs(
        self, files: Sequence[CheckpointIndex], handles: FileHandles
    ) -> Mapping[str, DamagedCheckpointError]:
        """Check the CRCs of source files, each in a task of its own; see `convert.Workers`."""
        paths = [_absolute(index.path) for index in files]
        # Only metadata places tensors in archives.
        archives = [(index, handles.placement(index.path)) if index.archived else None for index in files]
        packs = [packed((self._options.decryption, archive)) for archive in archives]
        tasks = [(check_crc, each, path, self._options.max_memory) for each, path in zip(packs, paths)]
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
        self._check_visible({os.path.dirname(sign), sign})
        with self._lost_if_silent():
            threads = max(1, sum(self._client.nthreads().values()))
        items = _items(plan, work, threads)
        options = self._options._replace(
            jobs=self._jobs or max(1, threads // len(items)),
            crc="never",
            adding=True,
            share=None,
        )
        run = os.urandom(8).hex()
        work_bytes = packed(Work(run, _elsewhere(plan), options, sources, sign, self._jobs is not None))
        reported = ItemProgress(items, progress)
        failures: dict[int, ReshardError] = {}
        tasks = [(write_targets, work_bytes, number, item.ranks) for number, item in enumerate(items)]
        with Running(self._client, self._address, self._report, tasks, run, reported.add_event, sign) as running:
            for number, outcome in running.outcomes():
                if not isinstance(outcome, ReshardError):
                    reported.finished(number, outcome)
                elif outcome.status != 1 or isinstance(outcome, UnwritableError):
                    raise outcome
                else:
                    failures[number] = outcome
        if failures:
            first = failures[min(failures)]
            missing = [rank for number in failures for rank in reported.missing(number)]
            first.message += f"\nnot written: {rank_ranges(missing, counted_as(plan.form.name))}"
            raise first

    @property
    def _client(self) -> Client:
        if self._connected is None:
            _check_address(self._address)
            try:
                self._connected = Client(self._address, name="reshard", set_as_default=False)
            except FatalCommClosedError as error:
                raise UsageError(
                    f"the Dask scheduler at {self._address} and this machine do not agree on encryption: "
                    f"{error if str(error) else error.__cause__}",
                    hint="use certificates of one authority everywhere; docs/many-machines.md shows Dask's settings",
                ) from error
            except LOST as error:
                raise RetryableError(
                    f"the Dask scheduler at {self._address} cannot be reached: {error}",
                    hint="check that it runs and that this machine can reach its address",
                ) from error
        return self._connected

    @contextlib.contextmanager
    def _lost_if_silent(self) -> Iterator[None]:
        try:
            yield
        except LOST as error:
            raise lost_scheduler(self._address) from error

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        """The result of every worker that is not lost meanwhile."""
        with self._lost_if_silent():
            answers = self._client.run(function, *arguments, on_error="return")
        results = {worker: answer for worker, answer in answers.items() if not isinstance(answer, LOST)}
        for answer in results.values():
            if isinstance(answer, Exception):
                raise answer
        return results

    def _check_visible(self, paths: Iterable[str]) -> None:
        for worker, invisible in self._ask(invisible_paths, sorted(map(_absolute, paths))).items():
            if invisible:
                raise not_visible(invisible, worker)


def _items(plan: Plan, work: Sequence[int], threads: int) -> list[Item]:
    sizes = plan.data_bytes(work)
    # Idle workers cost more than several readers of the same rows.
    together = max(1, min(MAX_GROUP, len(work) // threads))
    groups = plan.reading_groups(work, together)
    count = max(_MIN_ITEMS, _ITEMS_PER_THREAD * threads)
    return [Item(ranks, sum(sizes[rank] for rank in ranks)) for ranks in bundles(groups, sizes, count)]


def _elsewhere(plan: Plan) -> Request:
    """The request for another process: absolute paths, and the chosen step."""
    request = plan.request
    src = request.src
    return request._replace(
        src=_absolute(src) if isinstance(src, str) else {rank: _absolute(path) for rank, path in src.items()},
        dst=_absolute(request.dst),
        damaged={_absolute(path): why for path, why in request.damaged.items()},
        step=plan.checkpoint.step or request.step,
    )


def _absolute(path: str) -> str:
    """The absolute path, not normalised: with links `a/..` may be another directory."""
    return path if is_absolute(path) else os.path.join(os.getcwd(), path)


def _check_version(version: Optional[str], who: str) -> None:
    if version != __version__:
        state = "has no reshard" if version is None else f"has reshard {version}"
        raise InputError(f"{who} {state}, this machine has {__version__}", hint=INSTALL)


def scheduler_address(typed: str) -> str:
    """The address of a scheduler, typed or from its scheduler file.

    Raises:
        UsageError: it is neither an address nor a scheduler file.
    """
    if "://" in typed:
        _check_form(typed)
        return typed
    if not exists(typed) and _ADDRESS.fullmatch(typed):
        return typed
    try:
        address = Fields(parse_json(read_small(typed, _MAX_FILE)), "the file").text("address")
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise too_long(typed) from error
        raise UsageError(
            f"{typed}: is no address such as tcp://host:8786, and cannot be read as a scheduler file: "
            f"{error.strerror or error}",
            file=typed,
        ) from error
    except UnfitError as error:
        raise UsageError(
            f"{typed}: is not a scheduler file: {error}",
            file=typed,
            hint="dask scheduler --scheduler-file FILE writes one",
        ) from error
    _check_form(address, file=typed)
    return address


def _check_form(address: str, file: Optional[str] = None) -> None:
    """Refuse anything but ``scheme://host:port`` before Dask parses it."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[1]) < 1 << 16:
        shown = address if len(address) < 80 else f"{address[:80]}..."
        where = "" if file is None else f"{file}: "
        raise UsageError(
            f"{where}Dask cannot use this address: {shown!r} is not of the form tcp://host:8786", file=file
        )


def _check_address(address: str) -> None:
    """Refuse an address that Dask cannot use: a client with such an address would not close."""
    try:
        scheme, _ = parse_address(address)
        get_backend(scheme)
        get_address_host_port(address)
        security = Security()
        if scheme in _ENCRYPTED and security.get_connection_args("client").get("ssl_context") is None:
            raise ValueError("Dask's configuration has no certificates for TLS")
        if scheme not in _ENCRYPTED and security.require_encryption:
            raise ValueError("Dask's configuration requires encryption (tls://)")
    except (ValueError, ImportError, RuntimeError, OSError) as error:
        raise UsageError(f"{address}: Dask cannot use this address: {error}") from error
