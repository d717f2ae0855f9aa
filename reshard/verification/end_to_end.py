"""Verification from end to end: which files are compared with which."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Callable, NamedTuple, Optional

from reshard.checkpoints import FileHandles, read_index
from reshard.errors import CheckpointError, InputError, TargetError
from reshard.forms.ranks import find_checkpoints
from reshard.forms.ranks.coverage import check_ranks
from reshard.forms.registry import form_named
from reshard.records import Identity, Manifest
from reshard.records.ledger import current, ledgers_in
from reshard.records.status import status_of
from reshard.storage import is_directory, is_regular_file
from reshard.strategies import Strategy
from reshard.text.filter_advice import warn_of_unmatched
from reshard.text.messages import Message, joined, listing
from reshard.text.name_filters import Filters
from reshard.text.names import WEIGHTS, is_weight, kind_of
from reshard.text.report import Report
from reshard.text.wording import plural, quoted, rank_ranges
from reshard.verification.converted import AnySource, compare_form, compare_ranks
from reshard.verification.copies import compare_copies, has_copies, not_held
from reshard.verification.difference import Difference
from reshard.verification.edited import EditedSource
from reshard.verification.products import sums_of
from reshard.verification.reading import Comparison, Means, compare
from reshard.verification.sources import (
    CheckpointPlace,
    RecordedCrcs,
    read_files_of_ranks,
    read_sound,
    read_written,
    reader_of,
)
from reshard.verification.stored import StoredSource, StoredTensor

if TYPE_CHECKING:
    from reshard.lora import Scale
    from reshard.plan.edits import Edits

_MAX_SHOWN = 3


class Converted(NamedTuple):
    """The source of a conversion, and its edits.

    Attributes:
        place: the source.
        edits: names, packing and types.
        recorded: whether the edits come from the target's records, perhaps of another source.
        beside: whether other files of the model, such as a tokenizer, have to be next to the target's weights, too.
        adapter: the adapter added to its weights, if any.
    """

    place: CheckpointPlace
    edits: Edits
    recorded: bool = False
    beside: bool = True
    adapter: Optional[Adapter] = None


class Adapter(NamedTuple):
    """A low-rank adapter that was added.

    Attributes:
        place: its checkpoint.
        scale: factor of its products.
    """

    place: CheckpointPlace
    scale: Scale


class ConvertedTarget(NamedTuple):
    """A converted checkpoint.

    Attributes:
        directory: its directory.
        form: its form.
        strategy: its layouts; `none` if tensors are whole.
        files: in rank directories the converted files, by rank; for other forms the files relative to the directory,
            by number, empty if no record lists them.
        ranks: target ranks to compare; None for all. Other forms are compared as a whole.
        cut_as_source: the strategy is the source's with the source's names, even if tensors were renamed.
    """

    directory: str
    form: str
    strategy: Strategy
    files: Mapping[int, str]
    ranks: Optional[tuple[int, ...]] = None
    cut_as_source: bool = False


def verify_conversion(
    converted: Converted,
    target: ConvertedTarget,
    *,
    filters: Filters,
    means: Means,
    report: Report,
    crcs: Optional[RecordedCrcs],
    known: Optional[Mapping[str, str]] = None,
    recovered: bool = False,
) -> list[Difference]:
    """Compare a converted checkpoint with its source.

    Args:
        converted: the source.
        target: the converted checkpoint.
        filters: filters of the conversion.
        means: files, threads and memory.
        report: gets notes on step and names.
        crcs: checks the CRCs of source files; None to check none.
        known: damage that the conversion detected, by path. If given, the CRCs of other files are checked
            only if something differs.
        recovered: the target was written by a recovery.

    Returns:
        Every difference.

    Raises:
        ReshardError: the source lacks compared slices, or cannot be read.
    """
    place, edits = converted.place, converted.edits
    by_rank = form_named(place.form).options.by_rank and form_named(target.form).options.by_rank
    unchanged = edits.is_empty and converted.adapter is None
    if unchanged:
        read = reader_of(place, means.handles, report, target=target.strategy, ranks=target.ranks, filters=filters)
    elif by_rank and converted.adapter is None:
        read = reader_of(
            place, means.handles, report, target=target.strategy, ranks=target.ranks, filters=filters, edits=edits
        )
    elif converted.adapter is None and not form_named(place.form).options.by_rank:
        read = reader_of(place, means.handles, report, filters=filters, edits=edits)
    else:
        # The needed slices are known only after rules or an adapter are applied to all tensors.
        read = reader_of(place, means.handles, report)

    def differences(source: StoredSource) -> list[Difference]:
        if unchanged:
            warn_of_unmatched(filters, (place.strategy.parameters, target.strategy.parameters, source.names), report)
            return _compared(source, target, converted, filters.admit, means, report, recovered)
        if converted.recorded and _without_rules(source, edits, _weights_of(target, means.handles)):
            report.note(
                f"{target.directory} has the names of {place.path}, to which the recorded rules would give others: "
                "compared without them; for another comparison add --names or --rename"
            )
            casts = replace(edits, table=None, renames=None)
            plain = converted._replace(edits=casts, recorded=False, beside=False)
            return verify_conversion(plain, target, filters=filters, means=means, report=report, crcs=crcs, known=known)
        edited = EditedSource(source, edits, report)
        if converted.adapter is not None:
            adapter = converted.adapter
            matrices = reader_of(adapter.place, means.handles, Report())({})
            edited.tensors = sums_of(edited.tensors, matrices, adapter.place.path, adapter.scale)
        strategy = target.strategy
        as_source = target.cut_as_source
        laid_out = edited.same_layouts(strategy) if as_source else edits.laid_out(strategy, edited.tensors)
        warn_of_unmatched(filters, (laid_out.parameters, edited.names), report)
        found = [*_untied(edited, means), *_disagreeing(edited, means)]
        renamed = target._replace(strategy=laid_out)
        return [*found, *_compared(edited, renamed, converted, filters.admit, means, report)]

    damaged = dict(known or {})
    if known is not None:
        source = read(damaged)
        different = differences(source)
        # The conversion used a replica in place of a file with a wrong CRC.
        more = crcs.damaged(source.files_read) if different and crcs is not None else {}
        if not more:
            return different
        damaged.update(more)
    return differences(read_sound(read, crcs, damaged))


def _compared(
    source: AnySource,
    target: ConvertedTarget,
    converted: Converted,
    admit: Callable[[str], bool],
    means: Means,
    report: Report,
    recovered: bool = False,
) -> list[Difference]:
    form = form_named(target.form)
    if form.options.by_rank:
        return compare_ranks(
            source, target.files, target.strategy, means, ranks=target.ranks, admit=admit, recovered=recovered
        )
    written, found = read_written(target.directory, target.form, means.handles, [*target.files.values()] or None)
    if written is None:
        return found
    found += compare_form(source, written, target.strategy, target.directory, means, admit)
    if converted.beside:
        edits = converted.edits
        cast = bool(edits.casts) or edits.quantisation is not None
        beside = form.check_beside(target.directory, written.checkpoint, source.checkpoint, cast, report)
        found += [Difference("file", None, (), text, (name,)) for name, text in beside]
    return found


def _weights_of(target: ConvertedTarget, handles: FileHandles) -> set[str]:
    """Names of weights in a converted checkpoint, for rank directories those in one file; empty if none is readable.

    Raises:
        RetryableError: reading failed.
    """
    if not form_named(target.form).options.by_rank:
        written, _ = read_written(target.directory, target.form, handles)
        return set() if written is None else {name for name in written.tensors if is_weight(name, written.tensors)}
    for path in target.files.values():
        try:
            tensors = read_index(handles, path).tensors
        except CheckpointError:
            continue
        return {name for name, tensor in tensors.items() if kind_of(name, math.prod(tensor.shape), tensors) == WEIGHTS}
    return set()


def _without_rules(base: StoredSource, edits: Edits, written: Collection[str]) -> bool:
    """Whether a source already has the names of the target, which recorded rules would change.

    A checkpoint may be converted to other names and back, and then be compared with the first one. Its records
    have only the rules of the way back, and the first one lacks the names that these rules need.

    Args:
        base: the source, complete.
        edits: the recorded edits.
        written: names of the target's weights.
    """
    if not written or not base.names.issuperset(written):
        return False
    try:
        return not EditedSource(base, edits, Report()).names.issuperset(written)
    except InputError:
        # The rules do not fit the source's names.
        return True


def _untied(source: EditedSource, means: Means) -> list[Difference]:
    """Tied tensors of a source that differ from the one that was written instead."""
    found = []
    for one, other in source.tied:
        first, second = source.base.tensors[one], source.base.tensors[other]
        assert isinstance(second, StoredTensor)
        different = (first.dtype, first.shape) != (second.dtype, second.shape)
        if not different:
            assert isinstance(first, StoredTensor)
            # The copies are read under their own names.
            expected = replace(first, name=other)
            copies = [Comparison(expected, way, second.indexes, way.number) for way in second.ways]
            different = bool(compare(copies, means, counted=False).files)
        if different:
            detail = f"is tied to {quoted(one)}, which is written in its place, but their contents differ"
            found.append(Difference("content", other, (), detail))
    return found


def _disagreeing(source: EditedSource, means: Means) -> list[Difference]:
    """Sources of made tensors with different values in several pipeline stages that are each complete."""
    shared = [tensor for tensor in source.used().values() if len(tensor.ways) > 1]
    comparisons = [
        Comparison(tensor, way, tensor.indexes, way.number) for tensor in shared for way in tensor.whole_ways()[1:]
    ]
    wrong = compare(comparisons, means, counted=False)
    names = dict.fromkeys(name for _, name in wrong.files)
    return [
        Difference("stages", name, (), "the source's pipeline stages hold different values of it") for name in names
    ]


def recorded_step(src: str, form: str, step: Optional[str]) -> str:
    """The step to read, for a conversion that recorded one.

    Args:
        src: its source.
        form: the source's form.
        step: the recorded step; None if there is none.
    """
    found = form_named(form)
    # The directory of a single iteration holds one step, and its name may lack the step's number.
    several = found.options.steps and (found.options.by_rank or found.steps(src))
    return step if step is not None and several else "latest"


def verify_replicas(
    path: str,
    strategy: Strategy,
    step: str,
    file_suffix: Optional[str],
    filters: Filters,
    means: Means,
    report: Report,
    crcs: Optional[RecordedCrcs],
) -> tuple[list[Difference], str]:
    """Compare replicas of slices within one step of a rank tree.

    Returns:
        The differences and damaged files, and the line to print if there are none; empty after a warning.

    Raises:
        ReshardError: files are missing or cannot be read, or filters skip everything.
    """
    tree = find_checkpoints(path, file_suffix)
    check_ranks(tree, strategy, means.handles)
    candidate = next(iter(tree.candidates(step)), None)
    if candidate is None:
        raise CheckpointError(f"{path}: holds no checkpoints", file=path)
    if candidate.step is not None:
        report.note(f"step {candidate.step} is compared")
    problems: dict[str, InputError] = {}

    def read(damaged: Mapping[str, str]) -> StoredSource:
        problems.clear()
        found, contradicting = read_files_of_ranks(
            candidate.files, strategy, means.handles, Report(), damaged, filters.admit
        )
        problems.update(contradicting)
        return found

    held = read_sound(read, crcs, copies=True)
    warn_of_unmatched(filters, (strategy.parameters, held.names), report)
    _check_anything_left(held, filters, problems)
    found = compare_copies(held, means, filters.admit, problems)
    _note_not_held(held, strategy, filters, report)
    return found, _verdict(held, filters, report)


def _check_anything_left(held: StoredSource, filters: Filters, problems: Mapping[str, InputError]) -> None:
    if not (problems or any(map(filters.admit, [*held.tensors, *held.values]))):
        raise CheckpointError(
            "nothing to compare: no parameter of the checkpoint is selected",
            hint="check --include and --exclude, and whether the strategy belongs to this model",
        )


def _verdict(held: StoredSource, filters: Filters, report: Report) -> str:
    """The line to print if no copies differ; empty if there are no copies, after a warning."""
    tensors = [tensor for name, tensor in held.tensors.items() if filters.admit(name)]
    alone = sum(1 for tensor in tensors if isinstance(tensor, StoredTensor) and not has_copies(tensor))
    if alone == len(tensors):
        report.warn("no two files hold the same slice of a parameter: nothing was compared")
        return ""
    single = f"; {plural(alone, 'parameter')} without copies" if alone else ""
    return f"verified: copies do not differ{single}"


def verify_copies(
    place: CheckpointPlace, filters: Filters, means: Means, report: Report, crcs: Optional[RecordedCrcs]
) -> tuple[list[Difference], str]:
    """Compare replicas of slices within a checkpoint of any form but rank directories.

    Returns:
        The differences, and the line to print if there are none; empty after a warning.

    Raises:
        ReshardError: it cannot be read.
    """
    held = read_sound(reader_of(place, means.handles, report, incomplete=True), crcs, copies=True)
    warn_of_unmatched(filters, (held.names,), report)
    _check_anything_left(held, filters, {})
    root = place.path if is_directory(place.path) else os.path.dirname(place.path)
    found = []
    for difference in compare_copies(held, means, filters.admit):
        files = tuple(os.path.relpath(held.checkpoint.files[number], root) for number in difference.ranks)
        detail = "differs from the copies in other files" if difference.kind == "replica" else difference.detail
        found.append(difference._replace(ranks=(), files=files, detail=detail))
    return found, _verdict(held, filters, report)


def _note_not_held(held: StoredSource, strategy: Strategy, filters: Filters, report: Report) -> None:
    """Report parameters that some files lack: a de-duplicated save is compared as far as possible."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    missing = not_held(held, strategy, filters.admit)
    for name, ranks in missing.items():
        by_ranks.setdefault(tuple(ranks), []).append(name)
    if by_ranks:
        # Parameters that few ranks lack come first: in a de-duplicated save they are the exception.
        sets = sorted(by_ranks, key=lambda ranks: (len(ranks), ranks))
        lines = [listing(by_ranks[ranks], _MAX_SHOWN) + f" not on {rank_ranges(ranks)}" for ranks in sets]
        more = len(sets) - _MAX_SHOWN
        shown = joined("; ", lines[:_MAX_SHOWN]) + (f"; and {more} more such sets" if more > 0 else "")
        report.note(
            f"{plural(len(missing), 'parameter')} missing in some files, as in a de-duplicated save; the copies "
            "in other files are compared: " + Message(shown, joined("; ", lines).full)
        )


