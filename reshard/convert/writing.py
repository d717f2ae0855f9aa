"""Writing the targets of a conversion, here or by workers, and recording them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Callable, Optional, Protocol

from reshard.checkpoints import CheckpointIndex, FileHandles
from reshard.convert.target_directory import TargetDirectory
from reshard.errors import DamagedCheckpointError, RetryableError
from reshard.execute import ExecutionOptions, Progress, convert
from reshard.forms.registry import counted_as
from reshard.plan.pieces import TargetFile
from reshard.plan.plan import Plan
from reshard.text.messages import listing
from reshard.text.report import Report
from reshard.text.wording import plural, rank_ranges

# Network file systems remember for up to a minute that a file is not there.
_SEEN_AFTER = 90.0


class Workers(Protocol):
    """Other processes, perhaps on other machines, that do the work of a conversion which is prepared here."""

    def check(self, plan: Plan) -> None:
        """See that they can do the work, before anything else is done.

        Raises:
            ReshardError: they cannot.
        """

    def check_crcs(self, files: Sequence[CheckpointIndex]) -> Mapping[str, DamagedCheckpointError]:
        """Check the CRCs of source files; errors of those whose bytes are not what their CRC was made of, by path.

        Raises:
            ReshardError: a file could not be checked.
        """

    def write(self, plan: Plan, work: Sequence[int], sources: str, sign: str, progress: Progress) -> None:
        """Write and record targets of a conversion.

        Args:
            plan: what they are made of.
            work: target files to write, ascending.
            sources: digest of the source files it was planned with.
            sign: a file in the target directory; when it is gone, nothing more is to be written.
            progress: told of bytes and files written.

        Raises:
            ReshardError: some target was not written. Nothing half-written is left.
        """


class Writing:
    """The writing of a planned conversion.

    Args:
        plan: what targets are made of.
        work: target files that are to be written, ascending.
        execution: how bytes are moved.
        directory: where they are recorded; None where nothing is.
        handles: open source files.
        report: told what was written before something failed.
        progress: told of bytes and files written.
        workers: who writes the targets, if not this process.

    Attributes:
        manifest: the manifest, if it was written.
        bytes_copied: of the contents of tensors, what the file system copied by itself.
        work: target files that were still to be written when writing began.
    """

    def __init__(
        self,
        plan: Plan,
        work: Sequence[int],
        execution: ExecutionOptions,
        directory: Optional[TargetDirectory],
        handles: FileHandles,
        report: Report,
        progress: Progress,
        workers: Optional[Workers],
    ) -> None:
        self.manifest: Optional[str] = None
        self.bytes_copied = 0
        self.work = tuple(work)
        self._plan = plan
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
        if not self.work and self._directory.is_complete:
            # Complete: nothing is touched, so that it may also lie where nothing can be written.
            self.manifest = self._directory.manifest
            return 0
        try:
            self.work = tuple(self._directory.begin())
            written = self._write(self._write_here if self._workers is None else self._write_elsewhere)
            # Targets were made one after the other: that none of their sources changed meanwhile is seen at the end.
            additions = self._plan.request.edits.additions
            added = () if additions is None else additions.paths
            sources = [index.path for index in self._plan.checkpoint.indexes.values()]
            sources += [file.source for file in self._plan.form.finishing() if file.source is not None]
            self._handles.check_unchanged([*sources, *added])
            self.manifest = self._directory.complete()
            return written
        finally:
            self._directory.end()

    def _write_here(self, progress: Progress) -> None:
        groups: Iterable[Sequence[TargetFile]] = self._plan.groups(self.work, self._execution.together)
        execution, target_of = self._execution, self._plan.target_file
        if self._directory is None:
            convert(groups, self._handles, execution, progress, target_of=target_of)
        else:
            groups, directory = self._directory.missing(groups), self._directory
            convert(groups, self._handles, execution, progress, directory.finished, directory.expected, target_of)

    def _write_elsewhere(self, progress: Progress) -> None:
        directory, ranks = self._directory, self.work
        assert self._workers is not None and directory is not None
        try:
            with directory.sign_of_life() as sign:
                self._workers.write(self._plan, self.work, directory.sources, sign, progress)
        finally:
            directory.tidy()
        deadline = time.monotonic() + _SEEN_AFTER
        while len(directory.recorded(ranks)) < len(ranks):
            if time.monotonic() > deadline:
                left = set(ranks) - directory.recorded(ranks)
                dst = self._plan.request.dst
                written = rank_ranges(left, counted_as(self._plan.form.name))
                raise RetryableError(
                    f"{dst}: {written} were written by workers, but are not seen here",
                    file=dst,
                    rank=min(left),
                    hint="the same command writes them again, if they are really not there",
                )
            time.sleep(0.5)

    def _write(self, write: Callable[[Progress], None]) -> int:
        if not self.work:
            return 0
        counted = Counted(self._progress)
        self._progress.begin(sum(self._plan.data_bytes(self.work).values()), "writing")
        try:
            write(counted)
        except BaseException:
            if self._directory is not None:
                written = f"{counted.files} of {plural(len(self.work), counted_as(self._plan.form.name))} written"
                self._report.warn(f"{written}; run the same command again to continue")
            raise
        finally:
            self._progress.end()
            self.bytes_copied = counted.bytes_copied
            if counted.overflows:
                count = plural(sum(counted.overflows.values()), "element")
                self._report.warn(
                    f"{count} became infinite, being too large for the type that was asked for: "
                    + listing(sorted(counted.overflows))
                )
        return counted.file_bytes


class Counted(Progress):
    """Adds up the sizes of committed files, and what was too large for its type, and passes everything on."""

    def __init__(self, listener: Progress) -> None:
        self.file_bytes = 0
        self.bytes_copied = 0
        self.files = 0
        self.overflows: Counter[str] = Counter()
        self._listener = listener

    def wrote(self, count: int) -> None:
        """Pass on."""
        self._listener.wrote(count)

    def copied(self, count: int) -> None:
        """Count and pass on."""
        self.bytes_copied += count
        self._listener.copied(count)

    def committed(self, rank: int, size: int) -> None:
        """Count and pass on."""
        self.file_bytes += size
        self.files += 1
        self._listener.committed(rank, size)

    def overflowed(self, name: str, count: int) -> None:
        """Count and pass on."""
        self.overflows[name] += count
        self._listener.overflowed(name, count)
