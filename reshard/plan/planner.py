"""Making a plan: the step to convert, what is written, what becomes of every tensor, and every problem there is."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Callable, Optional

from reshard.checkpoints import FileHandles, FileNames, Step, StepFiles, can_hold, find_checkpoints
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.checkpoints.formats.dtypes import TEXT
from reshard.checkpoints.forms import RANKS, counted_as, read_checkpoint, strategy_of
from reshard.checkpoints.rank_tree.source_ranks import check_ranks
from reshard.errors import CheckpointError, UsageError
from reshard.plan.checks import check, problems_of_form, problems_of_unlisted
from reshard.plan.cuts import Cuts
from reshard.plan.edits import Edits, edited, same_layouts
from reshard.plan.plan import Plan, Sorted, Values, asked_files, sections_of
from reshard.plan.rank_checkpoint import RankCheckpoint
from reshard.plan.recovery import RecoveredFiles, RecoveredValues, Recovery
from reshard.plan.replicas import ReplicaChoice
from reshard.plan.request import Request
from reshard.plan.selection import StepSelector
from reshard.plan.values import CopiedValues
from reshard.plan.written_form import format_asked, rank_names, written_form
from reshard.storage import exists
from reshard.strategies import SAME
from reshard.target import TargetForm
from reshard.text.report import Report
from reshard.text.wording import plural, rank_ranges


def make_plan(request: Request, handles: FileHandles, report: Report) -> Plan:
    """Plan a conversion from headers alone.

    Raises:
        ReshardError: the request cannot be met; nothing has been written.
    """
    if request.recover:
        return _recovery(request, handles, report)
    if request.edits is not None:
        return _of_edits(request, request.edits, handles, report)
    if request.form == RANKS:
        return _of_ranks(request, handles, report)
    checkpoint = read_checkpoint(
        request.form, str(request.src), request.step, handles, report, request.damaged, _wanted_by(request)
    )
    if request.target.is_untold:
        request = replace(request, target=strategy_of(checkpoint))
    form = written_form(request, checkpoint, handles, report)
    # What such a source does not lay out is known to be whole.
    values = CopiedValues(checkpoint, form, request.filters, False, handles)
    plan = _plan(request, checkpoint, checkpoint.tensors.keys(), form, values, values, None, report)
    check(plan, values, problems_of_form(plan), report)
    return plan


def _of_ranks(request: Request, handles: FileHandles, report: Report) -> Plan:
    """The plan where the source is a tree of ranks."""
    checkpoint = _rank_checkpoint(request, handles, report)
    form = written_form(request, checkpoint, handles, report)
    values = CopiedValues(checkpoint, form, request.filters, request.source.device_count > 1, handles)
    choice = ReplicaChoice(request.source, request.target) if request.to == RANKS else None
    plan = _plan(request, checkpoint, checkpoint.listed, form, values, values, choice, report)
    check(plan, values, [*problems_of_unlisted(plan, checkpoint, report), *problems_of_form(plan)], report)
    return plan


def _of_edits(request: Request, edits: Edits, handles: FileHandles, report: Report) -> Plan:
    """The plan where tensors are written under other names, packed otherwise, or of other types."""
    base: Checkpoint
    if request.form == RANKS:
        base = _rank_checkpoint(request, handles, report)
    else:
        base = read_checkpoint(
            request.form, str(request.src), request.step, handles, report, request.damaged, lambda name: True
        )
    if request.target.is_untold:
        request = replace(request, target=strategy_of(base))
    checkpoint = edited(base, edits, report)
    if request.target.path == SAME:
        told = strategy_of(base) if request.target.is_untold else request.target
        request = replace(request, target=same_layouts(told, checkpoint))
    form = written_form(request, checkpoint, handles, report)
    sliced = request.form == RANKS and request.source.device_count > 1
    values = CopiedValues(checkpoint, form, request.filters, sliced, handles)
    plan = _plan(request, checkpoint, checkpoint.tensors.keys(), form, values, values, None, report)
    check(plan, values, problems_of_form(plan), report)
    return plan


def _recovery(request: Request, handles: FileHandles, report: Report) -> Plan:
    """The plan of a recovery: the same ranks again, intact ones as they are."""
    checkpoint = _rank_checkpoint(request, handles, report)
    format = format_asked(request, checkpoint)
    recovery = Recovery(request, checkpoint, format, handles)
    form = RecoveredFiles(request, checkpoint, format, _names(request, checkpoint), recovery)
    values = CopiedValues(checkpoint, form, request.filters, request.source.device_count > 1, handles)
    copied = RecoveredValues(values, recovery)
    choice = ReplicaChoice(request.source, request.target)
    plan = _plan(request, checkpoint, checkpoint.listed, form, values, copied, choice, report)
    check(plan, values, recovery.problems(plan.asked), report)
    recovery.tell(plan.asked, form, values, report)
    return plan


def _plan(
    request: Request,
    checkpoint: Checkpoint,
    listed: Collection[str],
    form: TargetForm,
    values: CopiedValues,
    copied: Values,
    choice: Optional[ReplicaChoice],
    report: Report,
) -> Plan:
    beyond = [file for file in request.files or () if not 0 <= file < form.count]
    if beyond:
        counted = counted_as(form.name)
        raise UsageError(
            f"{counted} {beyond[0]} (RANK, --ranks) is out of range: {plural(form.count, counted)} would be written, "
            f"0 to {form.count - 1}",
            rank=beyond[0] if form.by_rank else None,
        )
    values.warn_of_differing(report)
    return Plan(request, checkpoint, form, copied, sort(request, checkpoint, form, values, listed), Cuts(), choice)


def _wanted_by(request: Request) -> Callable[[str], bool]:
    """Whether a tensor is written at all."""
    listed = set(request.target.parameters)
    everything = request.target.is_none or request.target.is_untold

    def wanted(name: str) -> bool:
        return request.filters.admit(name) and (everything or name in listed)

    return wanted


def sort(
    request: Request, checkpoint: Checkpoint, form: TargetForm, values: CopiedValues, listed: Collection[str]
) -> Sorted:
    """What becomes of every tensor.

    Args:
        request: what was asked for.
        checkpoint: the source.
        form: what is written.
        values: what is copied as it is.
        listed: names that the source's strategy or metadata lists.
    """
    admit = request.filters.admit
    sections = sections_of(form, asked_files(request, form))
    wanted = set().union(*(section.layouts.keys() for section in sections))
    resharded = sorted(name for name in checkpoint.tensors if admit(name) and name in wanted)
    left_out: list[str] = []
    copied = set(values.names)
    there = checkpoint.names().intersection(listed) - copied
    if form.takes_everything:
        wanted = there
    else:
        everywhere = set().union(*(section.layouts.keys() for section in form.sections))
        left_out = sorted(name for name in there if admit(name) and name not in everywhere)
    missing = sorted(name for name in wanted if admit(name) and name not in checkpoint.tensors and name not in copied)
    unholdable = sorted(
        name for name, tensor in values.examples() if tensor.dtype == TEXT and not can_hold(form.format, tensor.dtype)
    )
    excluded = sorted(name for name in there if not admit(name))
    return Sorted(resharded, excluded, left_out, missing, sorted(copied.difference(unholdable)), unholdable)


def _rank_checkpoint(request: Request, handles: FileHandles, report: Report) -> RankCheckpoint:
    """The step of a rank tree that is converted."""
    selector = StepSelector(
        request.source, request.target, request.target_ranks, request.filters, handles, report, request.edits
    )
    candidates, steps = _candidates(request, handles)
    return selector.select(_with_damage(candidates, request.damaged), steps)


def _candidates(request: Request, handles: FileHandles) -> tuple[Iterable[StepFiles], Sequence[Optional[Step]]]:
    """The steps that may be taken, newest first, and all there are to choose from where the user named none."""
    if not isinstance(request.src, str):
        beyond = [rank for rank in request.src if not 0 <= rank < request.source.device_count]
        if beyond:
            raise CheckpointError(
                f"{rank_ranges(beyond)} given, but the source strategy has {request.source.device_count} devices",
                rank=beyond[0],
            )
        for rank, path in request.src.items():
            if not exists(path):
                raise CheckpointError(f"{path}: does not exist (rank {rank})", file=path, rank=rank)
        return [StepFiles(None, dict(request.src))], ()
    tree = find_checkpoints(request.src, request.file_suffix)
    check_ranks(tree, request.source, handles)
    candidates = tree.candidates(request.step)
    if request.step != "latest":
        return candidates, ()
    return candidates if request.fallback else itertools.islice(candidates, 1), tree.steps


def _with_damage(candidates: Iterable[StepFiles], damaged: Mapping[str, str]) -> Iterator[StepFiles]:
    """Candidates that know which of their files are damaged, given why, by path."""
    for candidate in candidates:
        known = {rank: damaged[path] for rank, path in candidate.files.items() if path in damaged}
        yield replace(candidate, damaged=known)


def _names(request: Request, checkpoint: RankCheckpoint) -> FileNames:
    """Of the files of a recovery: as in the source, unless others were asked for."""
    found = checkpoint.source.found.names
    if request.prefix is None and found is not None:
        return found
    return rank_names(request, checkpoint)
