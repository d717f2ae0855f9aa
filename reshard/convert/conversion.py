"""A conversion from a request to its summary."""

from __future__ import annotations

import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from reshard.checkpoints import FileHandles
from reshard.convert.target_directory import TargetDirectory
from reshard.errors import IncompleteSourceError, InputError, UnwritableError, UsageError
from reshard.execute import Budget, Progress, write_files
from reshard.execute.budget import writing_budget
from reshard.execute.destination import Space, check_apart, check_bucket, check_disjoint, space_for
from reshard.forms.ranks.naming import check_prefix
from reshard.forms.registry import counted_as
from reshard.forms.request import Means, Request
from reshard.plan.pieces import TargetFile, share_of
from reshard.plan.plan import Plan
from reshard.plan.planner import make_plan
from reshard.source_replicas import DamagedSourcesError, ReplicaCheck, SourceChecks, hint_of_swap
from reshard.text.messages import Report, are, listing, plural, rank_ranges
from reshard.text.names import KINDS, Total, kind_of

WriteElsewhere = Callable[[Sequence[int], Progress], None]
"""Writes and records target files in other processes, perhaps on other machines; counts their sizes."""

# Network file systems cache for up to a minute that a file is missing.
_SEEN_AFTER = 90.0
_PHASES = ("planning", "checking", "writing")


@dataclass(frozen=True, repr=False)
class Summary:
    """The result of a conversion, in the order of its JSON.

    Attributes:
        step: the step that was converted, such as ``3_10``; None for file names without a step.
        ranks: target ranks written.
        files: their files, in the order of ``ranks``.
        target_files: file of every requested rank, of this or an earlier run.
        done_before: requested target ranks that an earlier run of the same conversion wrote.
        manifest: the manifest, if every rank of the target strategy is written.
        kept: other files than the source's that the directory held beside the weights, and keeps.
        bytes_written: size of these files together.
        source_ranks: source ranks whose headers were read.
        recovered: ranks that were lost or damaged, when recovering.
        parameters: how many parameters were resharded.
        kinds: totals of the files of all requested ranks, by kind: weights, optimizer
            state, accumulated gradients, other values.
        copied: names of values copied as they are.
        excluded: parameters of the source that --include and --exclude leave out.
        all_names: names of the checkpoint and of the target strategy, from which kinds are derived.
        left_out: others of the source that the target strategy does not have.
        missing: parameters of the target strategy that no source file holds.
        unholdable: values that the target format cannot hold.
        replicas: the test of the source strategy; None without strategy or without work.
        warnings: the warnings.
        notes: the decisions.
        phases: seconds by phase: ``planning`` reads headers, works out the plan and looks at the target directory;
            ``checking`` checks space, the CRCs that source files record, and replicas; ``writing`` the rest.
        seconds: time it took.
        dry_run: nothing was written.
    """

    step: str | None
    ranks: Sequence[int] = ()
    files: Sequence[str] = ()
    target_files: Mapping[int, str] = field(default_factory=dict)
    done_before: Sequence[int] = ()
    manifest: str | None = None
    kept: Collection[str] = ()
    bytes_written: int = 0
    source_ranks: Sequence[int] = ()
    recovered: Sequence[int] = ()
    parameters: int = 0
    kinds: Mapping[str, Total] = field(default_factory=dict)
    copied: Sequence[str] = ()
    excluded: Sequence[str] = ()
    all_names: Collection[str] = ()
    left_out: Sequence[str] = ()
    missing: Sequence[str] = ()
    unholdable: Sequence[str] = ()
    replicas: ReplicaCheck | None = None
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()
    phases: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(_PHASES, 0.0))
    seconds: float = 0.0
    dry_run: bool = False

    def __repr__(self) -> str:
        step = "" if self.step is None else f" of step {self.step}"
        counts = (
            f"{plural(len(self.ranks), 'file')}, {self.bytes_written} bytes, {plural(len(self.warnings), 'warning')}"
        )
        return f"<Summary{step}: {'dry run, ' if self.dry_run else ''}{counts}>"


