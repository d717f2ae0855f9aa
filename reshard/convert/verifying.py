"""Converted checkpoints compared with their sources or manifests."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Optional

from reshard.checkpoints import FileHandles
from reshard.convert.ends import read_ends, with_recorded_target
from reshard.convert.options import Options
from reshard.convert.recorded import edits_of_target, other_source, strategies_of_target
from reshard.convert.summary import Summary
from reshard.errors import CheckpointError, InputError, UsageError
from reshard.execute import Progress
from reshard.forms.registry import counted_as, form_named, form_of
from reshard.plan.request import Request
from reshard.records import Identity, Manifest, read_manifest
from reshard.records.status import status_of
from reshard.source_replicas import hint_of_swap
from reshard.storage import exists, real
from reshard.strategies import SAME
from reshard.text.globs import Filters
from reshard.text.messages import Report, are, joined, rank_ranges, some_names
from reshard.verification.against_manifest import compare_with_manifest
from reshard.verification.difference import Difference
from reshard.verification.end_to_end import (
    Adapter,
    Converted,
    ConvertedTarget,
    converted_files,
    recorded_plan,
    recorded_step,
    verify_conversion,
    written_ranks,
)
from reshard.verification.reading import Means
from reshard.verification.sources import CheckpointPlace, RecordedCrcs


@contextlib.contextmanager
def reading_sources(
    options: Options, progress: Progress, report: Report
) -> Iterator[tuple[Means, Optional[RecordedCrcs]]]:
    """Means to read source files within these options, and the CRCs that the files record; None with ``crc="never"``.

    Raises:
        RetryableError: at the end, if a file has changed.
    """
    with FileHandles() as handles:
        means = Means(handles, options.jobs, options.max_memory, progress)
        yield means, RecordedCrcs(means, report) if options.crc == "auto" else None
        means.check_unchanged()


def verify_written(
    request: Request, how: Options, summary: Summary, progress: Progress, adapter: Optional[Adapter]
) -> list[Difference]:
    """Compare all requested target files with the source: those of ranks one by one, other forms as a whole."""
    assert isinstance(request.src, str)
    report = Report()
    with reading_sources(how, progress, report) as (means, crcs):
        step = recorded_step(request.src, request.form, summary.step)
        by_rank = form_named(request.to).options.by_rank
        files = summary.target_files
        if not by_rank:
            files = {number: os.path.relpath(real(path), real(request.dst)) for number, path in files.items()}
        return verify_conversion(
            Converted(
                CheckpointPlace(
                    request.src, request.form, request.source, step, request.file_suffix, request.without_ranks
                ),
                request.edits,
                adapter=adapter,
            ),
            ConvertedTarget(request.dst, request.to, request.target, files, tuple(files) if by_rank else None),
            filters=request.filters,
            means=means,
            report=report,
            crcs=crcs,
            damage_by_path=request.damaged,
        )


def verify_with_source(
    out: str,
    src: str,
    typed: Mapping[str, Any],
    ranks: Optional[tuple[int, ...]],
    filters: Filters,
    means: Means,
    report: Report,
    crcs: Optional[RecordedCrcs],
) -> list[Difference]:
    """Compare a converted checkpoint with its source, and with its manifest if it has one.

    Args:
        out: the converted checkpoint.
        src: its source.
        typed: the options of strategies, names and types, ``step`` and ``file_suffix``; by default those in the
            records of ``out``.
        ranks: only these ranks of ``out``.
        filters: parameters that are compared.
        means: files, threads and memory.
        report: gets warnings and notes.
        crcs: the CRCs that source files record; None if they are not checked.

    Raises:
        ReshardError: options contradict each other or the records, or something cannot be read.
    """
    if not exists(out):
        raise CheckpointError(f"{out}: does not exist", file=out)
    manifest = _manifest(out)
    differences: list[Difference] = []
    if manifest is not None:
        differences += against_manifest(out, of_ranks(manifest, ranks), ranks, means)
    plan = recorded_plan(out, manifest, report)
    to = form_of(out) if plan is None else plan.form
    by_rank = form_named(to).options.by_rank
    if not by_rank and ranks is not None:
        raise UsageError(
            f"--ranks goes with files of ranks; files of {to} are compared with the source together",
            hint="leave out --ranks, or --src",
        )
    if plan is not None and manifest is None and not by_rank:
        _check_finished(out)
    with _naming_other_source(out, src, plan):
        strategies = {name: typed[name] for name in ("src_strategy", "dst_strategy")}
        completed = {**typed, **strategies_of_target(out, src, to, strategies, plan, report)}
        ends = read_ends(src, {**completed, "to": to, "format": None, "max_shard_size": None}, report)
        step, without = typed["step"], tuple(typed.get("without_ranks") or ())
        if plan is not None:
            without = without or plan.without_ranks
            if step == "latest":
                step = recorded_step(src, ends.form, plan.step)
            if not (filters.include or filters.exclude):
                filters = Filters(plan.include, plan.exclude)
        ends = with_recorded_target(src, ends, step)
        if by_rank and ranks is None and manifest is None:
            ranks = written_ranks(out, report)
        if by_rank:
            files, unexpected = converted_files(out, manifest, ranks)
            differences += unexpected
        else:
            files = {} if manifest is None else {file.rank: file.file for file in manifest.files}
        edits, recorded = edits_of_target(out, src, typed, plan, report)
        with contextlib.ExitStack() as stack:
            if by_rank and form_named(ends.form).options.by_rank and edits.is_empty:
                stack.enter_context(
                    hint_of_swap(ends.source, ends.target, src, step, typed["file_suffix"], means.handles)
                )
            differing = verify_conversion(
                Converted(
                    CheckpointPlace(src, ends.form, ends.source, step, typed["file_suffix"], without), edits, recorded
                ),
                ConvertedTarget(out, to, ends.target, files, ranks, ends.target.path == SAME),
                filters=filters,
                means=means,
                report=report,
                crcs=crcs,
                recovered=plan is not None and plan.task == "recover",
            )
    other = None if plan is None or not differing else other_source(out, src, plan)
    if other is not None:
        report.warn(other)
    return [*differences, *differing]


@contextlib.contextmanager
def _naming_other_source(out: str, src: str, plan: Optional[Identity]) -> Iterator[None]:
    """Add to errors about a source that the records list another one."""
    try:
        yield
    except InputError as error:
        other = None if plan is None else other_source(out, src, plan)
        error.hint = joined("\n", filter(None, [other, error.hint])) or None
        raise


def _check_finished(out: str) -> None:
    """Refuse a conversion that has not written all files, or of which not all were copied.

    Raises:
        CheckpointError: files are missing.
    """
    status = status_of(out)
    if status.missing:
        missing = some_names([status.plan.file_of(number) for number in status.missing], 3)
        raise CheckpointError(
            f"{out}: is not complete: {missing} missing",
            file=out,
            hint=f"to write the missing files: reshard resume {shlex.quote(out)}" if status.resumable else None,
        )


def against_manifest(out: str, manifest: Manifest, ranks: Optional[tuple[int, ...]], means: Means) -> list[Difference]:
    """The differences of some ranks, or all, from the manifest."""
    differences = compare_with_manifest(out, manifest, means)
    return [difference for difference in differences if ranks is None or set(difference.ranks) & set(ranks)]


def of_ranks(manifest: Manifest, ranks: Optional[tuple[int, ...]]) -> Manifest:
    """A manifest of some of its ranks, or all.

    Raises:
        UsageError: the manifest lacks one of them; comparing nothing must not pass.
    """
    if ranks is None:
        return manifest
    files = tuple(file for file in manifest.files if file.rank in ranks)
    beyond = sorted(set(ranks).difference(file.rank for file in files))
    noun = counted_as(manifest.plan.form)
    if beyond:
        raise UsageError(
            f"{rank_ranges(beyond, noun)} (--ranks) {are(beyond)} out of range: the manifest has "
            f"{rank_ranges([file.rank for file in manifest.files], noun)}",
            rank=beyond[0],
        )
    return manifest._replace(files=files)


def _manifest(out: str) -> Optional[Manifest]:
    try:
        return read_manifest(out)
    except InputError:
        # A part of the ranks, or another program's output: only the source is compared.
        return None
