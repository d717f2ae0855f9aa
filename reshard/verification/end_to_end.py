"""Verification from end to end: reading source and target, and comparing them."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Callable, NamedTuple, Optional

from reshard.checkpoints import FileHandles, read_index
from reshard.errors import CheckpointError, InputError, TargetError, UsageError
from reshard.forms.form import Names
from reshard.forms.ranks.selection import check_ranks
from reshard.forms.ranks.tree import find_checkpoints
from reshard.forms.registry import form_named
from reshard.records import Identity, Manifest
from reshard.records.ledger import ledger_in
from reshard.records.status import status_of
from reshard.storage import is_directory, is_regular_file
from reshard.strategies import Strategy, shards_of
from reshard.text.globs import Filters, warn_of_unmatched
from reshard.text.messages import Message, Report, joined, listing, number_ranges, plural, quoted, rank_ranges
from reshard.text.names import TRAINER_OPTIMIZERS, WEIGHTS, is_weight, kind_of
from reshard.verification.boxes import whole_box
from reshard.verification.converted import AnySource, compare_form, compare_ranks
from reshard.verification.copies import compare_copies, has_copies, not_held
from reshard.verification.difference import Difference
from reshard.verification.edited import EditedSource, renamed
from reshard.verification.objects import object_differences, training_differences
from reshard.verification.products import sums_of
from reshard.verification.reading import Comparison, Means, compare, sums
from reshard.verification.sources import (
    CheckpointPlace,
    RecordedCrcs,
    read_ranks,
    read_sound,
    read_written,
    reader_of,
)
from reshard.verification.stored import Content, StoredSource, StoredTensor

if TYPE_CHECKING:
    from reshard.lora import Scale
    from reshard.plan.edits import Edits

_MAX_SHOWN = 3


class Converted(NamedTuple):
    """The source of a conversion, and its edits.

    Attributes:
        place: the source.
        edits: names, packing and types.
        recorded: the edits come from the target's records, perhaps of another source.
        beside: other files of the model, such as a tokenizer, must exist in the target.
        adapter: the adapter added to its weights, if any.
    """

    place: CheckpointPlace
    edits: Edits
    recorded: bool = False
    beside: bool = True
    adapter: Optional[Adapter] = None


class Adapter(NamedTuple):
    """A low-rank adapter that was merged into the weights.

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
        cut_as_source: the strategy is the source's, with its names, even if tensors were renamed.
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
    damage_by_path: Optional[Mapping[str, str]] = None,
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
        damage_by_path: damage that the conversion detected, by path. If given, the CRCs of other files are checked
            only if something differs.
        recovered: the target was written by a recovery.

    Returns:
        Every difference.

    Raises:
        ReshardError: the source lacks compared slices, or cannot be read.
    """
    place, edits = converted.place, converted.edits
    read = _source_reader(converted, target, filters, means, report)

    def differences(source: StoredSource) -> list[Difference]:
        if edits.is_empty and converted.adapter is None:
            warn_of_unmatched(filters, (place.strategy.parameters, target.strategy.parameters, source.names), report)
            named = target._replace(strategy=_for_trainer(target, target.strategy, source.tensors))
            return _compared(source, named, converted, filters.admit, means, report, recovered)
        if converted.recorded and _without_rules(source, edits, _weights_of(target, means.handles)):
            report.note(
                f"{target.directory} has the names of {place.path}, which the recorded rules would change: compared "
                "without them; for another comparison add --names or --rename"
            )
            casts = edits._replace(table=None, renames=None)
            plain = converted._replace(edits=casts, recorded=False, beside=False)
            return verify_conversion(
                plain, target, filters=filters, means=means, report=report, crcs=crcs, damage_by_path=damage_by_path
            )
        return _edited_differences(source, converted, target, filters, means, report)

    damaged = dict(damage_by_path or {})
    if damage_by_path is not None:
        source = read(damaged)
        different = differences(source)
        # The conversion read a replica instead of a file with a wrong CRC.
        more = crcs.damaged(source.files_read) if different and crcs is not None else {}
        if not more:
            return different
        damaged.update(more)
    return differences(read_sound(read, crcs, damaged))


def _source_reader(
    converted: Converted, target: ConvertedTarget, filters: Filters, means: Means, report: Report
) -> Callable[[Mapping[str, str]], StoredSource]:
    """A reader of the source's needed slices; see `reader_of`."""
    if converted.adapter is not None:
        # The needed slices are known only after the adapter is applied to all tensors.
        return reader_of(converted.place, means.handles, report)
    # Rows of everything are cut, whatever the source holds.
    strategy = Strategy.none() if shards_of(target.strategy.path) is not None else target.strategy
    edits = None if converted.edits.is_empty else converted.edits
    return reader_of(
        converted.place, means.handles, report, target=strategy, ranks=target.ranks, filters=filters, edits=edits
    )