class Run(NamedTuple):
    """A conversion that was planned, and carried out unless it was a dry run.

    Attributes:
        plan: the plan.
        sizes: bytes of each target file that was left to write, ascending.
        budget: threads, processes and memory.
        space: needed and free bytes on every file system below the target directory.
        summary: the result.
    """

    plan: Plan
    sizes: Mapping[int, int]
    budget: Budget
    space: list[Space]
    summary: Summary


def run(
    request: Request,
    report: Report | None = None,
    progress: Progress | None = None,
    elsewhere: WriteElsewhere | None = None,
) -> Run:
    """Convert a checkpoint; a dry run only plans and checks.

    Args:
        request: the conversion.
        report: gets warnings and notes as they come.
        progress: counts bytes and files; without one, nothing shows them.
        elsewhere: writes the files; None to write them here.

    Raises:
        ReshardError: the conversion is impossible, or failed; no partial file is left.
    """
    report, progress = report or Report(), progress or Progress()
    times, additions = [time.monotonic()], request.edits.additions
    manifest: str | None = None
    _check_request(request)
    with FileHandles() if additions is None else additions.handles as handles:
        checks = SourceChecks(request.asked.effort, handles, report, progress)
        damage: DamagedSourcesError | None = None
        while True:
            try:
                with hint_of_swap(request, handles):
                    plan = _plan(request, checks, damage, report)
                    requested = _requested(plan, checks)
                    directory = _directory(plan, requested, checks, report)
                    sizes = plan.file_bytes(requested if directory is None else directory.survey())
                    budget = writing_budget(plan, sizes, handles.limit)
                times.append(time.monotonic())
                space = _check_space(plan, sizes, directory, report)
                replicas = checks.check(plan, [*sizes], budget)
                break
            except DamagedSourcesError as error:
                # Damaged files count as lost, once: one that is found damaged after that is an error. Those that
                # earlier runs found are of other times: the rest of the step was not checked with them.
                if damage is not None and damage.checkpoint is not None:
                    raise
                damage = error
                del times[1:]
        times.append(time.monotonic())
        written: Mapping[int, int] = sizes
        if directory is not None and not sizes and directory.is_complete and not request.task.dry_run:
            # No target is changed, so a complete directory may be read-only.
            manifest = directory.keep()
        elif not request.task.dry_run:
            with nullcontext([*sizes]) if directory is None else directory.writing() as left:
                written = _write(plan, left, budget, handles, report, progress, directory, elsewhere)
                # Targets are written one after the other: a source that changes meanwhile is detected at the end.
                handles.check_unchanged(_paths_read(plan))
                manifest = None if directory is None else directory.complete()
        times.append(time.monotonic())
        summary = replace(
            _summary(plan, requested, written, report),
            manifest=manifest,
            kept=() if directory is None else directory.kept,
            replicas=replicas,
            phases=dict(zip(_PHASES, (end - start for start, end in pairwise(times)))),
            seconds=times[-1] - times[0],
        )
        return Run(plan, sizes, budget, space, summary)


def _check_request(request: Request) -> None:
    """Refuse what needs no file to be seen: names of files, target ranks beyond the strategy, SRC and DST."""
    target, strategy = request.asked.target, request.target
    if request.to.options.by_rank and not strategy.is_placeholder:
        count = strategy.device_count
        beyond = [rank for rank in request.target_ranks or () if not 0 <= rank < count]
        if beyond:
            raise UsageError(
                f"target {rank_ranges(beyond)} (RANK, --ranks) {are(beyond)} out of range: the target strategy "
                f"({strategy.path}) has {plural(count, 'rank')}, 0 to {count - 1}",
                rank=beyond[0],
            )
    if target.prefix is not None:
        check_prefix(target.prefix)
    check_bucket(request.dst)
    if request.asked.source.files is None:
        check_disjoint(request.src, (), request.dst)