def recorded_plan(out: str, manifest: Optional[Manifest], report: Report) -> Optional[Identity]:
    """The conversion of a directory, from its manifest or else from the records of unfinished runs.

    Args:
        out: the directory.
        manifest: its manifest, where there is one.
        report: gets warnings about unreadable records.

    Returns:
        None if there are no records, or they contradict each other.

    Raises:
        RetryableError: records cannot be read.
    """
    if manifest is not None:
        return manifest.plan
    try:
        begun = current(ledgers_in(out))
    except TargetError as error:
        report.warn(f"{error.message}; it is ignored")
        return None
    return begun[0].identity if len(begun) == 1 else None


def recovered_ranks(out: str) -> Optional[tuple[int, ...]]:
    """The ranks that a recovery writes into a directory, from its records; None for all, or without records."""
    try:
        status = status_of(out)
    except TargetError:
        return None
    return status.wanted if status.lost_only else None


def converted_files(
    out: str, manifest: Optional[Manifest], ranks: Optional[tuple[int, ...]]
) -> tuple[dict[int, str], list[Difference]]:
    """The files of a converted checkpoint by rank, and a difference for each file of another step next to them.

    Without a manifest these are the files of the newest step.

    Args:
        out: the directory.
        manifest: its manifest, where there is one.
        ranks: compared ranks; None for all.

    Raises:
        ReshardError: manifest and files are missing, or the newest step is ambiguous.
    """
    if manifest is not None:
        listed = {file.rank: os.path.join(out, file.file) for file in manifest.files}
        return {rank: path for rank, path in listed.items() if is_regular_file(path)}, []
    tree = find_checkpoints(out)
    newest = next(iter(tree.candidates()), None)
    if newest is None:
        raise CheckpointError(f"{out}: holds no checkpoints", file=out)
    others = [
        Difference("file", None, (file.rank,), f"{file.path} is not of the newest step, which was compared")
        for file in tree.files
        if file.step != newest.step and (ranks is None or file.rank in ranks)
    ]
    return newest.files, others
