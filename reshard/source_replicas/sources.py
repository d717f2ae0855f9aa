"""The checks of the sources of a conversion before it writes: recorded CRCs, replicas, slices, tied tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from reshard.asked import Effort, is_in_part
from reshard.checkpoints import CheckpointIndex, FileHandles, unchecked
from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor, stored_checkpoint, tied_among
from reshard.errors import CheckpointError, DamagedCheckpointError
from reshard.execute import Budget, Progress
from reshard.execute.budget import reading_budget
from reshard.execute.equal import check_equal
from reshard.execute.reader import CHUNK_BYTES, BoxReader
from reshard.forms.ranks.checkpoint import RankCheckpoint, rank_checkpoint_of, stage_shardings
from reshard.forms.registry import counted_as
from reshard.plan.plan import Plan
from reshard.source_replicas.compare import ReplicaCheck, check_copies, compare_replicas
from reshard.source_replicas.contradictions import check_slices, check_stages
from reshard.text.messages import Report, joined, number_ranges, plural, rank_ranges, some_names


class DamagedSourcesError(DamagedCheckpointError):
    """Source files of a step are damaged, by the CRCs that they record."""

    checkpoint: Checkpoint | None
    """The step; None if earlier runs of the conversion found the same."""


class SourceChecks:
    """The checks of one conversion, whose plan is made again without files that are damaged; each file is checked once.

    Args:
        effort: which checks are asked for.
        report: gets warnings and notes.
        progress: counts the bytes that are read.

    Attributes:
        handles: open source files.
        damaged: why files count as absent, by path.
        unchecked: paths of files with a CRC that are read without its check.
        found: the files found damaged here, by number.
    """

    def __init__(self, effort: Effort, handles: FileHandles, report: Report, progress: Progress) -> None:
        self.damaged: Mapping[str, str] = {}
        self.unchecked: set[str] = set()
        self.found: dict[int, CheckpointIndex] = {}
        self._effort = effort
        self.handles = handles
        self._report = report
        self._progress = progress
        self._checked: set[object] = set()

    def check_crcs(self, plan: Plan, indexes: Iterable[CheckpointIndex], known: bool = False) -> None:
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
        budget, source = reading_budget(plan), plan.checkpoint
        errors = dict(damaged_files(new, budget, self.handles, self._report, self._progress))
        if not errors:
            return
        # All damaged files of the step count as lost together, since the plan is made once more only.
        others = [] if known else unchecked(source.indexes.values(), self._checked)
        errors.update(damaged_files(others, budget, self.handles, self._report, self._progress))
        self.damaged = {**self.damaged, **{path: error.message for path, error in errors.items()}}
        holders = {rank: index for rank, index in sorted(source.indexes.items()) if index.path in errors}
        for rank, index in holders.items():
            number = f"{counted_as(source.form)} {rank}"
            self._report.warn(f"{errors[index.path].message}; {number} counts as absent at {source.label}")
        self.found.update(holders)
        lost = number_ranges(self.found)
        more = f"if replicas hold the same: --without-ranks {lost}; " if plan.request.form.options.by_rank else ""
        damage = DamagedSourcesError(
            joined("\n", [error.message for error in errors.values()]),
            file=min(errors),
            rank=min(holders, default=None),
            hint=f"{more}to skip CRC checks: --crc never",
        )
        damage.checkpoint = None if known else source
        raise damage

    def check(self, plan: Plan, work: Sequence[int], budget: Budget) -> ReplicaCheck | None:
        """Check all that is read for some target files, before they are written.

        Returns:
            The test of the source strategy; None without strategy or without files.

        Raises:
            DamagedSourcesError: files are damaged.
            CheckpointError: the files contradict the strategy, or each other.
        """
        task = plan.request.task
        if not work:
            return None
        read: Iterable[CheckpointIndex] = ()
        if task.recover:
            # Their CRCs are checked before the files to recover are known.
            read = plan.checkpoint.indexes.values()
        elif not task.dry_run:
            whole, partly = plan.files_read(work)
            self.check_crcs(plan, whole)
            read = (*whole, *partly)
            # Encryption tags are always checked before use, CRCs are not.
            left = [index.path for index in partly if index.crc is not None and index.path not in self._checked]
            if left and self._effort.crc != "never":
                self._report.note(
                    f"the CRC of {plural(len(left), 'source file')} was not checked, because only a part of the file "
                    f"is read: {some_names(left, 3)}"
                )
        self.unchecked = {index.path for index in unchecked(read, {*self._checked})}
        # After the CRC checks: a damaged file is no evidence against the strategy.
        replicas = self._check_replicas(plan, work, budget)
        self._check_equal(plan, budget)
        return replicas

    def _check_replicas(self, plan: Plan, work: Sequence[int], budget: Budget) -> ReplicaCheck | None:
        request, task, checkpoint = plan.request, plan.request.task, rank_checkpoint_of(plan.checkpoint)
        effort = self._effort.check_replicas
        if effort == "auto" and (task.verify or task.recover):
            # A recovery may copy any of these replicas in place of a lost rank.
            effort = "all" if task.recover else "more"
        if checkpoint is None and effort != "never":
            try:
                check_copies(stored_checkpoint(plan.checkpoint), _stored_names(plan), self.handles, budget, effort)
            except CheckpointError:
                self.check_crcs(plan, plan.checkpoint.indexes.values())
                raise
        if checkpoint is None or request.source.is_none or request.source.is_as_cut:
            return None
        if effort == "never":
            return ReplicaCheck("nothing")
        tensors = _compared(plan, checkpoint, effort)
        recovered = _recovered(plan, tensors, frozenset(work)) if task.recover else None
        comparison = compare_replicas(tensors, checkpoint, self.handles, budget, self._progress, effort, recovered)
        if comparison.differing:
            # Partially read files have no CRC check yet.
            self.check_crcs(plan, [checkpoint.indexes[rank] for rank in comparison.differing[0].ranks])
            read = replace(request.asked.source, step=checkpoint.step or "latest")
            raise comparison.error(request.source.path, read)
        if comparison.gradients:
            lost = [rank for rank in work if task.recover and plan.form.copied_file(rank) is None]
            if lost:
                raise CheckpointError(
                    f"{rank_ranges(lost)} cannot be recovered exactly: {comparison.gradient_warning()}",
                    rank=lost[0],
                    parameter=comparison.gradients[0].parameter,
                    hint="to write another rank's gradients in their place: --check-replicas never",
                )
            if not task.recover:
                self._report.warn(comparison.gradient_warning())
        if not comparison.check.tested:
            check_stages(request.source, checkpoint)
        check_slices(request.source, tensors, checkpoint, self.handles, budget)
        return comparison.check

    def _check_equal(self, plan: Plan, budget: Budget) -> None:
        """Compare tied tensors, of which one is written; a dry run compares only their first bytes."""
        in_part = plan.request.task.dry_run or is_in_part(plan.request.asked)
        equals = tied_among(plan.checkpoint, [*plan.sorted.resharded, *plan.sorted.copied])
        equals = [equal for equal in equals if not (equal.optional and in_part)]
        if equals:
            most = CHUNK_BYTES if plan.request.task.dry_run else None
            with contextlib.closing(BoxReader(self.handles, budget)) as reader:
                check_equal(plan.checkpoint, equals, reader, self._progress, most)


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


def _recovered(plan: Plan, tensors: Iterable[GlobalTensor], ranks: frozenset[int]) -> frozenset[int] | None:
    """The ranks whose slices are recovered; None for all, if another stage's ranks hold some of them."""
    stages = [stage for stage in plan.request.source.stages if not ranks.isdisjoint(stage.ranks)]
    for tensor in tensors:
        numbers = {sharding.stage.number for sharding in stage_shardings(tensor)}
        if any(tensor.name in stage.layouts and stage.number not in numbers for stage in stages):
            # No file of the stage holds this tied parameter: it comes from another stage.
            return None
    return ranks


def _stored_names(plan: Plan) -> list[str]:
    """The tensors in the source files that are converted."""
    checkpoint = plan.checkpoint
    stored: set[str] = set()
    for source in (source for name in plan.sorted.resharded for source in checkpoint.tensors[name].sources):
        decoding = source.decoding
        stored.update([source.name] if decoding is None else [decoding.stored, *decoding.beside])
    return sorted(stored & stored_checkpoint(checkpoint).tensors.keys())


def _compared(plan: Plan, checkpoint: RankCheckpoint, effort: str) -> list[GlobalTensor]:
    """The tensors whose replicas are compared.

    The samples do not depend on the requested target ranks: every run judges the source strategy alike.
    """
    if effort == "all" or not plan.request.edits.is_empty:
        # Scales that no strategy lists are compared where they are read.
        return [checkpoint.tensors[name] for name in _stored_names(plan)]
    target, admit = plan.request.target, plan.request.filters.admit
    parameters = set(target.parameters)
    return [
        tensor for name, tensor in checkpoint.tensors.items() if admit(name) and (target.is_none or name in parameters)
    ]
