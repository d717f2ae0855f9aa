"""A conversion from a request to its summary: plan, checks, bytes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from reshard.checkpoints import CheckpointIndex, FileHandles, unchecked
from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor, stored_checkpoint
from reshard.convert.summary import Phases, Summary, totals_of
from reshard.convert.target_directory import TargetDirectory
from reshard.convert.writing import State, WriteElsewhere, Writing
from reshard.errors import CheckpointError, DamagedCheckpointError, IncompleteSourceError, InputError, UsageError
from reshard.execute import Budget, Progress
from reshard.execute.budget import reading_budget, writing_budget
from reshard.execute.destination import check_apart, check_bucket, check_disjoint, check_space
from reshard.execute.equal import check_equal, equal_of
from reshard.execute.reader import CHUNK_BYTES, BoxReader
from reshard.execute.runs import largest_transposed
from reshard.forms.ranks.checkpoint import RankCheckpoint, rank_checkpoint_of, stage_shardings
from reshard.forms.ranks.naming import check_prefix
from reshard.forms.registry import counted_as
from reshard.plan.edits import Request
from reshard.plan.pieces import share_of
from reshard.plan.plan import Plan
from reshard.plan.planner import make_plan
from reshard.records import SourceFile, SourceSampler
from reshard.source_replicas import (
    ReplicaCheck,
    check_copies,
    check_slices,
    check_stages,
    compare_replicas,
    hint_of_swap,
)
from reshard.text.messages import Report, are, joined, number_ranges, plural, rank_ranges, some_names


class DamagedSourcesError(DamagedCheckpointError):
    """Source files of a step are damaged, by the CRCs that they record."""

    checkpoint: Checkpoint | None
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


def transform(request: Request, report: Report | None = None) -> Summary:
    """Convert a checkpoint.

    Raises:
        ReshardError: the conversion is impossible, or failed; no partial file is left.
    """
    with prepare(request, report) as prepared:
        return prepared.carry_out()


@contextlib.contextmanager
def prepare(request: Request, report: Report | None = None, progress: Progress | None = None) -> Iterator[Prepared]:
    """Plan and check a conversion; its source files stay open until the end of the ``with`` block.

    Args:
        request: the conversion.
        report: gets warnings and notes as they come.
        progress: counts bytes that are read and written.

    Raises:
        ReshardError: the conversion is impossible; nothing has been written.
    """
    if request.to.options.by_rank and not request.target.is_placeholder:
        check_target_ranks(request)
    target = request.asked.target
    if target.prefix is not None:
        check_prefix(target.prefix)
    check_bucket(request.dst)
    if request.asked.source.files is None:
        check_disjoint(request.src, (), request.dst)
    additions = request.edits.additions
    with FileHandles() if additions is None else additions.handles as handles:
        yield Prepared(request, handles, report or Report(), progress or Progress())


class Prepared:
    """The steps of a conversion before it writes: plan, survey of the target directory, checks of the source.

    Attributes:
        state: the plan and its remaining work.
        replicas: the test of the source strategy; None without strategy or without work.
    """

    def __init__(self, request: Request, handles: FileHandles, report: Report, progress: Progress) -> None:
        self._started = time.monotonic()
        self._request = request
        self._effort = request.asked.effort
        self._task = request.task
        self._handles = handles
        self._report = report
        self._progress = progress
        self._sampler = SourceSampler(handles)
        self._crcs = SourceCrcs(request, self._sampler, handles, report, progress)
        try:
            self._take_steps()
        except DamagedSourcesError as damage:
            # Damaged files count as lost, once: one that is found damaged after that is an error.
            self._take_steps(damage)

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.state.plan

    def _take_steps(self, damage: DamagedSourcesError | None = None) -> None:
        with self._swap_hinted():
            self.state = self._surveyed(damage)
        self._planned = time.monotonic()
        self.replicas = self._check_sources()
        self._checked = time.monotonic()

    def _swap_hinted(self) -> contextlib.AbstractContextManager[None]:
        """Errors in this block hint at swapped strategies, if the files' shapes show it."""
        request = self._request
        by_rank = all(form.options.by_rank for form in (request.form, request.to))
        if not by_rank or not request.edits.is_empty:
            return contextlib.nullcontext()
        return hint_of_swap(request.source, request.target, request.asked.source, self._handles)

    def _surveyed(self, damage: DamagedSourcesError | None) -> State:
        """The plan, and what is left to write."""
        asked = self._request.asked
        try:
            plan = make_plan(self._request._replace(damaged=self._crcs.damaged), self._handles, self._report)
        except InputError as error:
            if damage is not None:
                error.hint = "; ".join(filter(None, [error.hint, "to skip CRC checks: --crc never"]))
            raise
        if damage is not None and damage.checkpoint is not None:
            self._check_step(plan, damage.checkpoint)
        request, sources = plan.request, plan.checkpoint.files.values()
        if asked.target.is_file:
            if len(plan.requested) != 1:
                count = plural(len(plan.requested), request.to.options.unit)
                raise UsageError(f"{request.dst}: is one file, and {count} are requested", hint="name one: files=(0,)")
            strategies = (s.path for s in (request.source, request.target) if not s.is_none)
            check_apart(request.dst, sources, strategies)
        else:
            targets = [plan.path(file) for file in plan.requested]
            check_disjoint(request.src, sources, request.dst, targets)
            if request.edits.additions is not None:
                check_disjoint({}, request.edits.additions.paths, request.dst, targets)
        if self._task.recover and not self._task.dry_run:
            # Damaged files count as lost, which changes the requested ranks.
            self._crcs.check(plan, plan.checkpoint.indexes.values())
        requested = self._share(plan)
        directory = None
        if not asked.target.is_file:
            directory = TargetDirectory(plan, requested, self._sampler, self._report, self._crcs.files)
            suspects = [plan.checkpoint.indexes[holder] for holder in directory.suspects()]
            self._crcs.check(plan, suspects, known=True)
        work = requested if directory is None else tuple(directory.survey().missing)
        sizes = plan.file_bytes(work)
        transposed, max_open = largest_transposed(plan.checkpoint), self._handles.limit
        effort, checksum = self._effort, asked.target.checksum == "crc32"
        budget = writing_budget(plan, sizes, max_open, effort.cpus, effort.max_memory, effort.io, transposed)
        return State(plan, budget, requested, sizes, directory, checksum)

    def _check_step(self, plan: Plan, before: Checkpoint) -> None:
        """Refuse another step than without the damage where other runs do not read the damaged files."""
        asked, after = self._request.asked, plan.checkpoint
        if asked.files is None or asked.source.step != "latest" or before.step == after.step:
            return
        counted = self._request.to.options.unit
        raise IncompleteSourceError(
            f"{before.label} is damaged where {rank_ranges(asked.files, counted)} would read, and "
            f"{after.label} would be used instead; other target {counted}s read other source files and may use "
            f"{before.label}",
            hint=f"pass --step {after.step} for every {counted}; to skip CRC checks: --crc never",
        )

    def _share(self, plan: Plan) -> tuple[int, ...]:
        """The requested target files that this run writes."""
        files: tuple[int, ...] = plan.requested
        if self._task.lost_only:
            files = tuple(file for file in files if plan.form.copied_file(file) is None)
        shard = plan.request.asked.shard
        if shard is not None:
            files = share_of(plan.data_bytes(files), *shard)
        return files

    def carry_out(self, elsewhere: WriteElsewhere | None = None) -> Summary:
        """Write the remaining files, unless it is a dry run.

        Args:
            elsewhere: writes the files; None to write them here.

        Raises:
            ReshardError: it failed; no partial file is left.
        """
        began = time.monotonic()
        nbytes, manifest, work = sum(self.state.sizes.values()), None, self.state.work
        if not self._task.dry_run:
            writing = Writing(self.state, self._handles, self._report, self._progress, elsewhere)
            nbytes = writing.write()
            manifest, work = writing.manifest, writing.work
        ended = time.monotonic()
        summary = self._summary(work)
        summary.manifest = manifest
        summary.kept = set() if self.state.directory is None else self.state.directory.kept
        summary.bytes_written = nbytes
        summary.replicas = self.replicas
        summary.phases = Phases(self._planned - self._started, self._checked - self._planned, ended - began)
        summary.seconds = ended - self._started
        return summary

    def _summary(self, work: Sequence[int]) -> Summary:
        """The part of the summary that follows from the plan and the written files."""
        plan, requested = self.plan, self.state.requested
        lost = range(plan.form.count) if self._task.recover else ()
        summary = Summary(plan.checkpoint.step)
        summary.ranks = list(work)
        summary.files = [plan.path(file) for file in work]
        summary.target_files = {file: plan.path(file) for file in requested}
        summary.done_before = sorted(set(requested).difference(work))
        summary.source_ranks = sorted(plan.checkpoint.indexes)
        summary.recovered = [file for file in lost if plan.form.copied_file(file) is None]
        summary.parameters = len(plan.sorted.resharded)
        summary.kinds = totals_of(plan, requested)
        summary.copied = plan.sorted.copied
        summary.excluded = plan.sorted.excluded
        summary.all_names = plan.known_names()
        summary.left_out = plan.sorted.left_out
        summary.missing = plan.sorted.missing
        summary.unholdable = plan.sorted.unholdable
        summary.warnings = self._report.warnings
        summary.notes = self._report.notes
        summary.dry_run = self._task.dry_run
        return summary

    def _check_sources(self) -> ReplicaCheck | None:
        """Check space and source files before writing."""
        plan, work = self.plan, self.state.work
        if not self._task.dry_run:
            check_space(self.state.space)
        for space in self.state.space:
            if space.problem is not None:
                self._report.warn(f"{space.problem}: the conversion would be refused")
        if not work:
            return None
        if not (self._task.dry_run or self._task.recover):
            whole, partly = plan.files_read(work)
            self._crcs.check(plan, whole)
            # Encryption tags are always checked before use, CRCs are not.
            self._crcs.note_unchecked(index.path for index in partly if index.crc is not None)
        # After the CRC checks: a damaged file is no evidence against the strategy.
        replicas = self._check_replicas()
        self._check_equal()
        return replicas

    def _check_replicas(self) -> ReplicaCheck | None:
        """Compare replicas of the source."""
        task, plan = self._task, self.plan
        request, checkpoint = plan.request, rank_checkpoint_of(plan.checkpoint)
        effort = self._effort.check_replicas
        if effort == "auto" and (task.verify or task.recover):
            # A recovery may copy any of these replicas in place of a lost rank.
            effort = "all" if task.recover else "more"
        if checkpoint is None and effort != "never":
            stored = stored_checkpoint(plan.checkpoint)
            try:
                check_copies(stored, self._stored(), self._handles, self.state.execution, effort)
            except CheckpointError:
                self._crcs.check(plan, plan.checkpoint.indexes.values())
                raise
        if checkpoint is None or request.source.is_none or request.source.is_as_cut:
            return None
        if effort == "never":
            return ReplicaCheck("nothing")
        tensors = self._compared(checkpoint, effort)
        comparison = compare_replicas(
            tensors,
            checkpoint,
            self._handles,
            self.state.execution,
            self._progress,
            effort,
            self._recovered(tensors) if task.recover else None,
        )
        if comparison.differing:
            # Partially read files have no CRC check yet.
            self._crcs.check(plan, [checkpoint.indexes[rank] for rank in comparison.differing[0].ranks])
            read = replace(request.asked.source, step=checkpoint.step or "latest")
            raise comparison.error(request.source.path, read)
        if comparison.gradients:
            lost = [rank for rank in self.state.work if task.recover and plan.form.copied_file(rank) is None]
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
        check_slices(request.source, tensors, checkpoint, self._handles, self.state.execution)
        return comparison.check

    def _recovered(self, tensors: Iterable[GlobalTensor]) -> frozenset[int] | None:
        """The ranks whose slices are recovered; None for all, if another stage's ranks hold some of them."""
        strategy, ranks = self.plan.request.source, frozenset(self.state.work)
        stages = [stage for stage in strategy.stages if not ranks.isdisjoint(stage.ranks)]
        for tensor in tensors:
            numbers = {sharding.stage.number for sharding in stage_shardings(tensor)}
            if any(tensor.name in stage.layouts and stage.number not in numbers for stage in stages):
                # No file of the stage holds this tied parameter: it comes from another stage.
                return None
        return ranks

    def _check_equal(self) -> None:
        """Compare tied tensors, of which one is written; a dry run compares only their first bytes."""
        plan = self.plan
        in_part = self._task.dry_run or plan.request.asked.in_part
        equals = equal_of(plan.checkpoint, [*plan.sorted.resharded, *plan.sorted.copied])
        equals = [equal for equal in equals if not (equal.optional and in_part)]
        if not equals:
            return
        most = CHUNK_BYTES if self._task.dry_run else None
        with contextlib.closing(BoxReader(self._handles, self.state.execution)) as reader:
            check_equal(plan.checkpoint, equals, reader, self._progress, most)

    def _stored(self) -> list[str]:
        """The tensors in the source files that are converted."""
        checkpoint = self.plan.checkpoint
        stored: set[str] = set()
        for source in (source for name in self.plan.sorted.resharded for source in checkpoint.tensors[name].sources):
            decoding = source.decoding
            stored.update([source.name] if decoding is None else [decoding.stored, *decoding.beside])
        return sorted(stored & stored_checkpoint(checkpoint).tensors.keys())

    def _compared(self, checkpoint: RankCheckpoint, effort: str) -> list[GlobalTensor]:
        """The tensors to compare.

        The samples do not depend on the requested target ranks: every run judges the source strategy alike.
        """
        if effort == "all" or not self.plan.request.edits.is_empty:
            # Scales that no strategy lists are compared where they are read.
            return [checkpoint.tensors[name] for name in self._stored()]
        target, admit = self.plan.request.target, self.plan.request.filters.admit
        parameters = set(target.parameters)
        return [
            tensor
            for name, tensor in checkpoint.tensors.items()
            if admit(name) and (target.is_none or name in parameters)
        ]


def check_target_ranks(request: Request) -> None:
    """Refuse target ranks beyond the target strategy.

    Raises:
        UsageError: a rank is out of range.
    """
    count = request.target.device_count
    beyond = [rank for rank in request.target_ranks or () if not 0 <= rank < count]
    if beyond:
        raise UsageError(
            f"target {rank_ranges(beyond)} (RANK, --ranks) {are(beyond)} out of range: the target strategy "
            f"({request.target.path}) has {plural(count, 'rank')}, 0 to {count - 1}",
            rank=beyond[0],
        )