def _plan(request: Request, checks: SourceChecks, damage: DamagedSourcesError | None, report: Report) -> Plan:
    """The plan, without files that are damaged.

    Raises:
        ReshardError: the conversion is impossible.
    """
    request, means = request._replace(damaged={**request.damaged, **checks.damaged}), Means(checks.handles, report)
    try:
        if request.task.recover:
            # Loaded only here: most runs recover nothing.
            from reshard.plan.recovery import plan_recovery

            plan = plan_recovery(request, means)
        else:
            plan = make_plan(request, means)
    except InputError as error:
        if damage is not None:
            error.hint = "; ".join(filter(None, [error.hint, "to skip CRC checks: --crc never"]))
        raise
    asked, before, after = request.asked, None if damage is None else damage.checkpoint, plan.checkpoint
    if before is not None and before.step != after.step and asked.files is not None and asked.source.step == "latest":
        # Other runs may not read the damaged files.
        counted = request.to.options.unit
        raise IncompleteSourceError(
            f"{before.label} is damaged where {rank_ranges(asked.files, counted)} would read, and "
            f"{after.label} would be used instead; other target {counted}s read other source files and may use "
            f"{before.label}",
            hint=f"pass --step {after.step} for every {counted}; to skip CRC checks: --crc never",
        )
    sources = after.files.values()
    if asked.target.is_file:
        if len(plan.requested) != 1:
            count = plural(len(plan.requested), request.to.options.unit)
            raise UsageError(f"{request.dst}: is one file, and {count} are requested", hint="name one: files=(0,)")
        strategies = (s.path for s in (plan.request.source, plan.request.target) if not s.is_none)
        check_apart(request.dst, sources, strategies)
    else:
        targets = [plan.path(file) for file in plan.requested]
        check_disjoint(request.src, sources, request.dst, targets)
        if request.edits.additions is not None:
            check_disjoint({}, request.edits.additions.paths, request.dst, targets)
    return plan


def _requested(plan: Plan, checks: SourceChecks) -> tuple[int, ...]:
    """The requested target files that this run writes, ascending."""
    task, shard, files = plan.request.task, plan.request.asked.shard, plan.requested
    if task.recover and not task.dry_run:
        # Damaged files count as lost, which changes the requested ranks.
        checks.check_crcs(plan, plan.checkpoint.indexes.values())
    if task.lost_only:
        files = tuple(file for file in files if plan.form.copied_file(file) is None)
    return files if shard is None else share_of(plan.data_bytes(files), *shard)


def _directory(plan: Plan, requested: Sequence[int], checks: SourceChecks, report: Report) -> TargetDirectory | None:
    """The records of targets; None for a single file, which has none, and where no rank is lost."""
    if plan.request.asked.target.is_file or (plan.request.task.lost_only and not requested):
        return None
    directory = TargetDirectory(plan, requested, checks, report)
    checks.check_crcs(plan, [plan.checkpoint.indexes[holder] for holder in directory.suspects()], known=True)
    return directory


def _check_space(
    plan: Plan, sizes: Mapping[int, int], directory: TargetDirectory | None, report: Report
) -> list[Space]:
    """Needed and free bytes on every file system; a dry run warns of too little.

    Raises:
        UnwritableError: some file system has less free space than is needed on it.
    """
    needed = [(os.path.dirname(plan.path(file)), size) for file, size in sizes.items()]
    if needed and directory is not None:
        needed += [(plan.request.dst, file.size or 0) for file in plan.form.finishing()]
    spaces = space_for(needed)
    for space in spaces:
        if space.problem is not None:
            if not plan.request.task.dry_run:
                raise UnwritableError(space.problem, file=space.place, hint="free some space or choose another DST")
            report.warn(f"{space.problem}: the conversion would be refused")
    return spaces


