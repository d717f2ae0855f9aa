"""What source files record of their contents, CRCs or tags, checked before anything is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Callable

from reshard.checkpoints import CheckpointIndex, FileHandles, check_crcs
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.errors import DamagedCheckpointError
from reshard.execute import ExecutionOptions, Progress
from reshard.records import SourceFile, SourceSampler
from reshard.text.report import Report
from reshard.text.wording import plural, some_names

Check = Callable[[Sequence[CheckpointIndex]], Mapping[str, DamagedCheckpointError]]
"""Checks files; gives the errors of those that are damaged, by path."""


class SourceCrcs:
    """Which source files are damaged by the CRCs that they record; each is checked once.

    Args:
        damaged: what is known to be damaged, and why, by path.
        report: warned of damaged files, and told of those that are not checked.
        sampler: looks at files that are damaged, so that another run knows them.

    Attributes:
        damaged: why files count as absent, by path.
        files: those that were found damaged here, as they were found.
    """

    def __init__(self, damaged: Mapping[str, str], report: Report, sampler: SourceSampler) -> None:
        self.damaged = dict(damaged)
        self.files: list[SourceFile] = []
        self._report = report
        self._sampler = sampler
        self._checked: set[str] = set()

    def find(self, source: Checkpoint, indexes: Iterable[CheckpointIndex], check: Check) -> bool:
        """Check files of a step that were not checked before; whether any is damaged.

        Raises:
            ReshardError: a file cannot be read.
        """
        checkable = {index.path: index for index in indexes if index.checkable or index.archived}
        new = [index for path, index in checkable.items() if path not in self._checked]
        found = check(new) if new else {}
        self._checked.update(index.path for index in new)
        for rank, index in sorted(source.indexes.items()):
            if index.path in found:
                self._report.warn(f"{found[index.path].message}; rank {rank} counts as absent at {source.label}")
                self.files += self._sampler.look_at({rank: index})
        self.damaged.update((path, error.message) for path, error in found.items())
        return bool(found)

    def note_unchecked(self, paths: Iterable[str]) -> None:
        """Say which files are not checked, of those of which only a part is read."""
        unchecked = [path for path in paths if path not in self._checked]
        if unchecked:
            self._report.note(
                f"the CRC of {plural(len(unchecked), 'source file')} was not checked, because only a part of the file "
                f"is read: {some_names(unchecked, 3)}"
            )


def damaged_files(
    indexes: Sequence[CheckpointIndex],
    execution: ExecutionOptions,
    handles: FileHandles,
    report: Report,
    progress: Progress,
) -> Mapping[str, DamagedCheckpointError]:
    """Files whose bytes are not those their CRC was made of, with the error of each, by path."""
    progress.begin(sum(index.size for index in indexes), "checking CRCs")
    try:
        checks = check_crcs(handles, indexes, execution.threads, execution.block_bytes, progress.wrote)
    finally:
        progress.end()
    for path, reason in sorted(checks.unchecked.items()):
        report.note(f"{path}: its CRC was not checked: {reason}")
    return checks.damaged
