"""CRCs of source files, checked before the contents are used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Optional

from reshard.checkpoints import CheckpointIndex, FileHandles, unchecked
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.errors import DamagedCheckpointError
from reshard.execute import Budget, Progress
from reshard.execute.budget import reading_budget
from reshard.forms.registry import counted_as
from reshard.plan.plan import Plan
from reshard.plan.request import Request
from reshard.records import SourceFile, SourceSampler
from reshard.text.messages import Report, joined, number_ranges, plural, some_names


class DamagedSourcesError(DamagedCheckpointError):
    """Source files of a step are damaged, by the CRCs that they record."""

    checkpoint: Optional[Checkpoint]
    """The step; None if earlier runs of the conversion found the same."""


class SourceCrcs:
    """Which source files are damaged by the CRCs that they record; each is checked once.

    Attributes:
        damaged: why files count as absent, by path.
        files: the files found damaged here, with their samples.
    """

    def __init__(
        self, request: Request, sampler: SourceSampler, handles: FileHandles, report: Report, progress: Progress
    ) -> None:
        self.damaged = dict(request.damaged)
        self.files: list[SourceFile] = []
        self._effort = request.asked.effort
        self._sampler = sampler
        self._handles = handles
        self._report = report
        self._progress = progress
        self._checked: set[object] = set()

    def check(self, plan: Plan, indexes: Iterable[CheckpointIndex], known: bool = False) -> None:
        """Check files of a planned step that were not checked before, unless ``crc`` is ``never``.

        Args:
            plan: the plan.
            indexes: the files.
            known: earlier runs of the same conversion found these damaged, and no others.

        Raises:
            DamagedSourcesError: files are damaged; they are in `damaged` now.
            ReshardError: a file cannot be read.
        """
        new = [] if self._effort.crc == "never" else unchecked(indexes, self._checked)
        if not new:
            return
        budget, source = reading_budget(plan, self._effort.cpus, self._effort.max_memory), plan.checkpoint
        errors = dict(damaged_files(new, budget, self._handles, self._report, self._progress))
        if not errors:
            return
        # All damaged files of the step count as lost together, since the plan is made once more only.
        others = [] if known else unchecked(source.indexes.values(), self._checked)
        errors.update(damaged_files(others, budget, self._handles, self._report, self._progress))
        self.damaged = {**self.damaged, **{path: error.message for path, error in errors.items()}}
        holders = {rank: index for rank, index in sorted(source.indexes.items()) if index.path in errors}
        for rank, index in holders.items():
            number = f"{counted_as(source.form)} {rank}"
            self._report.warn(f"{errors[index.path].message}; {number} counts as absent at {source.label}")
        self.files += self._sampler.look_at(holders)
        lost = number_ranges({file.rank for file in self.files})
        more = f"if replicas hold the same: --without-ranks {lost}; " if plan.request.form.options.by_rank else ""
        damage = DamagedSourcesError(
            joined("\n", [error.message for error in errors.values()]),
            file=min(errors),
            rank=min(holders, default=None),
            hint=f"{more}to skip CRC checks: --crc never",
        )
        damage.checkpoint = None if known else source
        raise damage

    def note_unchecked(self, paths: Iterable[str]) -> None:
        """Note partially read files, whose CRC is not checked."""
        unchecked = [path for path in paths if path not in self._checked]
        if unchecked and self._effort.crc != "never":
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
