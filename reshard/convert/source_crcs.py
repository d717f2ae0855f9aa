"""CRCs of source files, checked before the contents are used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Callable

from reshard.checkpoints import CheckpointIndex, FileHandles, unchecked
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.errors import DamagedCheckpointError
from reshard.execute import Budget, Progress
from reshard.forms.registry import counted_as
from reshard.records import SourceFile, SourceSampler
from reshard.text.messages import Report, plural, some_names

Check = Callable[[Sequence[CheckpointIndex]], Mapping[str, DamagedCheckpointError]]
"""Checks files; returns the errors of damaged files, by path."""


class SourceCrcs:
    """Which source files are damaged by the CRCs that they record; each is checked once.

    Args:
        damaged: damaged files with the reason, by path.
        report: gets warnings of damaged files and a note of unchecked ones.
        sampler: takes samples of damaged files, by which another run recognises them.

    Attributes:
        damaged: why files count as absent, by path.
        files: the files found damaged here, with their samples.
    """

    def __init__(self, damaged: Mapping[str, str], report: Report, sampler: SourceSampler) -> None:
        self.damaged = dict(damaged)
        self.files: list[SourceFile] = []
        self._report = report
        self._sampler = sampler
        self._checked: set[object] = set()

    def find(self, source: Checkpoint, indexes: Iterable[CheckpointIndex], check: Check) -> bool:
        """Check files of a step that were not checked before; whether any is damaged.

        Raises:
            ReshardError: a file cannot be read.
        """
        new = unchecked(indexes, self._checked)
        damaged = dict(check(new)) if new else {}
        self.damaged.update((path, error.message) for path, error in damaged.items())
        found = bool(damaged)
        for rank, index in sorted(source.indexes.items()):
            # Files of archives may have several numbers.
            error = damaged.pop(index.path, None)
            if error is not None:
                number = f"{counted_as(source.form)} {rank}"
                self._report.warn(f"{error.message}; {number} counts as absent at {source.label}")
                self.files += self._sampler.look_at({rank: index})
        return found

    def note_unchecked(self, paths: Iterable[str]) -> None:
        """Note partially read files, whose CRC is not checked."""
        unchecked = [path for path in paths if path not in self._checked]
        if unchecked:
            self._report.note(
                f"the CRC of {plural(len(unchecked), 'source file')} was not checked, because only a part of the file "
                f"is read: {some_names(unchecked, 3)}"
            )


def damaged_files(
    indexes: Sequence[CheckpointIndex],
    budget: Budget,
    handles: FileHandles,
    report: Report,
    progress: Progress,
) -> Mapping[str, DamagedCheckpointError]:
    """Files whose bytes do not match their CRC, with the error of each, by path."""
    # Loaded only here: few files record a CRC, and few conversions read whole files.
    from reshard.checkpoints.formats.crc import check_crcs

    progress.begin(sum(index.check_bytes for index in indexes), "checking CRCs")
    try:
        checks = check_crcs(handles, indexes, budget.threads, budget.block_bytes, progress.wrote)
    finally:
        progress.end()
    for note in checks.notes():
        report.note(note)
    return checks.damaged
