"""Opening a checkpoint: its form, and the selected tensors."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace

from reshard.asked import Conversion, Edits, Effort, Path, Source, Target, Task
from reshard.checkpoints import FileHandles
from reshard.errors import UsageError
from reshard.forms import DEFAULT_FORM
from reshard.forms.form import Form, Layouts, Names, strategy_of
from reshard.forms.registry import check_exists, check_holds_ranks, check_options, form_named, form_of
from reshard.forms.request import EditRules, Means, Request
from reshard.in_python import errors_in_python, in_python
from reshard.opened.checkpoint import OpenedCheckpoint
from reshard.plan.edits import NO_TABLE, edit_rules
from reshard.records.ledger import recorded_strategy
from reshard.records.record import strategy_digest
from reshard.strategies import SAME, Strategy, shards_of, target_named, target_words, typed_strategy
from reshard.text.messages import Report, logged, plural


@errors_in_python()
def open(
    source: Path | Source,
    *,
    src_strategy: Path | None = None,
    dst_strategy: Path | None = None,
    shards: int | None = None,
    rank: int | None = None,
    form: str | None = None,
    edits: Edits = Edits(),
    effort: Effort = Effort(),
) -> OpenedCheckpoint:
    """Open a checkpoint of any form, to read tensors from its files.

    Without ``dst_strategy`` tensors are whole, in any layout of the source. With it, they are the slices that a
    conversion would write for one of its ranks. Warnings and notes go to the logger ``reshard``.

    Args:
        source: the checkpoint, or its path.
        src_strategy: strategy of a source that is given by its path.
        dst_strategy: strategy of the requested slices; ``"same"`` for the source's.
        shards: number of ranks over which rows are cut, as PyTorch's FSDP cuts them, in place of ``dst_strategy``.
        rank: rank of ``dst_strategy`` or ``shards`` whose slices are read.
        form: form of a target whose names and packing the tensors get from ``edits``, as of ``convert --to``; with
            ``dst_strategy``, by default ``ranks``.
        edits: the selected tensors, and their names, packing and types.
        effort: CPUs, memory, and how files are read.

    Raises:
        UsageError: parameters are missing, or contradict each other.
        ReshardError: the checkpoint is missing, or a strategy cannot be read.
    """
    report = logged(in_python)
    if isinstance(source, Source):
        if src_strategy is not None:
            raise UsageError("src_strategy belongs to the path of a source", hint="Source has it: strategy=")
        read = source
    else:
        read = Source(os.fspath(source), None if src_strategy is None else os.fspath(src_strategy))
    strategy = None if dst_strategy is None else os.fspath(dst_strategy)
    trains = form_of(read.path).options.names is not Names.MODEL
    if form is None and strategy is None and trains and edits.names not in (None, NO_TABLE):
        raise UsageError("names= of a trainer's checkpoint need form=", hint="add form='huggingface', 'ranks' or 'dcp'")
    target = Target(os.curdir, strategy=strategy, shards=shards, form=form)
    request = reading_request(Conversion(read, target, edits, effort), report, rank)
    return OpenedCheckpoint(request, Means(FileHandles(), report), errors_in_python)


def reading_request(
    asked: Conversion,
    report: Report,
    rank: int | None = None,
    edits: EditRules | None = None,
    option: str = "--src-strategy ",
    unrecorded: str | None = None,
) -> Request:
    """The conversion request for reading: its target is one file in memory, which is never written.

    Args:
        asked: the source, the strategy of the slices, and the selection.
        report: gets notes on strategies.
        rank: see `open`.
        edits: other names and types than `asked` has.
        option: spelling of the option of the source's strategy, for messages.
        unrecorded: see `source_strategy`.

    Raises:
        UsageError: options are missing, or contradict each other.
        ReshardError: the checkpoint is missing, or a strategy cannot be read.
    """
    read = asked.source
    form = form_of(read.path)
    check_options(read, form)
    source = source_strategy(read, form, report, option, unrecorded)
    target, file = _target(asked, form, source, rank, report)
    named = asked.target.form or (None if asked.target.strategy is None else DEFAULT_FORM)
    to = form_named(named or DEFAULT_FORM)
    if edits is None:
        edits = edit_rules(read.path, asked.edits, None if named is None else to, read.step, asked.target)
    request = Request(replace(asked, files=(file,)), form, source, to, target, task=Task(in_memory=True))
    return request.with_edits(edits)


def source_strategy(read: Source, form: Form, report: Report, option: str, unrecorded: str | None = None) -> Strategy:
    """The strategy of a source, as typed or recorded by the conversion that wrote it; `none` for other forms.

    Args:
        read: the source.
        form: of the source.
        report: gets notes on the strategy.
        option: spelling of the option, for messages.
        unrecorded: the strategy of rank directories without a typed or recorded one.

    Raises:
        UsageError: rank directories have neither, or it is given for another form.
    """
    src, strategy = read.path, read.strategy
    check_exists(src)
    if form.options.needs_strategy:
        recorded = recorded_strategy(src) if strategy is None else None
        strategy = unrecorded if strategy is None else strategy
        if recorded is not None:
            typed = None if strategy is None else typed_strategy(strategy, report)
            if typed is None or strategy_digest(typed) != strategy_digest(recorded.strategy):
                path = shlex.quote(recorded.strategy.path)
                report.note(f"{src} is read with its recorded strategy: {option}{path}")
            if not recorded.complete:
                report.warn(
                    f"the conversion to {src} is not complete; to complete it: reshard resume {shlex.quote(src)}"
                )
            return recorded.strategy
        if strategy is None:
            check_holds_ranks(src)
            # Loaded only here, for an error.
            from reshard.inspection.contents import refuse_other_files

            refuse_other_files(src)
            raise UsageError(
                f"{src}: rank files do not record how they are cut",
                hint=f"add {option}FILE or {option}DIR; for an unsharded checkpoint: {option}none",
            )
        return typed_strategy(strategy, report)
    return Strategy.none()


def _target(asked: Conversion, form: Form, source: Strategy, rank: int | None, report: Report) -> tuple[Strategy, int]:
    """The strategy of the requested slices, and its rank."""
    src, strategy = asked.source.path, target_named(asked.target.strategy, asked.target.shards)
    if strategy is None and rank is not None:
        raise UsageError(
            f"the strategy of rank {rank} is missing", hint="add dst_strategy=..., 'same' for the source's"
        )
    if strategy is None:
        return Strategy.none(), 0
    shards = shards_of(strategy)
    if shards is not None:
        target = Strategy.shards(shards)
    elif strategy != SAME:
        target = typed_strategy(strategy, report)
    elif form.options.layouts is Layouts.RECORDED:
        with FileHandles() as handles:
            reading = Request.of_source(asked.source, form)._replace(partial=True)
            target = strategy_of(form, form.read(reading, Means(handles, Report())))
    elif form.options.needs_strategy:
        # Cut like the source, under any names.
        target = replace(source, path=SAME)
    else:
        raise UsageError(f"{src}: holds full weights, which have no strategy for slices")
    count = shards or target.device_count
    shown = strategy if shards is None else " ".join(target_words(strategy))
    if rank is None and count > 1:
        raise UsageError(f"the target strategy ({shown}) has {plural(count, 'rank')}", hint="add rank=...")
    if rank is not None and not 0 <= rank < count:
        raise UsageError(
            f"rank {rank} is out of range: the target strategy ({shown}) has {plural(count, 'rank')}", rank=rank
        )
    return target, rank or 0
