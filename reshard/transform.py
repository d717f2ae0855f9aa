"""A conversion from end to end: plan, checks, bytes, summary."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Callable, NamedTuple, Optional, Protocol

from reshard.checkpoints import CheckpointIndex, FileHandles
from reshard.checkpoints.storage import LOCAL, storage_of
from reshard.defaults import MAX_MEMORY
from reshard.errors import DamagedCheckpointError, IncompleteSourceError, RetryableError, UsageError
from reshard.execute import ExecutionOptions, Progress, convert
from reshard.execute.destination import Space, check_apart, check_disjoint, check_space, space_for
from reshard.given_command import given_command
from reshard.names import Total
from reshard.plan.conversion import Conversion, Request, plan, plan_as
from reshard.plan.pieces import TargetFile
from reshard.plan.recovery import Recovery
from reshard.plan.shares import share_of
from reshard.plan.totals import totals_of
from reshard.records import SourceSampler
from reshard.report import Report
from reshard.source_crcs import Check, SourceCrcs, damaged_files
from reshard.source_replicas import ReplicaCheck, compare_replicas
from reshard.swapped import SwapTest
from reshard.target_directory import TargetDirectory
from reshard.wording import plural, rank_ranges

_LONGEST_NAME = 255
# Network file systems remember for up to a minute that a file is not there.
_SEEN_AFTER = 90.0


def usable_cpus() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


class Part(NamedTuple):
    """What another run leaves to this one.

    Attributes:
        ranks: target ranks.
        sources: digest of the source files that the other one has planned with.
    """

    ranks: frozenset[int]
    sources: str


@dataclass(frozen=True)
class Options:
    """How a conversion is carried out; none of this changes the bytes written.

    Attributes:
        jobs: CPUs to keep busy; by default those this process may use.
        max_memory: bytes for all buffers together.
        io: ``auto``, which reads explicitly, ``mmap`` or ``pread``.
        crc: ``auto`` checks a source file's CRC where the whole file is read; ``never`` does not.
        check_replicas: ``auto`` compares samples of what the source strategy says are replicas, more of them with
            ``verify``; ``all`` compares everything, ``never`` nothing.
        checksum: ``crc32`` computes a checksum of every target file, ``none`` does not.
        overwrite: replace existing targets.
        adding: one of several runs that fill the same directory rank by rank; what the others wrote may
            stay beside a target that is replaced.
        dry_run: plan and check everything, write nothing.
        share: index and count, where several runs divide the target ranks among them.
        part: only some of the target ranks asked for, on behalf of a run that has begun; everything is
            planned as for all of them.
        recover: source and target strategy are the same, and intact files stay as they are.
        lost_only: when recovering, write only ranks that are lost or damaged.
        accept_changed_source: go on though existing targets were made of other source files.
        verify: whoever asks for the conversion compares the result with the source afterwards; it is recorded.
    """

    jobs: int = field(default_factory=usable_cpus)
    max_memory: int = MAX_MEMORY
    io: str = "auto"
    crc: str = "auto"
    check_replicas: str = "auto"
    checksum: str = "none"
    overwrite: bool = False
    adding: bool = False
    dry_run: bool = False
    share: Optional[tuple[int, int]] = None
    part: Optional[Part] = None
    recover: bool = False
    lost_only: bool = False
    accept_changed_source: bool = False
    verify: bool = False


@dataclass
class Phases:
    """Where the time of a conversion went, in seconds.

    Attributes:
        planning: reading headers, working out the plan, looking at the target directory.
        checking: checking space, the CRCs that source files record, and replicas.
        writing: moving bytes, and recording what is done.
    """

    planning: float
    checking: float
    writing: float


@dataclass
class Summary:
    """What a conversion did.

    Attributes:
        step: the step that was converted, such as ``3_10``; None where file names tell none.
        ranks: target ranks written.
        files: their files, in the order of ``ranks``.
        target_files: file of every rank asked for, whenever it was written.
        done_before: target ranks, of those asked for, that an earlier run of the same conversion wrote.
        manifest: the manifest, if every rank of the target strategy is there now.
        bytes_written: size of these files together.
        source_ranks: source ranks whose headers were read.
        recovered: ranks that were lost or damaged, when recovering.
        parameters: how many parameters were resharded.
        kinds: what the files of all ranks asked for hold, whenever they were written, by kind: weights, optimizer
            state, accumulated gradients, other values.
        copied: names of values copied as they are.
        left_out: parameters of the source that the target strategy does not have.
        missing: parameters of the target strategy that no source file holds.
        unholdable: values that the target format cannot hold.
        replicas: how well the source strategy was tested; None where it says nothing, or nothing was left to do.
        warnings: what was warned of.
        notes: what was decided.
        phases: where the time went.
        seconds: time it took.
        dry_run: nothing was written.
    """

    step: Optional[str]
    ranks: list[int]
    files: list[str]
    target_files: dict[int, str]
    done_before: list[int]
    manifest: Optional[str]
    bytes_written: int
    source_ranks: list[int]
    recovered: list[int]
    parameters: int
    kinds: dict[str, Total]
    copied: list[str]
    left_out: list[str]
    missing: list[str]
    unholdable: list[str]
    replicas: Optional[ReplicaCheck]
    warnings: list[str]
    notes: list[str]
    phases: Phases
    seconds: float
    dry_run: bool


class Workers(Protocol):
    """Other processes, perhaps on other machines, that do the work of a conversion which is prepared here."""

    def check(self, conversion: Conversion) -> None:
        """See that they can do the work, before anything else is done.

        Raises:
            ReshardError: they cannot.
        """

    def check_crcs(self, files: Sequence[CheckpointIndex]) -> Mapping[str, DamagedCheckpointError]:
        """Check the CRCs of source files; errors of those whose bytes are not what their CRC was made of, by path.

        Raises:
            ReshardError: a file could not be checked.
        """

    def write(self, conversion: Conversion, sources: str, sign: str, progress: Progress) -> None:
        """Write and record every target of a conversion.

        Args:
            conversion: what to write.
            sources: digest of the source files it was planned with.
            sign: a file in the target directory; when it is gone, nothing more is to be written.
            progress: told of bytes and files written.

        Raises:
            ReshardError: some target was not written. Nothing half-written is left.
        """


def transform(
    request: Request,
    options: Options,
    report: Optional[Report] = None,
    progress: Optional[Progress] = None,
    workers: Optional[Workers] = None,
) -> Summary:
    """Convert a checkpoint.

    Args:
        request: what to convert to what.
        options: how.
        report: told of warnings and notes as they come.
        progress: told of bytes as they are written.
        workers: who writes the targets, if not this process.

    Raises:
        ReshardError: the conversion cannot be made, or failed; nothing half-written is left.
    """
    with prepare(request, options, report, progress) as prepared:
        return prepared.carry_out(progress, workers)


@contextlib.contextmanager
def prepare(
    request: Request, options: Options, report: Optional[Report] = None, progress: Optional[Progress] = None
) -> Iterator[Prepared]:
    """Plan and check a conversion; its source files stay open until the end of the ``with`` block.

    Args:
        request: what to convert to what.
        options: how.
        report: told of warnings and notes as they come.
        progress: told of bytes that are read to find out what is damaged.

    Raises:
        ReshardError: the conversion cannot be made; nothing has been written.
    """
    with FileHandles() as handles:
        yield Prepared(request, options, handles, report or Report(), progress or Progress())


class Prepared:
    """A conversion that is planned, and checked against what is in the target directory.

    Attributes:
        conversion: the plan; its ranks are those that are still to be written.
        execution: how bytes will be moved.
        asked: target ranks that were asked for, ascending.
        sizes: size of the file of every target rank that was still to be written when this was planned, in bytes.
    """

    def __init__(
        self, request: Request, options: Options, handles: FileHandles, report: Report, progress: Progress
    ) -> None:
        self._started = time.monotonic()
        self._options = options
        self._handles = handles
        self._report = report
        self._request = request
        self._progress = progress
        self._sampler = SourceSampler(handles)
        self._crcs = SourceCrcs(request.damaged, report, self._sampler)
        self._swap_test = SwapTest(request.source, request.target, handles)
        check_target_ranks(request)
        _check_prefix(request)
        if isinstance(request.src, str):
            check_disjoint(request.src, (), request.dst)
        with self._told_if_swapped():
            self._plan()
        self._planned = time.monotonic()

    def _plan(self) -> None:
        """Plan with the source files that are not known to be damaged, and look at the target directory."""
        options = self._options
        while True:
            conversion = self._conversion()
            request = conversion.request
            files = conversion.step.files.values()
            if request.exact_file:
                strategies = (s.path for s in (request.source, request.target) if not s.is_none)
                check_apart(request.dst, files, strategies)
            else:
                targets = (conversion.path(rank) for rank in conversion.ranks)
                check_disjoint(request.src, files, request.dst, targets)
            if options.lost_only and isinstance(conversion, Recovery):
                lost = set(conversion.lost)
                conversion.ranks = tuple(rank for rank in conversion.ranks if rank in lost)
            if options.share is not None:
                conversion.ranks = share_of(conversion.data_bytes_by_rank(), *options.share)
            if options.part is not None:
                conversion.ranks = tuple(rank for rank in conversion.ranks if rank in options.part.ranks)
            directory = self._directory_of(conversion)
            if directory is None or options.crc == "never":
                break
            suspects = [conversion.step.indexes[rank] for rank in directory.suspects()]
            if not self._crcs.find(conversion.step, suspects, self._check(conversion, self._progress)):
                break
        self.conversion = conversion
        self.execution = _execution(conversion, options)
        # Every thread may have a whole group of targets open, beside its sources.
        most_open = self._handles.limit // (4 * self.execution.threads)
        conversion.most_together = max(1, min(conversion.most_together, most_open))
        self.asked = conversion.ranks
        self._directory = directory
        if directory is not None:
            if options.part is not None and options.part.sources != directory.sources:
                raise RetryableError(
                    f"{request.src}: source files are not as they were when the conversion was begun",
                    hint="wait until nothing writes the source any more, then give the same command again",
                )
            conversion.ranks = tuple(directory.survey())
        self.sizes = conversion.file_bytes(conversion.ranks)

    def _conversion(self) -> Conversion:
        """The plan; that of a recovery is made of files that are sound, as far as they record a CRC."""
        options = self._options
        while True:
            request = replace(self._request, damaged=dict(self._crcs.damaged))
            try:
                conversion = (
                    plan_as(Recovery, request, self._handles, self._report)
                    if options.recover
                    else plan(request, self._handles, self._report)
                )
            except IncompleteSourceError as error:
                if self._crcs.damaged:
                    error.hint = "; ".join(filter(None, [error.hint, "with --crc never CRCs are not checked"]))
                raise
            if not options.recover or options.crc == "never" or options.dry_run:
                return conversion
            # What is lost, and so what is asked for, depends on it.
            check = self._check(conversion, self._progress)
            if not self._crcs.find(conversion.step, conversion.step.indexes.values(), check):
                return conversion

    def _directory_of(self, conversion: Conversion) -> Optional[TargetDirectory]:
        if conversion.request.exact_file:
            return None
        return TargetDirectory(
            conversion,
            self._sampler,
            self._report,
            overwrite=self._options.overwrite,
            adding=self._options.adding,
            checksum=self._options.checksum == "crc32",
            part=self._options.part is not None,
            damaged=self._crcs.files,
            accept_changed_source=self._options.accept_changed_source,
            given=given_command(conversion, self._options),
            lost_only=self._options.lost_only,
            whole=self._whole(conversion),
        )

    def _whole(self, conversion: Conversion) -> bool:
        """Whether this run is to write all that the target directory is to hold."""
        if self._options.lost_only:
            return conversion.request.ranks is None
        return len(conversion.ranks) == conversion.request.target.device_count

    def _check(self, conversion: Conversion, progress: Progress, workers: Optional[Workers] = None) -> Check:
        """What checks CRCs: this process, or those that write the targets."""
        if workers is not None:
            return workers.check_crcs
        execution = _execution(conversion, self._options)
        return lambda files: damaged_files(files, execution, self._handles, self._report, progress)

    @property
    def space(self) -> list[Space]:
        """What the files to be written need on every file system below the target directory, and what is free."""
        return space_for((os.path.dirname(self.conversion.path(rank)), size) for rank, size in self.sizes.items())

    def carry_out(self, progress: Optional[Progress] = None, workers: Optional[Workers] = None) -> Summary:
        """Write what is left to write, unless it is a dry run.

        Args:
            progress: told of bytes as they are written.
            workers: who writes the targets, if not this process.

        Raises:
            ReshardError: it failed; nothing half-written is left.
        """
        progress = progress or Progress()
        manifest = None
        if self._options.dry_run:
            if workers is not None and self.conversion.ranks:
                workers.check(self.conversion)
            for space in self.space:
                if space.problem is not None:
                    self._report.warn(f"{space.problem}: the conversion would be refused")
        else:
            self._settle(progress, workers)
        # After CRCs: damage that they tell of does not speak against the strategy.
        with self._told_if_swapped():
            replicas = self._check_replicas(progress, workers)
        conversion = self.conversion
        checked = time.monotonic()
        if self._options.dry_run:
            written = sum(self.sizes.values())
        else:
            run = _Run(conversion, self.execution, self._directory, self._handles, self._report, progress, workers)
            written = run.write()
            manifest = run.manifest
        ended = time.monotonic()
        return Summary(
            step=str(conversion.step.step) if conversion.step.step is not None else None,
            ranks=list(conversion.ranks),
            files=[conversion.path(rank) for rank in conversion.ranks],
            target_files={rank: conversion.path(rank) for rank in self.asked},
            done_before=sorted(set(self.asked).difference(conversion.ranks)),
            manifest=manifest,
            bytes_written=written,
            source_ranks=sorted(conversion.step.indexes),
            recovered=conversion.lost if isinstance(conversion, Recovery) else [],
            parameters=len(conversion.sorted.resharded),
            kinds=totals_of(conversion, self.asked),
            copied=conversion.copied,
            left_out=conversion.sorted.left_out,
            missing=conversion.sorted.missing,
            unholdable=conversion.sorted.unholdable,
            replicas=replicas,
            warnings=self._report.warnings,
            notes=self._report.notes,
            phases=Phases(
                planning=self._planned - self._started,
                checking=checked - self._planned,
                writing=ended - checked,
            ),
            seconds=ended - self._started,
            dry_run=self._options.dry_run,
        )

    def _settle(self, progress: Progress, workers: Optional[Workers]) -> None:
        """Check what can be checked before writing; source files that are damaged are planned without.

        Raises:
            ReshardError: it cannot be written, or not be made of sound files.
        """
        while True:
            conversion = self.conversion
            if workers is not None and conversion.ranks:
                workers.check(conversion)
            check_space(self.space)
            if self._options.crc == "never" or self._options.recover or not conversion.ranks:
                # Those that a recovery is made of were checked before it was planned.
                return
            check = self._check(conversion, progress, workers)
            read = conversion.files_read()
            whole = [index for index in conversion.step.indexes.values() if read.get(index.path)]
            if not self._crcs.find(conversion.step, whole, check):
                self._crcs.note_unchecked(path for path, all_of_it in read.items() if not all_of_it)
                return
            self._plan()

    def _check_replicas(self, progress: Progress, workers: Optional[Workers]) -> Optional[ReplicaCheck]:
        """Compare what ranks of the source should hold alike, unless another run has done so.

        Raises:
            CheckpointError: they do not.
        """
        conversion, options = self.conversion, self._options
        request = conversion.request
        if request.source.is_none or options.part is not None or not conversion.ranks:
            return None
        if options.check_replicas == "never":
            return ReplicaCheck("nothing")
        parameters = [conversion.parameters[name] for name in conversion.sorted.resharded]
        effort = "more" if options.check_replicas == "auto" and options.verify else options.check_replicas
        comparison = compare_replicas(parameters, conversion.step, self._handles, self.execution, progress, effort)
        if comparison.differing:
            # Of files that are read in part no CRC was checked.
            doubtful = [conversion.step.indexes[rank] for rank in sorted(comparison.always)]
            check = self._check(conversion, progress, workers)
            if options.crc != "never" and self._crcs.find(conversion.step, doubtful, check):
                self._plan()
                if not options.dry_run:
                    self._settle(progress, workers)
                return self._check_replicas(progress, workers)
            raise comparison.error(
                request.source.path, request.src if isinstance(request.src, str) else conversion.step.place
            )
        if comparison.gradients:
            self._report.warn(comparison.said_of_gradients())
        self._swap_test.check(conversion.step, parameters, comparison.check.tested, self._report)
        return comparison.check

    def _told_if_swapped(self) -> contextlib.AbstractContextManager[None]:
        return self._swap_test.told(self._request.src, self._request.step, self._request.file_suffix)


class _Run:
    """The writing of a planned conversion.

    Attributes:
        manifest: the manifest, if it was written.
    """

    def __init__(
        self,
        conversion: Conversion,
        execution: ExecutionOptions,
        directory: Optional[TargetDirectory],
        handles: FileHandles,
        report: Report,
        progress: Progress,
        workers: Optional[Workers],
    ) -> None:
        self.manifest: Optional[str] = None
        self._conversion = conversion
        self._execution = execution
        self._directory = directory
        self._handles = handles
        self._report = report
        self._progress = progress
        self._workers = workers

    def write(self) -> int:
        """Write all target files and return their size together, in bytes."""
        if self._directory is None:
            return self._write(self._write_here)
        self._directory.tidy()
        if not self._conversion.ranks and self._directory.is_complete:
            # Complete: nothing is touched, so that it may also lie where nothing can be written.
            self.manifest = self._directory.manifest
            return 0
        try:
            self._conversion.ranks = tuple(self._directory.begin())
            written = self._write(self._write_here if self._workers is None else self._write_elsewhere)
            # Targets were made one after the other: that none of their sources changed meanwhile is seen at the end.
            self._handles.check_unchanged(index.path for index in self._conversion.step.indexes.values())
            self.manifest = self._directory.complete()
            return written
        finally:
            self._directory.end()

    def _write_here(self, progress: Progress) -> None:
        groups: Iterable[Sequence[TargetFile]] = self._conversion.target_groups()
        if self._directory is None:
            convert(groups, self._handles, self._execution, progress)
        else:
            groups = self._directory.missing(groups)
            convert(groups, self._handles, self._execution, progress, self._directory.finished)

    def _write_elsewhere(self, progress: Progress) -> None:
        directory, ranks = self._directory, self._conversion.ranks
        assert self._workers is not None and directory is not None
        try:
            with directory.sign_of_life() as sign:
                self._workers.write(self._conversion, directory.sources, sign, progress)
        finally:
            directory.tidy()
        deadline = time.monotonic() + _SEEN_AFTER
        while len(directory.recorded(ranks)) < len(ranks):
            if time.monotonic() > deadline:
                left = set(ranks) - directory.recorded(ranks)
                dst = self._conversion.request.dst
                raise RetryableError(
                    f"{dst}: {rank_ranges(left)} were written by workers, but are not seen here",
                    file=dst,
                    rank=min(left),
                    hint="the same command writes them again, if they are really not there",
                )
            time.sleep(0.5)

    def _write(self, write: Callable[[Progress], None]) -> int:
        if not self._conversion.ranks:
            return 0
        counted = _Counted(self._progress)
        self._progress.begin(self._conversion.data_bytes(), "writing")
        try:
            write(counted)
        except BaseException:
            if self._directory is not None:
                resume = f", or `reshard resume {shlex.quote(self._conversion.request.dst)}`," if counted.files else ""
                self._report.warn(
                    f"{counted.files} of {plural(len(self._conversion.ranks), 'rank')} that this run had to write were "
                    f"written and are complete; the same command{resume} goes on with the others"
                )
            raise
        finally:
            self._progress.end()
        return counted.file_bytes


def _execution(conversion: Conversion, options: Options) -> ExecutionOptions:
    example = next(iter(conversion.step.files.values()), None)
    storage = storage_of(example) if example is not None else LOCAL
    return ExecutionOptions(options.jobs, options.max_memory, options.io, storage, options.checksum == "crc32")


def check_target_ranks(request: Request) -> None:
    """Refuse target ranks that the target strategy does not have.

    Raises:
        UsageError: a rank is out of range.
    """
    count = request.target.device_count
    beyond = [rank for rank in request.ranks or () if not 0 <= rank < count]
    if beyond:
        raise UsageError(
            f"target {rank_ranges(beyond)} (RANK, --ranks) is out of range: the target strategy "
            f"({request.target.path}) has {plural(count, 'rank')}, 0 to {count - 1}",
            rank=beyond[0],
        )


def _check_prefix(request: Request) -> None:
    """Refuse a prefix with which target files could not be written, or not be found again."""
    prefix = request.prefix
    if prefix is None:
        return
    longest = len(os.fsencode(f"{prefix}{request.target.device_count}.safetensors"))
    if "/" in prefix or "\0" in prefix or prefix.startswith(".") or longest > _LONGEST_NAME:
        shown = prefix if len(prefix) < 40 else f"{prefix[:40]}..."
        raise UsageError(
            f"prefix {shown!r} is not the beginning of a file name: it must not hold a '/', begin with a '.', or be "
            f"too long for names of {_LONGEST_NAME} bytes"
        )


class _Counted(Progress):
    """Adds up the sizes of committed files and passes everything on."""

    def __init__(self, listener: Progress) -> None:
        self.file_bytes = 0
        self.files = 0
        self._listener = listener

    def wrote(self, count: int) -> None:
        """Pass on."""
        self._listener.wrote(count)

    def committed(self, rank: int, size: int) -> None:
        """Count and pass on."""
        self.file_bytes += size
        self.files += 1
        self._listener.committed(rank, size)
