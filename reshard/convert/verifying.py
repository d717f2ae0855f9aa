"""Converted checkpoints compared with their sources or manifests."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from reshard.asked import Conversion, Effort, Task, cpus_of, has_changes
from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint, tied_among
from reshard.convert.conversion import Summary
from reshard.convert.ends import with_ends
from reshard.convert.recorded import as_recorded, check_rules, is_copy, other_source, step_to_read
from reshard.convert.unchanged import compare_with_manifest
from reshard.errors import CheckpointError, InputError, NamesError, TargetError, UsageError
from reshard.execute import Budget, Progress
from reshard.execute.equal import check_equal
from reshard.execute.reader import BoxReader
from reshard.forms.ranks.tree import find_checkpoints
from reshard.forms.registry import counted_as, form_named, form_of
from reshard.forms.request import Request
from reshard.numbers.fingerprint import Fingerprints, fingerprints
from reshard.plan.editing import Editing
from reshard.plan.edits import edit_rules
from reshard.plan.planner import read_source
from reshard.plan.trainers import names_in_model
from reshard.records import Manifest, Record, read_manifest
from reshard.records.ledger import ledger_in
from reshard.records.status import status_of
from reshard.source_replicas import hint_of_swap
from reshard.storage import costs_of, exists, is_regular_file, real
from reshard.text.globs import warn_of_unmatched
from reshard.text.messages import Report, are, number_ranges, rank_ranges, some_names
from reshard.verification.edited import edited_source
from reshard.verification.end_to_end import (
    MergedAdapter,
    Verified,
    between_forms,
    has_the_asked_rules,
    verify_conversion,
)
from reshard.verification.files import read_sound
from reshard.verification.reading import Difference, Reading
from reshard.verification.stored import Source, stored_source


@contextlib.contextmanager
def reading_sources(effort: Effort, progress: Progress, report: Report) -> Iterator[Reading]:
    """Means to read source files within an effort.

    Raises:
        RetryableError: at the end, if a file has changed.
    """
    with FileHandles() as handles:
        means = Reading(handles, report, cpus_of(effort), effort.max_memory, progress, effort.crc == "auto")
        yield means
        means.check_unchanged()


def _at(request: Request, step: str, files: tuple[int, ...] | None) -> Request:
    """A conversion of one step to these files."""
    asked = request.asked
    return request._replace(asked=replace(asked, source=replace(asked.source, step=step), files=files))


def verify_written(
    request: Request, summary: Summary, progress: Progress, adapter: MergedAdapter | None = None
) -> list[Difference]:
    """Compare all requested target files with the source: those of ranks one by one, other forms as a whole.

    Args:
        request: the conversion as requested, which is planned again, with the files that it found damaged.
        summary: the step and the written files.
        progress: counts bytes.
        adapter: the adapter added to the weights, if any.
    """
    report = Report()
    if not has_the_asked_rules(request):
        return [Difference("file", None, (), f"{request.dst}: names or types are not those asked for")]
    files, by_rank = summary.target_files, request.to.options.by_rank
    if not by_rank:
        files = {number: os.path.relpath(real(path), real(request.dst)) for number, path in files.items()}
    step = step_to_read(request, summary.step)
    request = _at(request, step, tuple(files) if by_rank else None)._replace(edits=between_forms(request))
    with reading_sources(request.asked.effort, progress, report) as means:
        conversion = Verified(request, files, partial(read_source, means=means), True, adapter, kept=summary.kept)
        return verify_conversion(conversion, means)


def verify_with_source(asked: Conversion, means: Reading) -> list[Difference]:
    """Compare a converted checkpoint with its source, and with its manifest if it has one.

    Args:
        asked: the conversion; strategies, step, names and types that it does not name are those in the records of its
            target.
        means: files, report, threads and memory.

    Raises:
        ReshardError: options contradict each other or the records, or something cannot be read.
    """
    out, src, ranks, report = asked.target.path, asked.source.path, asked.files, means.report
    if not exists(out):
        raise CheckpointError(f"{out}: does not exist", file=out)
    manifest = _manifest(out)
    differences: list[Difference] = []
    if manifest is not None:
        differences += against_manifest(out, of_ranks(manifest, ranks), ranks, means)
    record = recorded_conversion(out, manifest, report)
    to = form_of(out) if record is None else form_named(record.form)
    by_rank = to.options.by_rank
    if not by_rank and ranks is not None:
        raise UsageError(
            f"--ranks goes with files of ranks; files of {to.name} are compared with the source together",
            hint="leave out --ranks, or --src",
        )
    if record is not None and manifest is None and not by_rank:
        _check_finished(out)
    rules_are_asked = has_changes(asked.edits)
    with _naming_other_source(out, src, record):
        if record is None:
            asked = replace(asked, target=replace(asked.target, form=to.name))
        else:
            asked = as_recorded(asked, record, report)
        task = Task(recover=record is not None and record.task.recover)
        request = with_ends(asked, report, task)
        if by_rank and ranks is None and manifest is None:
            ranks = written_ranks(out, report)
        if by_rank:
            files, unexpected = converted_files(out, manifest, ranks)
            differences += unexpected
        else:
            files = {} if manifest is None else {file.rank: file.file for file in manifest.files}
        step = asked.source.step
        if record is not None and step == "latest":
            step = step_to_read(request, record.step)
        # Between some forms names change without an option.
        edits = edit_rules(src, asked.edits, None if is_copy(request, record) else request.to, step, asked.target)
        request = _at(request.with_edits(edits), step, ranks)
        if not is_copy(request, record):
            request = request._replace(edits=between_forms(request))

        def read(each: Request) -> Checkpoint:
            checkpoint = read_source(each, means)
            if record is not None and not rules_are_asked:
                check_rules(checkpoint, edits, out, record, means.handles)
            return checkpoint

        conversion = Verified(request, files, read, recorded=record is not None)
        with hint_of_swap(request._replace(edits=edits), means.handles):
            try:
                differing = verify_conversion(conversion, means)
            except (NamesError, UsageError) as error:
                # Records list only the last of several conversions, and SRC may be the source of the first.
                fingerprints = f"reshard fingerprint {shlex.quote(src)}, and of {shlex.quote(out)}"
                error.add_hint(f"to compare checkpoints with the same names: {fingerprints}")
                raise
    other = None if record is None or not differing else other_source(out, src, record)
    if other is not None:
        report.warn(other)
    return [*differences, *differing]


def source_fingerprints(request: Request, means: Reading) -> Fingerprints:
    """The fingerprints of the selected tensors and values of a source, with the names and types of its edits.

    Raises:
        CheckpointError: nothing is selected, or tied tensors or pipeline stages differ.
        ReshardError: a file cannot be read.
    """
    filters, rules, edited = request.filters, request.edits, has_changes(request.asked.edits)

    def read(damaged: Mapping[str, str]) -> Source:
        checkpoint = read_source(request._replace(damaged=damaged), means)
        return stored_source(checkpoint, request.source)

    stored = read_sound(read, means)
    if not request.form.options.by_rank:
        _check_equal(stored.checkpoint, [name for name in stored.tensors if filters.admit(name)], means)
    target = stored if rules.is_empty else edited_source(stored, rules, means.report, means.handles)
    if not rules.is_empty:
        converted = Editing(stored.checkpoint, rules, Report(), handles=means.handles).edited()
        _check_equal(converted, [name for name in target.names if filters.admit(name)], means)
    warn_of_unmatched(filters, (target.names, () if edited else request.source.parameters), means.report)
    if target.names and not any(map(filters.admit, target.names)):
        raise CheckpointError(
            "no parameter or value of the checkpoint is selected", hint="check --include and --exclude"
        )
    model_names = {} if edited else names_in_model(rules, stored.checkpoint.tensors, stored.checkpoint)
    if len({*model_names.values()}) < len(model_names):
        # Two tensors would have one name.
        model_names = {}
    return fingerprints(target, means, filters.admit, model_names)


def _check_equal(checkpoint: Checkpoint, names: Sequence[str], means: Reading) -> None:
    """Compare tied tensors."""
    equals = tied_among(checkpoint, names)
    if equals:
        costs = costs_of(next(iter(checkpoint.files.values())))
        budget = Budget.of(means.jobs, means.max_memory, costs)
        with contextlib.closing(BoxReader(means.handles, budget)) as reader:
            check_equal(checkpoint, equals, reader)


@contextlib.contextmanager
def _naming_other_source(out: str, src: str, record: Record | None) -> Iterator[None]:
    """Add to errors about a source that the records list another one."""
    try:
        yield
    except InputError as error:
        error.add_hint(None if record is None else other_source(out, src, record), first=True)
        raise


def _check_finished(out: str) -> None:
    """Refuse a conversion that has not written all files, or of which not all were copied.

    Raises:
        CheckpointError: files are missing.
    """
    status = status_of(out)
    if status.missing:
        hint = f"to write the missing files: reshard resume {shlex.quote(out)}"
        missing = some_names([status.record.file_of(number) for number in status.missing], 3)
        raise CheckpointError(
            f"{out}: is not complete: {missing} missing",
            file=out,
            hint=hint if status.record.is_repeatable else None,
        )


def against_manifest(out: str, manifest: Manifest, ranks: tuple[int, ...] | None, means: Reading) -> list[Difference]:
    """The differences of some ranks, or all, from the manifest."""
    differences = compare_with_manifest(out, manifest, means)
    return [difference for difference in differences if ranks is None or set(difference.ranks) & set(ranks)]


def of_ranks(manifest: Manifest, ranks: tuple[int, ...] | None) -> Manifest:
    """A manifest of some of its ranks, or all.

    Raises:
        UsageError: the manifest lacks one of them; comparing nothing must not pass.
    """
    if ranks is None:
        return manifest
    files = tuple(file for file in manifest.files if file.rank in ranks)
    beyond = sorted(set(ranks).difference(file.rank for file in files))
    noun = counted_as(manifest.record.form)
    if beyond:
        raise UsageError(
            f"{rank_ranges(beyond, noun)} (--ranks) {are(beyond)} out of range: the manifest has "
            f"{rank_ranges([file.rank for file in manifest.files], noun)}",
            rank=beyond[0],
        )
    return manifest._replace(files=files)


def _manifest(out: str) -> Manifest | None:
    try:
        return read_manifest(out)
    except InputError:
        # A part of the ranks, or another program's output: only the source is compared.
        return None


def recorded_conversion(out: str, manifest: Manifest | None, report: Report) -> Record | None:
    """The conversion of a directory, from its manifest or else from the records of unfinished runs, if it has any.

    Raises:
        RetryableError: records cannot be read.
    """
    if manifest is not None:
        return manifest.record
    try:
        ledger = ledger_in(out)
    except TargetError as error:
        report.warn(f"{error.message}; it is ignored")
        return None
    return None if ledger is None else ledger.record


def written_ranks(out: str, report: Report) -> tuple[int, ...] | None:
    """The ranks to compare in a directory without a manifest, from its records.

    A recovery of some ranks is whole without the others. A conversion is not: the runs of other machines are missing.
    None stands for all ranks.
    """
    try:
        status = status_of(out)
    except TargetError:
        return None
    wanted, requested = status.record.wanted, status.record.asked.files
    if status.record.task.recover and requested is not None:
        # The plan records the ranks of the first run; later ones recovered others.
        requested = tuple(sorted({*requested, *status.written}))
        others = set(wanted).difference(requested)
        if others:
            report.note(f"compared: {rank_ranges(requested)}; not requested: {rank_ranges(others)}")
            return requested
    if status.record.lost:
        report.note(f"compared: {rank_ranges(wanted)}, since only lost ranks were to be recovered")
        return tuple(wanted)
    if status.done and status.missing:
        report.note(
            f"not written yet: {rank_ranges(status.missing)}; to compare only {rank_ranges(status.done)}, add "
            f"--ranks {number_ranges(status.done)}"
        )
    return None


def converted_files(
    out: str, manifest: Manifest | None, ranks: tuple[int, ...] | None
) -> tuple[dict[int, str], list[Difference]]:
    """The files of a converted checkpoint by rank, and a difference for each file of another step.

    Without a manifest, the newest step counts.

    Raises:
        ReshardError: manifest and files are missing, or the newest step is ambiguous.
    """
    if manifest is not None:
        paths = {file.rank: os.path.join(out, file.file) for file in manifest.files}
        return {rank: path for rank, path in paths.items() if is_regular_file(path)}, []
    tree = find_checkpoints(out)
    newest = tree.newest()
    other_steps = [
        Difference("file", None, (file.rank,), f"{file.path} is not of the newest step, which was compared")
        for file in tree.files
        if file.step != newest.step and (ranks is None or file.rank in ranks)
    ]
    return newest.files, other_steps