def _edited_differences(
    source: StoredSource,
    converted: Converted,
    target: ConvertedTarget,
    filters: Filters,
    means: Means,
    report: Report,
) -> list[Difference]:
    """The differences of a target with other names, packing or types, or an adapter."""
    edited = EditedSource(source, converted.edits, report)
    if converted.adapter is not None:
        # Imported only here: most conversions merge no adapter.
        from reshard.plan.edits import edits_to_model

        place, scale = converted.adapter
        stored = reader_of(place, means.handles, Report())({})
        matrices = EditedSource(stored, edits_to_model(place.form), Report())
        edited.tensors = sums_of(edited.tensors, edited.model_names, matrices, place.path, scale)
    laid_out = (edited.same_layouts if target.cut_as_source else edited.laid_out)(target.strategy)
    laid_out = _for_trainer(target, laid_out, edited.tensors)
    warn_of_unmatched(filters, (laid_out.parameters, edited.names), report)
    disagreements = [*_untied(edited, means), *_disagreeing(edited, means)]
    named = target._replace(strategy=laid_out)
    return [*disagreements, *_compared(edited, named, converted, filters.admit, means, report)]


def _for_trainer(target: ConvertedTarget, strategy: Strategy, names: Collection[str]) -> Strategy:
    """The strategy of a trainer's state, which may list the names of the model."""
    without_names = strategy.is_placeholder or strategy.is_none
    if without_names or form_named(target.form).options.names is Names.MODEL:
        return strategy
    listed = set(names).intersection(strategy.parameters)
    if any(name.startswith(("model.", *TRAINER_OPTIMIZERS)) for name in listed):
        return strategy
    # Imported only here: most targets have a model's names.
    from reshard.names import trainer_names

    new_names = trainer_names(strategy.parameters)
    # Names that a trainer's state has beside the model, such as moments.w, are those of the strategy.
    return renamed(strategy, {name: new for name, new in new_names.items() if name not in listed})


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
        differences, names = compare_ranks(
            source, target.files, target.strategy, means, ranks=target.ranks, admit=admit, recovered=recovered
        )
        if target.ranks is None:
            _note_left_out(source, names, converted, target, differences, report)
        return differences
    checkpoint, differences = read_written(
        target.directory, target.form, means.handles, [*target.files.values()] or None
    )
    if checkpoint is None:
        return differences
    damage = RecordedCrcs(means, report).damaged(checkpoint.indexes.values())
    if damage:
        # Reading a damaged archive would end the comparison with an error.
        files = {path: os.path.relpath(path, target.directory) for path in sorted(damage)}
        return [*differences, *(Difference("file", None, (), damage[path], (file,)) for path, file in files.items())]
    if form.options.names is Names.TRAINER:
        differences += object_differences(source.checkpoint, checkpoint.checkpoint, admit, means.handles)
    differences += training_differences(source.checkpoint, checkpoint, means.handles)
    differences += compare_form(source, checkpoint, target.strategy, target.directory, means, admit)
    _note_left_out(source, checkpoint.names, converted, target, differences, report)
    if converted.beside:
        edits = converted.edits
        cast = bool(edits.casts) or edits.quantisation is not None
        beside = form.check_beside(target.directory, checkpoint.checkpoint, source.checkpoint, cast, report)
        differences += [Difference("file", None, (), text, (name,)) for name, text in beside]
    return differences


def _note_left_out(
    source: AnySource,
    names: Collection[str],
    converted: Converted,
    target: ConvertedTarget,
    differences: Collection[Difference],
    report: Report,
) -> None:
    """Report what only the source has: users may delete it after a verification without differences."""
    left_out = sorted(source.names.difference(names))
    if left_out and not differences:
        report.note(
            f"{target.directory} lacks {plural(len(left_out), 'tensor')} of {converted.place.path}, which filters, the "
            f"target strategy or the format left out: {listing(left_out, _MAX_SHOWN)}"
        )


def _weights_of(target: ConvertedTarget, handles: FileHandles) -> set[str]:
    """Names of weights in a converted checkpoint; empty if no file is readable. Of rank directories, one file counts.

    Raises:
        RetryableError: reading failed.
    """
    if not form_named(target.form).options.by_rank:
        checkpoint, _ = read_written(target.directory, target.form, handles)
        return (
            set()
            if checkpoint is None
            else {name for name in checkpoint.tensors if is_weight(name, checkpoint.tensors)}
        )
    for path in target.files.values():
        try:
            tensors = read_index(handles, path).tensors
        except CheckpointError:
            continue
        return {name for name, tensor in tensors.items() if kind_of(name, math.prod(tensor.shape), tensors) == WEIGHTS}
    return set()


