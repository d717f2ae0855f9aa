"""Making a plan: the step to convert, what is written, what becomes of every tensor, and every problem there is."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Optional

from reshard.checkpoints import FileHandles, FileNames, Step, StepFiles, can_hold, find_checkpoints, format_of
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.defaults import DEFAULT_PREFIX
from reshard.errors import CheckpointError
from reshard.plan.checks import check, problems_of_unlisted
from reshard.plan.cuts import Cuts
from reshard.plan.plan import Plan, Sorted, Values, asked_files, sections_of
from reshard.plan.rank_checkpoint import RankCheckpoint
from reshard.plan.recovery import RecoveredFiles, RecoveredValues, Recovery
from reshard.plan.replicas import ReplicaChoice
from reshard.plan.request import Request
from reshard.plan.selection import StepSelector
from reshard.plan.values import CopiedValues
from reshard.report import Report
from reshard.source_ranks import check_ranks
from reshard.storage import exists
from reshard.target import RankFiles, TargetForm
from reshard.wording import rank_ranges

_CHOOSE_FORMAT = "choose the target's with --format ckpt or --format safetensors"
_NAME_FORMAT = "name the files of one format, as in 'ckpt/rank_{rank}/*.ckpt'; ranks that have none then count as lost"


def make_plan(request: Request, handles: FileHandles, report: Report) -> Plan:
    """Plan a conversion from headers alone.

    Raises:
        ReshardError: the request cannot be met; nothing has been written.
    """
    checkpoint = _rank_checkpoint(request, handles, report)
    format = _format(request, checkpoint)
    names = _names(request, checkpoint)
    choice = ReplicaChoice(request.source, request.target)
    sliced = request.source.device_count > 1
    if not request.recover:
        form = RankFiles(request.target, checkpoint.tensors, format, names)
        values = CopiedValues(checkpoint, form, request.filters, sliced, handles)
        plan = _plan(request, checkpoint, form, values, values, choice, report)
        check(plan, values, problems_of_unlisted(plan, checkpoint, report), report)
        return plan
    recovery = Recovery(request, checkpoint, format, handles)
    form = RecoveredFiles(request, checkpoint, format, names, recovery)
    values = CopiedValues(checkpoint, form, request.filters, sliced, handles)
    plan = _plan(request, checkpoint, form, values, RecoveredValues(values, recovery), choice, report)
    check(plan, values, recovery.problems(plan.asked), report)
    recovery.tell(plan.asked, form, values, report)
    return plan


def _plan(
    request: Request,
    checkpoint: RankCheckpoint,
    form: TargetForm,
    values: CopiedValues,
    copied: Values,
    choice: Optional[ReplicaChoice],
    report: Report,
) -> Plan:
    values.warn_of_differing(report)
    sorted = sort(request, checkpoint, form, values, checkpoint.listed)
    return Plan(request, checkpoint, form, copied, sorted, Cuts(), choice)


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
    there = checkpoint.names().intersection(listed)
    if form.takes_everything:
        wanted = there
    else:
        everywhere = set().union(*(section.layouts.keys() for section in form.sections))
        left_out = sorted(name for name in there if name not in everywhere)
    copied = set(values.names)
    missing = sorted(name for name in wanted if admit(name) and name not in checkpoint.tensors and name not in copied)
    unholdable = sorted(
        name for name, tensor in values.examples() if tensor.dtype == "str" and not can_hold(form.format, tensor.dtype)
    )
    return Sorted(resharded, left_out, missing, sorted(copied.difference(unholdable)), unholdable)


def _rank_checkpoint(request: Request, handles: FileHandles, report: Report) -> RankCheckpoint:
    """The step of a rank tree that is converted."""
    selector = StepSelector(request.source, request.target, request.ranks, request.filters, handles, report)
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


def _format(request: Request, checkpoint: Checkpoint) -> str:
    if request.format != "same":
        return request.format
    formats = {format_of(path): path for path in checkpoint.files.values()}
    if len(formats) > 1:
        raise CheckpointError(
            f"source files have different formats: {' and '.join(sorted(formats.values()))}",
            hint=_NAME_FORMAT if request.recover else _CHOOSE_FORMAT,
        )
    return next(iter(formats))


def _names(request: Request, checkpoint: RankCheckpoint) -> FileNames:
    """Of the files of ranks; of a recovery as in the source, unless others were asked for."""
    found = checkpoint.source.found.names
    if request.recover and request.prefix is None and found is not None:
        return found
    return FileNames.of_prefix(DEFAULT_PREFIX if request.prefix is None else request.prefix, checkpoint.source.step)
