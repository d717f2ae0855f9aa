"""A conversion from end to end: plan, checks, bytes, summary."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Optional

from reshard.checkpoints import CheckpointIndex, FileHandles, check_crc
from reshard.checkpoints.storage import LOCAL, storage_of
from reshard.defaults import MAX_MEMORY
from reshard.errors import UsageError
from reshard.execute import Destination, ExecutionOptions, Progress, convert
from reshard.execute.destination import check_disjoint, check_space
from reshard.plan.conversion import Conversion, Request, plan
from reshard.plan.pieces import TargetFile
from reshard.report import Report
from reshard.wording import number_ranges, plural, some_names


def usable_cpus() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Options:
    """How a conversion is carried out; none of this changes the bytes written.

    Attributes:
        jobs: CPUs to keep busy; by default those this process may use.
        max_memory: bytes for all buffers together.
        io: ``auto``, ``mmap`` or ``pread``.
        crc: ``auto`` checks a source file's CRC where the whole file is read; ``never`` does not.
        overwrite: replace existing targets.
        adding: one of several runs that write into the same directory, as by-rank in a loop.
        dry_run: plan and check everything, write nothing.
    """

    jobs: int = field(default_factory=usable_cpus)
    max_memory: int = MAX_MEMORY
    io: str = "auto"
    crc: str = "auto"
    overwrite: bool = False
    adding: bool = False
    dry_run: bool = False


@dataclass
class Summary:
    """What a conversion did.

    Attributes:
        step: the step that was converted, such as ``3_10``; None where file names tell none.
        ranks: target ranks written.
        files: their files, in the order of ``ranks``.
        bytes_written: size of these files together.
        source_ranks: source ranks whose headers were read.
        parameters: how many parameters were resharded.
        copied: names of values copied as they are.
        left_out: parameters of the source that the target strategy does not have.
        missing: parameters of the target strategy that no source file holds.
        unholdable: values that the target format cannot hold.
        warnings: what was warned of.
        notes: what was decided.
        seconds: time it took.
        dry_run: nothing was written.
    """

    step: Optional[str]
    ranks: list[int]
    files: list[str]
    bytes_written: int
    source_ranks: list[int]
    parameters: int
    copied: list[str]
    left_out: list[str]
    missing: list[str]
    unholdable: list[str]
    warnings: list[str]
    notes: list[str]
    seconds: float
    dry_run: bool


def transform(
    request: Request,
    options: Options,
    report: Optional[Report] = None,
    progress: Optional[Progress] = None,
) -> Summary:
    """Convert a checkpoint.

    Args:
        request: what to convert to what.
        options: how.
        report: told of warnings and notes as they come.
        progress: told of bytes as they are written.

    Raises:
        ReshardError: the conversion cannot be made, or failed; nothing half-written is left.
    """
    started = time.monotonic()
    report = report or Report()
    progress = progress or Progress()
    check_target_ranks(request)
    if "/" in request.prefix or "\0" in request.prefix:
        raise UsageError(f"prefix {request.prefix!r} is not the beginning of a file name: it must not hold a '/'")
    if isinstance(request.src, str):
        check_disjoint(request.src, (), request.dst)
    with FileHandles() as handles:
        conversion = plan(request, handles, report)
        execution = _execution(conversion, options)
        # Every thread may have a whole group of targets open, beside its sources.
        conversion.most_together = max(1, min(conversion.most_together, handles.limit // (4 * execution.threads)))
        _check_destination(request, conversion, options)
        files = [conversion.path(rank) for rank in conversion.ranks]
        if options.dry_run:
            written = sum(target.layout.size for group in conversion.target_groups() for target in group)
        else:
            written = _write(conversion, execution, options.crc, handles, report, progress)
        return Summary(
            step=str(conversion.step.step) if conversion.step.step is not None else None,
            ranks=list(conversion.ranks),
            files=files,
            bytes_written=written,
            source_ranks=sorted(conversion.step.indexes),
            parameters=len(conversion.sorted.resharded),
            copied=conversion.copied,
            left_out=conversion.sorted.left_out,
            missing=conversion.sorted.missing,
            unholdable=conversion.sorted.unholdable,
            warnings=report.warnings,
            notes=report.notes,
            seconds=time.monotonic() - started,
            dry_run=options.dry_run,
        )


def _execution(conversion: Conversion, options: Options) -> ExecutionOptions:
    example = next(iter(conversion.step.files.values()), None)
    storage = storage_of(example) if example is not None else LOCAL
    return ExecutionOptions(options.jobs, options.max_memory, options.io, storage)


def _write(
    conversion: Conversion,
    execution: ExecutionOptions,
    crc: str,
    handles: FileHandles,
    report: Report,
    progress: Progress,
) -> int:
    """Write all target files and return their size together, in bytes."""
    total = conversion.data_bytes()
    check_space(conversion.request.dst, total)
    if crc != "never":
        _check_crcs(conversion, execution, handles, report)
    counted = _Counted(progress)
    progress.begin(total)
    try:
        convert(conversion.target_groups(), handles, execution, counted)
    except BaseException:
        if counted.files:
            report.warn(
                f"{counted.files} of {plural(len(conversion.ranks), 'rank')} had been written and are complete; to "
                "begin again, pass --overwrite"
            )
        raise
    finally:
        progress.end()
    return counted.file_bytes


def check_target_ranks(request: Request) -> None:
    """Refuse target ranks that the target strategy does not have.

    Raises:
        UsageError: a rank is out of range.
    """
    count = request.target.device_count
    beyond = [rank for rank in request.ranks or () if not 0 <= rank < count]
    if beyond:
        raise UsageError(
            f"target rank {number_ranges(beyond)} (RANK, --ranks) is out of range: the target strategy "
            f"({request.target.path}) has {plural(count, 'rank')}, 0 to {count - 1}",
            rank=beyond[0],
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

    def committed(self, target: TargetFile) -> None:
        """Count and pass on."""
        self.file_bytes += target.layout.size
        self.files += 1
        self._listener.committed(target)


def _check_destination(request: Request, conversion: Conversion, options: Options) -> None:
    check_disjoint(request.src, conversion.step.files.values(), request.dst)
    if request.exact_file:
        return
    root = request.dst
    everything = range(request.target.device_count)
    destination = Destination(root, [os.path.relpath(conversion.path(rank), root) for rank in everything])
    writing = [os.path.relpath(conversion.path(rank), root) for rank in conversion.ranks]
    destination.check(writing, options.overwrite, adding=options.adding)


def _check_crcs(
    conversion: Conversion, execution: ExecutionOptions, handles: FileHandles, report: Report
) -> None:
    """Check the CRC of every source file that is read whole, before anything is made of it.

    Raises:
        DamagedCheckpointError: a file's bytes are not those its CRC was made of.
    """
    indexes = {index.path: index for index in conversion.step.indexes.values()}
    read = conversion.files_read()
    whole = [indexes[path] for path, all_of_it in read.items() if all_of_it]
    partly = [path for path, all_of_it in read.items() if not all_of_it]
    if partly:
        report.note(
            f"the CRC of {plural(len(partly), 'source file')} was not checked, because only a part of the file is "
            f"read: {some_names(partly, 3)}"
        )

    stop = threading.Event()

    def go_on(_: int) -> None:
        if stop.is_set():
            raise CancelledError

    def check(index: CheckpointIndex) -> None:
        outcome = check_crc(handles, index, execution.block_bytes, go_on)
        if not outcome.checked:
            report.note(f"{index.path}: its CRC was not checked: {outcome.reason}")

    with ThreadPoolExecutor(execution.threads) as pool:
        try:
            for done in as_completed([pool.submit(check, index) for index in whole]):
                done.result()
        except BaseException:
            # Also Ctrl-C: nobody waits for terabytes to be read.
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