def _without_rules(base: StoredSource, edits: Edits, target_weights: Collection[str]) -> bool:
    """Whether a source already has the names of the target, which recorded rules would change.

    An example is a checkpoint that was converted to other names and back, and is compared with the original. Its
    records have only the rules of the second conversion, which do not fit the original's names.

    Args:
        base: the source, complete.
        edits: the recorded edits.
        target_weights: names of the target's weights.
    """
    if not target_weights or not base.names.issuperset(target_weights):
        return False
    try:
        return not EditedSource(base, edits, Report()).names.issuperset(target_weights)
    except (InputError, UsageError):
        # The rules do not fit the source's names, or need options for these only.
        return True


def _untied(source: EditedSource, means: Means) -> list[Difference]:
    """Tied tensors of a source that differ from the tensor written for both."""
    differences = []
    for first, second in source.tied:
        if _differ(first, second, means):
            detail = f"is tied to {quoted(first.name)}, which is written in its place, but their contents differ"
            differences.append(Difference("content", second.name, (), detail))
    return differences


def _differ(first: Content, second: Content, means: Means) -> bool:
    """Whether two tensors have different types, shapes or elements."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return True
    if isinstance(first, StoredTensor) and isinstance(second, StoredTensor):
        # The copies are read under their own names.
        expected = replace(first, name=second.stored_name)
        copies = [Comparison(expected, slices, second.indexes, slices.number) for slices in second.slice_sets]
        return bool(compare(copies, means, counted=False).files)
    parts = ((each, each, whole_box(each.shape)) for each in (first, second))
    return len({total for _, total in sums(parts, means, counted=False)}) > 1


def _disagreeing(source: EditedSource, means: Means) -> list[Difference]:
    """Sources of edited tensors with different values in several complete pipeline stages."""
    shared = [tensor for tensor in source.used().values() if len(tensor.slice_sets) > 1]
    comparisons = [
        Comparison(tensor, slices, tensor.indexes, slices.number)
        for tensor in shared
        for slices in tensor.whole_slice_sets()[1:]
    ]
    wrong = compare(comparisons, means, counted=False)
    names = dict.fromkeys(name for _, name in wrong.files)
    return [
        Difference("stages", name, (), "the source's pipeline stages hold different values of it") for name in names
    ]


def recorded_step(src: str, form: str, step: Optional[str]) -> str:
    """The step to read for a recorded conversion.

    Args:
        src: its source.
        form: the source's form.
        step: the recorded step; None without one.
    """
    source_form = form_named(form)
    # The directory of a single iteration is read without a step: its name may lack the number.
    several = source_form.options.steps and (source_form.options.by_rank or source_form.steps(src))
    return step if step is not None and several else "latest"


def verify_replicas(
    place: CheckpointPlace, filters: Filters, means: Means, report: Report, crcs: Optional[RecordedCrcs]
) -> tuple[list[Difference], str]:
    """Compare replicas of slices within one step of a checkpoint.

    Returns:
        The differences and damaged files, and the line to print if there are none.

    Raises:
        ReshardError: files are missing or cannot be read, or there is nothing to compare.
    """
    problems: Mapping[str, InputError] = {}
    by_rank = form_named(place.form).options.by_rank
    if by_rank:
        files = _files_of_step(place, means.handles, report)
        source, problems = read_ranks(files, place.strategy, means.handles, Report(), crcs, filters.admit, True)
    else:
        source = read_sound(reader_of(place, means.handles, report, incomplete=True), crcs, all_files=True)
    warn_of_unmatched(filters, (place.strategy.parameters, source.names), report)
    if not (problems or any(map(filters.admit, [*source.tensors, *source.values]))):
        raise CheckpointError(
            "nothing to compare: no parameter of the checkpoint is selected",
            hint="check --include and --exclude, and whether the strategy belongs to this model",
        )
    differences = compare_copies(source, means, filters.admit, problems)
    if by_rank:
        _note_not_held(source, place.strategy, filters, report)
    else:
        root = place.path if is_directory(place.path) else os.path.dirname(place.path)
        differences = [_by_file(difference, source.checkpoint.files, root) for difference in differences]
    return differences, "" if differences else _verdict(source, filters)


def _files_of_step(place: CheckpointPlace, handles: FileHandles, report: Report) -> Mapping[int, str]:
    """The files of the requested step of a rank tree, by rank."""
    tree = find_checkpoints(place.path, place.file_suffix)
    check_ranks(tree, place.strategy, handles)
    candidate = next(iter(tree.candidates(place.step)), None)
    if candidate is None:
        raise CheckpointError(f"{place.path}: holds no checkpoints", file=place.path)
    if candidate.step is not None:
        report.note(f"step {candidate.step} is compared")
    return candidate.files


def _by_file(difference: Difference, files: Mapping[int, str], root: str) -> Difference:
    """A difference of numbered files, with their names."""
    names = tuple(os.path.relpath(files[number], root) for number in difference.ranks)
    detail = "differs from the copies in other files" if difference.kind == "replica" else difference.detail
    return difference._replace(ranks=(), files=names, detail=detail)


def _verdict(source: StoredSource, filters: Filters) -> str:
    """The line to print if no copies differ.

    Raises:
        UsageError: there are no copies.
    """
    tensors = [tensor for name, tensor in source.tensors.items() if filters.admit(name)]
    alone = sum(1 for tensor in tensors if isinstance(tensor, StoredTensor) and not has_copies(tensor))
    if alone == len(tensors):
        raise UsageError(
            "no two files hold the same slice of a parameter: nothing was compared",
            hint="compare with the source: reshard verify OUT --src SRC; or record checksums with --checksum",
        )
    single = f"; {plural(alone, 'parameter')} without copies" if alone else ""
    return f"verified: copies do not differ{single}"


def _note_not_held(source: StoredSource, strategy: Strategy, filters: Filters, report: Report) -> None:
    """Report parameters that some files lack, as in a de-duplicated save."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    missing = not_held(source, strategy, filters.admit)
    for name, ranks in missing.items():
        by_ranks.setdefault(tuple(ranks), []).append(name)
    if by_ranks:
        # Parameters that few ranks lack come first: they are the exception in a de-duplicated save.
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
        manifest: its manifest, if it has one.
        report: gets warnings about unreadable records.

    Returns:
        None if the directory has no records.

    Raises:
        RetryableError: records cannot be read.
    """
    if manifest is not None:
        return manifest.plan
    try:
        ledger = ledger_in(out)
    except TargetError as error:
        report.warn(f"{error.message}; it is ignored")
        return None
    return None if ledger is None else ledger.identity


def written_ranks(out: str, report: Report) -> Optional[tuple[int, ...]]:
    """The ranks to compare in a directory without a manifest, from its records.

    A recovery of some ranks is whole without the others. A conversion is not: the runs of other machines are missing.

    Args:
        out: the directory.
        report: gets a note about ranks that are not compared, or how to compare only the written ones.

    Returns:
        The ranks; None for all, or without records.
    """
    try:
        status = status_of(out)
    except TargetError:
        return None
    if status.lost_only:
        report.note(f"compared: {rank_ranges(status.wanted)}, since only lost ranks were to be recovered")
        return status.wanted
    others = set(status.wanted).difference(status.requested or status.wanted)
    if others and status.plan.task == "recover":
        report.note(f"compared: {rank_ranges(status.requested or ())}; not requested: {rank_ranges(others)}")
        return status.requested
    if status.done and status.missing:
        report.note(
            f"not written yet: {rank_ranges(status.missing)}; to compare only {rank_ranges(status.done)}, add "
            f"--ranks {number_ranges(status.done)}"
        )
    return None


def converted_files(
    out: str, manifest: Optional[Manifest], ranks: Optional[tuple[int, ...]]
) -> tuple[dict[int, str], list[Difference]]:
    """The files of a converted checkpoint by rank, and a difference for each file of another step.

    Without a manifest, the newest step counts.

    Args:
        out: the directory.
        manifest: its manifest, if it has one.
        ranks: compared ranks; None for all.

    Raises:
        ReshardError: manifest and files are missing, or the newest step is ambiguous.
    """
    if manifest is not None:
        paths = {file.rank: os.path.join(out, file.file) for file in manifest.files}
        return {rank: path for rank, path in paths.items() if is_regular_file(path)}, []
    tree = find_checkpoints(out)
    newest = next(iter(tree.candidates()), None)
    if newest is None:
        raise CheckpointError(f"{out}: holds no checkpoints", file=out)
    other_steps = [
        Difference("file", None, (file.rank,), f"{file.path} is not of the newest step, which was compared")
        for file in tree.files
        if file.step != newest.step and (ranks is None or file.rank in ranks)
    ]
    return newest.files, other_steps