def _write(
    plan: Plan,
    work: Sequence[int],
    budget: Budget,
    handles: FileHandles,
    report: Report,
    progress: Progress,
    directory: TargetDirectory | None,
    elsewhere: WriteElsewhere | None,
) -> Mapping[int, int]:
    """Write target files; returns the sizes of the files that this run wrote. Another run may write some of them."""
    if not work:
        return {}
    progress.begin(sum(plan.data_bytes(work).values()), "writing")
    try:
        if directory is not None and elsewhere is not None:
            elsewhere(work, progress)
            deadline = time.monotonic() + _SEEN_AFTER
            while time.monotonic() < deadline and len(directory.recorded(work)) < len(work):
                time.sleep(0.5)
        else:
            groups: Iterable[Sequence[TargetFile]] = plan.groups(work, budget.limits)
            finish = None if directory is None else directory.finished
            groups = groups if directory is None else directory.missing(groups)
            checksum = plan.request.asked.target.checksum == "crc32"
            # Files of a later pipeline stage, or of another part of the model, may need NumPy where the first do not.
            samples = {work[len(work) // 2], work[-1]}
            write_files(groups, handles, budget, progress, finish, checksum, plan.target_file, samples)
    except BaseException:
        if directory is not None and progress.written:
            count = f"{len(progress.written)} of {plural(len(work), counted_as(plan.form.name))}"
            report.warn(f"{count} written; run the same command again to continue")
        raise
    finally:
        progress.end()
        if progress.overflows:
            count = plural(sum(progress.overflows.values()), "element")
            report.warn(
                f"{count} became infinite, being too large for the requested type: "
                + listing(sorted(progress.overflows))
            )
    return {file: progress.written[file] for file in work if file in progress.written}


def _paths_read(plan: Plan) -> Iterator[str]:
    """All files that a conversion reads."""
    additions = plan.request.edits.additions
    yield from (index.path for index in plan.checkpoint.indexes.values())
    yield from (file.source for file in plan.form.finishing() if file.source is not None)
    yield from () if additions is None else additions.paths


def _summary(plan: Plan, requested: Sequence[int], written: Mapping[int, int], report: Report) -> Summary:
    lost = range(plan.form.count) if plan.request.task.recover else ()
    return Summary(
        plan.checkpoint.step,
        ranks=[*written],
        files=[plan.path(file) for file in written],
        target_files={file: plan.path(file) for file in requested},
        done_before=sorted(set(requested).difference(written)),
        bytes_written=sum(written.values()),
        source_ranks=sorted(plan.checkpoint.indexes),
        recovered=[file for file in lost if plan.form.copied_file(file) is None],
        parameters=len(plan.sorted.resharded),
        kinds=_totals(plan, requested),
        copied=plan.sorted.copied,
        excluded=plan.sorted.excluded,
        all_names=plan.known_names(),
        left_out=plan.sorted.left_out,
        missing=plan.sorted.missing,
        unholdable=plan.sorted.unholdable,
        warnings=report.warnings,
        notes=report.notes,
        dry_run=plan.request.task.dry_run,
    )


def _totals(plan: Plan, files: Collection[int]) -> dict[str, Total]:
    """Per kind the names, each once, and the bytes of tensor contents in some target files together."""
    all_names = plan.known_names()
    names: dict[str, set[str]] = defaultdict(set)
    sizes: Counter[str] = Counter()
    for name, elements, nbytes in _tensor_totals(plan, files):
        kind = kind_of(name, elements, all_names)
        names[kind].add(name)
        sizes[kind] += nbytes
    return {kind: Total(len(names[kind]), sizes[kind]) for kind in KINDS if kind in names}


def _tensor_totals(plan: Plan, files: Collection[int]) -> Iterator[tuple[str, int, int]]:
    """Name, number of elements and bytes of the tensors in some files."""
    taken_over = {file: plan.form.copied_file(file) for file in files}
    copies = [plan.checkpoint.indexes[holder] for holder in taken_over.values() if holder is not None]
    resharded = sorted(file for file, holder in taken_over.items() if holder is None)
    for section in plan.sections:
        alike = plan.by_names(section, resharded)
        for kind in plan.kinds_of(section) if alike else ():
            elements = math.prod(kind.tensors[0].shape)
            for names, members in alike.items():
                nbytes = sum(plan.slice_bytes(kind, section, members).values())
                for tensor in kind.tensors:
                    if names is None or tensor.name in names:
                        yield tensor.name, elements, nbytes
    for file in resharded:
        for _, value in plan.values_of(file):
            yield value.name, value.elements, value.nbytes
    # Files that are taken over are copied as they are, many of them built alike.
    tensors = {id(index.tensors): index.tensors for index in copies}
    counts = Counter(id(index.tensors) for index in copies)
    for number, count in counts.items():
        for stored in tensors[number].values():
            yield stored.name, stored.elements, stored.nbytes * count
