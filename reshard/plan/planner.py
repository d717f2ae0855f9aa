"""Making a plan: source step, target files, treatment of every tensor, and all problems."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from reshard.checkpoints import FileHandles, can_hold
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.checkpoints.formats.dtypes import TEXT
from reshard.errors import UsageError
from reshard.forms import DEFAULT_FORM
from reshard.forms.form import Names, ReadRequest, WriteRequest, strategy_of
from reshard.forms.ranks.checkpoint import rank_checkpoint_of
from reshard.forms.registry import counted_as, form_named
from reshard.forms.target import Cuts, TargetForm, laid_out_names
from reshard.plan.checks import check, problems_of_form
from reshard.plan.edits import Request
from reshard.plan.plan import Plan, Sorted, requested_files, sections_of
from reshard.plan.replicas import ReplicaChoice
from reshard.plan.values import CopiedValues
from reshard.strategies import SAME, Strategy, shards_of
from reshard.text.messages import Report, listing, plural

if TYPE_CHECKING:
    from reshard.plan.recovery import Recovery


def make_plan(request: Request, handles: FileHandles, report: Report) -> Plan:
    """Plan a conversion from headers alone.

    Raises:
        ReshardError: the request cannot be met; nothing has been written.
    """
    source, admit = request.form, request.filters.admit
    checkpoint = base = read_source(request, handles, report)
    shards = shards_of(request.target.path)
    if request.target.is_placeholder and shards is None:
        request = request._replace(target=strategy_of(source, base))
        for note in request.target.notes:
            report.note(note)
    if not request.edits.is_empty:
        # Loaded only here: most conversions edit nothing.
        from reshard.plan.editing import edited, same_layouts

        checkpoint = edited_checkpoint = edited(base, request.edits, report, handles=handles)
        if request.edits.has_masters:
            from reshard.plan.masters import check_masters

            check_masters(edited_checkpoint, request.edits.casts, admit)
        if request.target.path == SAME:
            request = request._replace(target=same_layouts(request.target, edited_checkpoint))
        if request.edits.to_trainer and not request.edits.has_masters:
            from reshard.plan.steps import with_steps

            checkpoint = with_steps(edited_checkpoint, admit, handles)
    if request.to.options.names is not Names.MODEL:
        from reshard.plan.steps import with_steps_laid_out
        from reshard.plan.trainers import laid_out

        target = request.target
        if target.path != SAME:
            target = laid_out(request.edits, target, checkpoint.tensors)
        request = request._replace(target=with_steps_laid_out(target, checkpoint.tensors))
    if shards is not None:
        shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
        request = request._replace(target=Strategy.shards(shards, shapes))
    recovery: Recovery | None = None
    ranks = rank_checkpoint_of(base)
    if request.task.recover:
        from reshard.plan.recovery import RecoveredFiles, Recovery

        assert ranks is not None
        recovery = Recovery(request, ranks, handles)
        form: TargetForm = RecoveredFiles(request, ranks, recovery)
    else:
        to = form_named(DEFAULT_FORM) if request.task.in_memory else request.to
        form = to.target(checkpoint, _write_request(request, handles, report))
        if request.to.options.names is not Names.TRAINER and not request.task.in_memory:
            _note_skipped_objects(checkpoint, admit, report)
    checkpoint = checkpoint if form.checkpoint is None else form.checkpoint
    several = request.source.device_count > 1
    values = CopiedValues(checkpoint, form, request.filters, several, handles, request.source.is_as_cut)
    values_of = values.of if recovery is None else partial(recovery.values_of, values=values)
    between_ranks = source.options.by_rank and form.by_rank and request.edits.is_empty
    choice = ReplicaChoice(request.source, request.target) if between_ranks else None
    _check_numbers(request, form)
    values.warn_of_differing(report)
    plan = Plan(request, checkpoint, form, values_of, sort(request, checkpoint, form, values), Cuts(), choice)
    problems = problems_of_form(plan) if recovery is None else recovery.problems(plan.requested)
    if ranks is not None and recovery is None and request.edits.is_empty:
        ranks.warn_of_unlisted(request.source, report)
    check(plan, values, problems, report)
    if recovery is not None:
        recovery.note(plan.requested, form, values, report)
    return plan


def _note_skipped_objects(checkpoint: Checkpoint, admit: Callable[[str], bool], report: Report) -> None:
    skipped = sorted(filter(admit, checkpoint.objects))
    if skipped:
        report.note(
            f"{plural(len(skipped), 'object')} skipped: only dcp and hyper-parallel hold objects other than tensors: "
            + listing(skipped)
        )


def read_source(
    request: Request, handles: FileHandles, report: Report, required: Callable[[str], bool] | None = None
) -> Checkpoint:
    """One step of the source of a request.

    Raises:
        ReshardError: the source is incomplete or damaged, or cannot be read.
    """
    shards = shards_of(request.target.path) is not None
    edit = None
    if not request.edits.is_empty:
        # Loaded only here: most conversions edit nothing.
        from reshard.plan.editing import step_editor

        edit = step_editor(request.edits, request.target, handles)
    return request.form.read(
        ReadRequest(
            request.asked.source,
            handles,
            report,
            request.damaged,
            required or _is_required(request),
            source=request.source,
            # Rows of everything are cut, whatever the source holds.
            target=Strategy.none() if shards else request.target,
            ranks=None if shards else request.target_ranks,
            filters=request.filters,
            edit=edit,
        )
    )


def _write_request(request: Request, handles: FileHandles, report: Report) -> WriteRequest:
    edits = request.edits
    return WriteRequest(
        request.asked.target,
        request.source,
        request.target,
        handles,
        report,
        request.filters.admit,
        request.task.in_memory,
        edits.config_path,
        bool(edits.casts),
        edits.quantisation is not None,
    )


def _check_numbers(request: Request, form: TargetForm) -> None:
    """Refuse files that the target does not have."""
    beyond = [file for file in request.asked.files or () if not 0 <= file < form.count]
    if beyond:
        counted = counted_as(form.name)
        raise UsageError(
            f"{counted} {beyond[0]} (RANK, --ranks) is out of range: {plural(form.count, counted)} would be written, "
            f"0 to {form.count - 1}",
            rank=beyond[0] if form.by_rank else None,
        )


def _is_required(request: Request) -> Callable[[str], bool]:
    """Whether a tensor is written at all."""
    edits, admit = request.edits, request.filters.admit
    if not edits.is_empty:
        # A tensor is required if any of its possible names is written.
        return lambda name: any(new is None or admit(new) for new in edits.possible_names(name))
    target_names = set(request.target.parameters)
    everything = request.target.is_none or request.target.is_placeholder

    return lambda name: admit(name) and (everything or name in target_names)


def sort(request: Request, checkpoint: Checkpoint, form: TargetForm, values: CopiedValues) -> Sorted:
    """The treatment of every tensor."""
    admit = request.filters.admit
    sections = sections_of(form, requested_files(request, form))
    target_names = laid_out_names(sections)
    resharded = sorted(name for name in checkpoint.tensors if admit(name) and name in target_names)
    left_out: list[str] = []
    copied = set(values.names)
    laid_out = checkpoint.names().intersection(checkpoint.laid_out) - copied
    if form.takes_everything:
        target_names = laid_out
    else:
        everywhere = laid_out_names(form.sections)
        left_out = sorted(name for name in laid_out if admit(name) and name not in everywhere)
        if request.asked.files is None or not form.by_rank:
            # Files of some forms are laid out for the tensors of the source only.
            target_names = target_names.union(request.target.parameters)
    missing = sorted(
        name for name in target_names if admit(name) and name not in checkpoint.tensors and name not in copied
    )
    unholdable = sorted(
        name for name, tensor in values.examples() if tensor.dtype == TEXT and not can_hold(form.format, tensor.dtype)
    )
    excluded = sorted(name for name in laid_out if not admit(name))
    return Sorted(resharded, excluded, left_out, missing, sorted(copied.difference(unholdable)), unholdable)
