"""Writing the targets of a conversion, and recording them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from reshard.checkpoints import FileHandles
from reshard.convert.target_directory import TargetDirectory
from reshard.execute import Budget, Progress, convert
from reshard.execute.destination import Space, space_for
from reshard.execute.writing import Finish
from reshard.forms.registry import counted_as
from reshard.plan.pieces import TargetFile
from reshard.plan.plan import Plan
from reshard.text.messages import Report, listing, plural

WriteElsewhere = Callable[[Sequence[int], Progress], None]
"""Writes and records target files in other processes, perhaps on other machines; counts their sizes."""

# Network file systems cache for up to a minute that a file is missing.
_SEEN_AFTER = 90.0


class State(NamedTuple):
    """The plan and its remaining work; made again if source files turn out to be damaged.

    Attributes:
        plan: the plan.
        execution: threads, processes and memory.
        requested: this run's share of the requested target files, ascending.
        sizes: bytes of each file that is not written yet, ascending.
        directory: the records of targets; None without records.
        checksum: whether a CRC-32 of every target file is computed, and those that files hold.
    """

    plan: Plan
    execution: Budget
    requested: tuple[int, ...]
    sizes: Mapping[int, int]
    directory: TargetDirectory | None
    checksum: bool

    @property
    def work(self) -> tuple[int, ...]:
        """The files that are not written yet, ascending."""
        return tuple(self.sizes)

    @property
    def space(self) -> list[Space]:
        """Needed and free bytes on every file system below the target directory."""
        needed = [(os.path.dirname(self.plan.path(file)), size) for file, size in self.sizes.items()]
        if self.work and self.directory is not None:
            needed += [(self.plan.request.dst, file.size or 0) for file in self.plan.form.finishing()]
        return space_for(needed)


class Writing:
    """The writing of a planned conversion.

    Args:
        state: the plan and the target files to write.
        handles: open source files.
        report: gets a warning with the number of written files if one fails.
        progress: counts written bytes and files.
        elsewhere: writes the files; None to write them here.

    Attributes:
        manifest: the manifest, if it was written.
        work: target files to write; afterwards those that this run wrote, as another run may have written some.
    """

    def __init__(
        self,
        state: State,
        handles: FileHandles,
        report: Report,
        progress: Progress,
        elsewhere: WriteElsewhere | None = None,
    ) -> None:
        self.manifest: str | None = None
        self.work = state.work
        self._plan = state.plan
        self._execution = state.execution
        self._checksum = state.checksum
        self._directory = state.directory
        self._handles = handles
        self._report = report
        self._progress = progress
        self._elsewhere = elsewhere

    def write(self) -> int:
        """Write all target files and return their size together, in bytes."""
        if self._directory is None:
            return self._write(self._write_here)
        self._directory.tidy()
        if not self.work and self._directory.is_complete:
            # No target is changed, so a complete directory may be read-only.
            self._directory.warn_of_kept()
            self.manifest = self._directory.manifest
            return 0
        try:
            self.work = tuple(self._directory.begin())
            nbytes = self._write(self._write_here if self._elsewhere is None else self._write_elsewhere)
            # Targets are written one after the other: a source that changes meanwhile is detected at the end.
            additions = self._plan.request.edits.additions
            added = () if additions is None else additions.paths
            sources = [index.path for index in self._plan.checkpoint.indexes.values()]
            sources += [file.source for file in self._plan.form.finishing() if file.source is not None]
            self._handles.check_unchanged([*sources, *added])
            self.manifest = self._directory.complete()
            return nbytes
        finally:
            self._directory.end()

    def _write_here(self, progress: Progress) -> None:
        groups: Iterable[Sequence[TargetFile]] = self._plan.groups(self.work, self._execution.limits)
        target_of = self._plan.target_file
        # Files of a later pipeline stage, or of another part of the model, may need NumPy where the first do not.
        samples = {self.work[len(self.work) // 2], self.work[-1]}
        finish: Finish | None = None
        if self._directory is not None:
            groups, finish = self._directory.missing(groups), self._directory.finished
        convert(groups, self._handles, self._execution, progress, finish, self._checksum, target_of, samples)

    def _write_elsewhere(self, progress: Progress) -> None:
        directory = self._directory
        assert self._elsewhere is not None and directory is not None
        self._elsewhere(self.work, progress)
        deadline = time.monotonic() + _SEEN_AFTER
        while time.monotonic() < deadline and len(directory.recorded(self.work)) < len(self.work):
            time.sleep(0.5)

    def _write(self, write: Callable[[Progress], None]) -> int:
        if not self.work:
            return 0
        counted = Counted(self._progress)
        self._progress.begin(sum(self._plan.data_bytes(self.work).values()), "writing")
        try:
            write(counted)
            self.work = tuple(file for file in self.work if file in counted.files)
        except BaseException:
            if self._directory is not None:
                count = f"{len(counted.files)} of {plural(len(self.work), counted_as(self._plan.form.name))}"
                self._report.warn(f"{count} written; run the same command again to continue")
            raise
        finally:
            self._progress.end()
            if counted.overflows:
                count = plural(sum(counted.overflows.values()), "element")
                self._report.warn(
                    f"{count} became infinite, being too large for the requested type: "
                    + listing(sorted(counted.overflows))
                )
        return counted.file_bytes


class Counted(Progress):
    """Adds up the sizes of committed files and the elements too large for their type, and passes all on."""

    def __init__(self, listener: Progress) -> None:
        self.file_bytes = 0
        self.files: set[int] = set()
        self.overflows: Counter[str] = Counter()
        self._listener = listener

    def wrote(self, count: int) -> None:
        """Pass on."""
        self._listener.wrote(count)

    def committed(self, rank: int, size: int) -> None:
        """Count and pass on."""
        self.file_bytes += size
        self.files.add(rank)
        self._listener.committed(rank, size)

    def overflowed(self, name: str, count: int) -> None:
        """Count and pass on."""
        self.overflows[name] += count
        self._listener.overflowed(name, count)
