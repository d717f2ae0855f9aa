"""Making a plan: source step, target files, treatment of every tensor, and all problems."""

from __future__ import annotations

from reshard.checkpoints import can_hold
from reshard.checkpoints.checkpoint import Checkpoint, EditedCheckpoint
from reshard.checkpoints.formats.dtypes import TEXT
from reshard.errors import UsageError
from reshard.forms import DEFAULT_FORM
from reshard.forms.form import Names, strategy_of
from reshard.forms.ranks.checkpoint import rank_checkpoint_of
from reshard.forms.registry import counted_as, form_named
from reshard.forms.request import Means, Request
from reshard.forms.target import TargetForm, laid_out_names
from reshard.plan.checks import check
from reshard.plan.plan import Plan, Sorted, requested_files, sections_of
from reshard.plan.replicas import ReplicaChoice
from reshard.plan.values import CopiedValues
from reshard.strategies import SAME, Strategy, shards_of
from reshard.text.messages import Report, listing, plural


def make_plan(request: Request, means: Means) -> Plan:
    """Plan a conversion from headers alone; `recovery.plan_recovery` plans a recovery.

    Raises:
        ReshardError: the request cannot be met; nothing has been written.
    """
    source = read_source(request, means)
    edited = _edited(source, request, means)
    checkpoint = _with_steps(edited, request, means)
    request = request._replace(target=_target(request, source, edited, checkpoint, means.report))
    files = _target_files(request, checkpoint, means)
    if files.checkpoint is not None:
        checkpoint = files.checkpoint
    values = CopiedValues(request, checkpoint, files, means)
    values.warn_of_differing(means.report)
    treatment = sort(request, checkpoint, files, values)
    by_rank = request.form.options.by_rank and files.by_rank
    choice = ReplicaChoice(request.source, request.target) if by_rank and request.edits.is_empty else None
    plan = Plan(request, checkpoint, files, values.of, treatment, choice)
    ranks = rank_checkpoint_of(source)
    if ranks is not None and request.edits.is_empty:
        ranks.warn_of_unlisted(request.source, means.report)
    check(plan, values, means.report)
    return plan


def _edited(source: Checkpoint, request: Request, means: Means) -> Checkpoint:
    """The source with other names, packing and types."""
    if request.edits.is_empty:
        return source
    # Loaded only here: most conversions edit nothing.
    from reshard.plan.editing import Editing

    checkpoint = Editing(source, request.edits, means.report, handles=means.handles).edited()
    if request.edits.has_masters:
        from reshard.plan.masters import check_masters

        check_masters(checkpoint, request.edits.casts, request.filters.admit)
    return checkpoint


def _with_steps(edited: Checkpoint, request: Request, means: Means) -> Checkpoint:
    """The checkpoint with the steps of a trainer's state."""
    if not request.edits.to_trainer or request.edits.has_masters:
        return edited
    from reshard.plan.steps import with_steps

    assert isinstance(edited, EditedCheckpoint)
    return with_steps(edited, request.filters.admit, means.handles)


def _target(
    request: Request, source: Checkpoint, edited: Checkpoint, checkpoint: Checkpoint, report: Report
) -> Strategy:
    """The strategy of the target, for the names that are written.

    Args:
        request: the conversion; its target may be a placeholder.
        source: the source.
        edited: the source with its edits.
        checkpoint: the same, with steps of a trainer's state.
        report: gets notes.
    """
    shards, target = shards_of(request.target.path), request.target
    if shards is not None:
        return Strategy.shards(shards, {name: tensor.shape for name, tensor in checkpoint.tensors.items()})
    if target.is_placeholder:
        target = strategy_of(request.form, source)
        for note in target.notes:
            report.note(note)
    if target.path == SAME and isinstance(edited, EditedCheckpoint):
        from reshard.plan.editing import same_layouts

        target = same_layouts(target, edited)
    if request.to.options.names is Names.MODEL:
        return target
    from reshard.plan.steps import with_steps_laid_out
    from reshard.plan.trainers import laid_out

    if target.path != SAME:
        target = laid_out(request.edits, target, checkpoint.tensors)
    return with_steps_laid_out(target, checkpoint.tensors)


def _target_files(request: Request, checkpoint: Checkpoint, means: Means) -> TargetForm:
    """The files of the target."""
    to = form_named(DEFAULT_FORM) if request.task.in_memory else request.to
    files = to.target(checkpoint, request, means)
    skipped = sorted(filter(request.filters.admit, checkpoint.objects))
    if skipped and request.to.options.names is not Names.TRAINER and not request.task.in_memory:
        means.report.note(
            f"{plural(len(skipped), 'object')} skipped: only dcp and hyper-parallel hold objects other than tensors: "
            + listing(skipped)
        )
    check_numbers(request, files)
    return files


def read_source(request: Request, means: Means) -> Checkpoint:
    """One step of the source of a request.

    Raises:
        ReshardError: the source is incomplete or damaged, or cannot be read.
    """
    if not request.edits.is_empty:
        # Loaded only here: most conversions edit nothing.
        from reshard.plan.editing import step_editor

        request = request._replace(edit=step_editor(request.edits, request.target, means.handles))
    return request.form.read(request, means)


def check_numbers(request: Request, files: TargetForm) -> None:
    """Refuse files that the target does not have."""
    beyond = [file for file in request.asked.files or () if not 0 <= file < files.count]
    if beyond:
        counted = counted_as(files.name)
        raise UsageError(
            f"{counted} {beyond[0]} (RANK, --ranks) is out of range: {plural(files.count, counted)} would be written, "
            f"0 to {files.count - 1}",
            rank=beyond[0] if files.by_rank else None,
        )


def sort(request: Request, checkpoint: Checkpoint, files: TargetForm, values: CopiedValues) -> Sorted:
    """The treatment of every tensor."""
    admit = request.filters.admit
    sections = sections_of(files, requested_files(request, files))
    target_names = laid_out_names(sections)
    resharded = sorted(name for name in checkpoint.tensors if admit(name) and name in target_names)
    left_out: list[str] = []
    copied = set(values.names)
    laid_out = checkpoint.names().intersection(checkpoint.laid_out) - copied
    if files.takes_everything:
        target_names = laid_out
    else:
        everywhere = laid_out_names(files.sections)
        left_out = sorted(name for name in laid_out if admit(name) and name not in everywhere)
        if request.asked.files is None or not files.by_rank:
            # Files of some forms are laid out for the tensors of the source only.
            target_names = target_names.union(request.target.parameters)
    missing = sorted(
        name for name in target_names if admit(name) and name not in checkpoint.tensors and name not in copied
    )
    unholdable = sorted(
        name for name, tensor in values.examples() if tensor.dtype == TEXT and not can_hold(files.format, tensor.dtype)
    )
    excluded = sorted(name for name in laid_out if not admit(name))
    return Sorted(resharded, excluded, left_out, missing, sorted(copied.difference(unholdable)), unholdable)
