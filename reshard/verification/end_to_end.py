"""Verification from end to end: which files are compared with which."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Callable, NamedTuple, Optional, cast

from reshard.errors import CheckpointError, InputError, TargetError
from reshard.forms.checkpoint2 import find_iterations
from reshard.forms.full import HUGGINGFACE
from reshard.forms.ranks import find_checkpoints
from reshard.forms.ranks.coverage import check_ranks
from reshard.forms.registry import CHECKPOINT2, RANKS
from reshard.records import Identity, Manifest
from reshard.records.ledger import current, ledgers_in
from reshard.records.status import status_of
from reshard.storage import is_directory, is_regular_file
from reshard.strategies import Strategy
from reshard.text.filter_advice import warn_of_unmatched
from reshard.text.messages import Message, joined, listing
from reshard.text.name_filters import Filters
from reshard.text.report import Report
from reshard.text.wording import plural, quoted, rank_ranges
from reshard.verification.beside import compare_beside
from reshard.verification.copies import compare_copies, has_copies, not_held
from reshard.verification.crcs import RecordedCrcs, read_sound
from reshard.verification.difference import Difference
from reshard.verification.edited import EditedSource, Edits
from reshard.verification.form_target import compare_form
from reshard.verification.own_names import casts_alone, weights_of, without_rules
from reshard.verification.products import sums_of
from reshard.verification.rank_target import AnySource, compare_ranks
from reshard.verification.reading import Comparison, Means, compare
from reshard.verification.sources import Place, Reader, read_files_of_ranks
from reshard.verification.stored import Source, Stored
from reshard.verification.written import read_written

if TYPE_CHECKING:
    from reshard.lora import Scale
    from reshard.plan.edits import Edits as AskedEdits

_MOST_SHOWN = 3


class Converted(NamedTuple):
    """What was converted, and how.

    Attributes:
        place: where it is.
        edits: the names, packing and types that it got; None where they stayed.
        recorded: whether these are what the target's records say, of whatever source that was made.
        beside: whether what lies beside its weights, such as a tokenizer, has to lie beside the target's.
        adapter: what was added to its weights; None where nothing was.
    """

    place: Place
    edits: Optional[Edits] = None
    recorded: bool = False
    beside: bool = True
    adapter: Optional[Adapter] = None


class Adapter(NamedTuple):
    """A low-rank adapter that was added.

    Attributes:
        place: where its matrices are.
        scale: what their products are multiplied with.
    """

    place: Place
    scale: Scale


class Target(NamedTuple):
    """What it was converted to.

    Attributes:
        directory: where the converted checkpoint is.
        form: its form.
        strategy: how it is laid out; `none` in full.
        files: in rank directories the converted files, by rank; of other forms the files relative to the directory,
            by number, or none where nothing tells them.
        ranks: target ranks to look at; all where None. Other forms are looked at as a whole.
        cut_as_source: the strategy is the source's, and so are its names, whatever others tensors got.
    """

    directory: str
    form: str
    strategy: Strategy
    files: Mapping[int, str]
    ranks: Optional[tuple[int, ...]] = None
    cut_as_source: bool = False


def verify_conversion(
    converted: Converted,
    target: Target,
    *,
    filters: Filters,
    means: Means,
    report: Report,
    crcs: Optional[RecordedCrcs],
    known: Optional[Mapping[str, str]] = None,
    recovered: bool = False,
) -> list[Difference]:
    """What of a converted checkpoint is not what its source makes of it.

    Args:
        converted: what was converted.
        target: what it was converted to.
        filters: which parameters were converted.
        means: what may be used for reading.
        report: told what was decided.
        crcs: tells which source files are damaged and count as absent; none is where None.
        known: files that the conversion found damaged, and why, by path. Where that is given, others are looked at
            only if something differs.
        recovered: the files are what a recovery gave back.

    Raises:
        ReshardError: the source lacks what is compared, or cannot be read.
    """
    place, edits = converted.place, converted.edits
    if edits is None:
        reader = Reader(place, means.handles, report, target.strategy, target.ranks, filters)
    elif place.form == target.form == RANKS and converted.adapter is None:
        asked = cast("AskedEdits", edits)
        reader = Reader(place, means.handles, report, target.strategy, target.ranks, filters, edits=asked)
    else:
        # What other forms need of the source depends on all of its tensors.
        reader = Reader(place, means.handles, report)

    def differences(source: Source) -> list[Difference]:
        if edits is None:
            warn_of_unmatched(filters, (place.strategy.parameters, target.strategy.parameters, source.names), report)
            return _compared(source, target, converted, filters.admit, means, report, recovered)
        if converted.recorded and without_rules(source, edits, weights_of(*target[:2], target.files, means.handles)):
            report.note(
                f"{target.directory} has the names of {place.path}, to which the recorded rules would give others: "
                "compared without them; to compare otherwise, say how with --names or --rename"
            )
            plain = converted._replace(edits=casts_alone(edits), recorded=False, beside=False)
            return verify_conversion(plain, target, filters=filters, means=means, report=report, crcs=crcs, known=known)
        edited = EditedSource(source, edits, report)
        if converted.adapter is not None:
            matrices = _matrices(converted.adapter.place, means)
            edited.tensors = sums_of(edited.tensors, matrices, converted.adapter.place.path, converted.adapter.scale)
        laid_out = edited.same_layouts(target.strategy) if target.cut_as_source else target.strategy
        warn_of_unmatched(filters, (laid_out.parameters, edited.names), report)
        found = [*_untied(edited, means), *_disagreeing(edited, means)]
        here = target._replace(strategy=laid_out)
        return [*found, *_compared(edited, here, converted, filters.admit, means, report)]

    damaged = dict(known or {})
    if known is not None:
        source = reader.read(damaged)
        different = differences(source)
        # What was made of replicas differs from a file that is damaged.
        more = crcs.damaged(source.files_read) if different and crcs is not None else {}
        if not more:
            return different
        damaged.update(more)
    return differences(read_sound(reader.read, crcs, damaged))


def _compared(
    source: AnySource,
    target: Target,
    converted: Converted,
    admit: Callable[[str], bool],
    means: Means,
    report: Report,
    recovered: bool = False,
) -> list[Difference]:
    if target.form == RANKS:
        return compare_ranks(
            source, target.files, target.strategy, means, ranks=target.ranks, admit=admit, recovered=recovered
        )
    files = [*target.files.values()] or None
    written, found = read_written(target.directory, target.form, means.handles, files)
    if written is None:
        return found
    found += compare_form(source, written, target.strategy, target.directory, means, admit)
    if target.form == HUGGINGFACE and converted.beside:
        cast = converted.edits is not None and bool(converted.edits.casts)
        found += compare_beside(source.checkpoint, target.directory, written, cast, report)
    return found


def _matrices(place: Place, means: Means) -> Source:
    """The files of an adapter, which have to be complete."""
    return Reader(place, means.handles, Report()).read({})


def _untied(source: EditedSource, means: Means) -> list[Difference]:
    """Tensors of a source that are not equal to the one that is written for them."""
    found = []
    for one, other in source.tied:
        first, second = source.base.tensors[one], source.base.tensors[other]
        assert isinstance(second, Stored)
        different = (first.dtype, first.shape) != (second.dtype, second.shape)
        if not different:
            assert isinstance(first, Stored)
            # What is read of the copies is read under their own name.
            expected = replace(first, name=other)
            copies = [Comparison(expected, way, second.indexes, way.number) for way in second.ways]
            different = bool(compare(copies, means, told=False).files)
        if different:
            detail = f"is not written but made of {quoted(one)}, which differs from its own contents"
            found.append(Difference("content", other, (), detail))
    return found


def _disagreeing(source: EditedSource, means: Means) -> list[Difference]:
    """Sources of what is made that several pipeline stages have, each all of it, but not with the same values."""
    shared = [tensor for tensor in source.used().values() if len(tensor.ways) > 1]
    comparisons = [
        Comparison(tensor, way, tensor.indexes, way.number) for tensor in shared for way in tensor.whole_ways()[1:]
    ]
    wrong = compare(comparisons, means, told=False)
    names = dict.fromkeys(name for _, name in wrong.files)
    return [
        Difference("stages", name, (), "the source's pipeline stages hold different values of it") for name in names
    ]


def recorded_step(src: str, form: str, step: Optional[str]) -> str:
    """The step to read, of a conversion that recorded one.

    Args:
        src: its source.
        form: the source's form.
        step: as recorded; None where nothing told it.
    """
    # The directory of one iteration holds no other, and need not be named by its number.
    single = form not in (RANKS, CHECKPOINT2) or (form == CHECKPOINT2 and not find_iterations(src))
    return "latest" if step is None or single else step


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
    """Which copies of slices within one step of a tree differ, and which files are damaged.

    Returns:
        The differences, and what to say where there are none; nothing, where that was told.

    Raises:
        ReshardError: there are no files, they cannot be read, or filters leave nothing to look at.
    """
    tree = find_checkpoints(path, file_suffix)
    check_ranks(tree, strategy, means.handles)
    candidate = next(iter(tree.candidates(step)), None)
    if candidate is None:
        raise CheckpointError(f"{path}: holds no checkpoints", file=path)
    if candidate.step is not None:
        report.note(f"step {candidate.step} is compared")
    problems: dict[str, InputError] = {}

    def read(damaged: Mapping[str, str]) -> Source:
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
    _tell_not_held(held, strategy, filters, report)
    return found, _verdict(held, filters, report)


def _check_anything_left(held: Source, filters: Filters, problems: Mapping[str, InputError]) -> None:
    if not (problems or any(map(filters.admit, [*held.tensors, *held.values]))):
        raise CheckpointError(
            "nothing would be compared: no parameter of the checkpoint is asked for",
            hint="check --include and --exclude, and that the strategy is of this model",
        )


def _verdict(held: Source, filters: Filters, report: Report) -> str:
    """What is said where copies do not differ; nothing where there are none, of which is warned."""
    tensors = [tensor for name, tensor in held.tensors.items() if filters.admit(name)]
    alone = sum(1 for tensor in tensors if isinstance(tensor, Stored) and not has_copies(tensor))
    if alone == len(tensors):
        report.warn("no two files hold the same slice of a parameter: nothing was compared")
        return ""
    left = f"; {plural(alone, 'parameter')} of which every slice is in one file only" if alone else ""
    return f"verified: copies do not differ{left}"


def verify_copies(
    place: Place, filters: Filters, means: Means, report: Report, crcs: Optional[RecordedCrcs]
) -> tuple[list[Difference], str]:
    """Which copies of slices within a checkpoint of any form but rank directories differ.

    Returns:
        The differences, and what is said where there are none.

    Raises:
        ReshardError: it cannot be read.
    """
    reader = Reader(place, means.handles, report, incomplete=True)
    held = read_sound(reader.read, crcs, copies=True)
    warn_of_unmatched(filters, (held.names,), report)
    _check_anything_left(held, filters, {})
    root = place.path if is_directory(place.path) else os.path.dirname(place.path)
    found = []
    for difference in compare_copies(held, means, filters.admit):
        files = tuple(os.path.relpath(held.checkpoint.files[number], root) for number in difference.ranks)
        detail = "differs from the copies in other files" if difference.kind == "replica" else difference.detail
        found.append(difference._replace(ranks=(), files=files, detail=detail))
    return found, _verdict(held, filters, report)


def _tell_not_held(held: Source, strategy: Strategy, filters: Filters, report: Report) -> None:
    """A line on what was not compared because files lack it."""
    lacking = not_held(held, strategy, filters.admit)
    if lacking:
        by_ranks: dict[tuple[int, ...], list[str]] = {}
        for name, ranks in lacking.items():
            by_ranks.setdefault(tuple(ranks), []).append(name)
        # What fewest ranks lack first: with a de-duplicated save that is the odd one out.
        odd = sorted(by_ranks, key=lambda ranks: (len(ranks), ranks))
        told = [listing(by_ranks[ranks], _MOST_SHOWN) + f" not on {rank_ranges(ranks)}" for ranks in odd]
        left = len(odd) - _MOST_SHOWN
        shown = joined("; ", told[:_MOST_SHOWN]) + (f"; and {left} more such sets" if left > 0 else "")
        report.note(
            f"not in every file that the strategy gives them to, as in a de-duplicated save, and compared as far as "
            f"they are there: {plural(len(lacking), 'parameter')}: " + Message(shown, joined("; ", told).full)
        )


def recorded_plan(out: str, manifest: Optional[Manifest], report: Report) -> Optional[Identity]:
    """What the files in a directory were made of, by its manifest or else by the records of runs that go on.

    Args:
        out: the directory.
        manifest: its manifest, where there is one.
        report: warned of records that cannot be read.

    Returns:
        None where nothing tells, or records contradict each other.

    Raises:
        RetryableError: records cannot be read.
    """
    if manifest is not None:
        return manifest.plan
    try:
        begun = current(ledgers_in(out))
    except TargetError as error:
        report.warn(f"{error.message}; what is compared is chosen without it")
        return None
    return begun[0].identity if len(begun) == 1 else None


def recovered_ranks(out: str) -> Optional[tuple[int, ...]]:
    """The ranks that alone are to be recovered in a directory, by its records; None where all are, or none tells."""
    try:
        status = status_of(out)
    except TargetError:
        return None
    return status.wanted if status.lost_only else None


def converted_files(
    out: str, manifest: Optional[Manifest], ranks: Optional[tuple[int, ...]]
) -> tuple[dict[int, str], list[Difference]]:
    """The files of a converted checkpoint by rank, and those beside them that do not belong to it.

    Without a manifest these are the files of the newest step there.

    Args:
        out: the directory.
        manifest: its manifest, where there is one, which says what belongs to it.
        ranks: ranks that are looked at; all where None.

    Raises:
        ReshardError: without a manifest, there are no files, or which are the newest cannot be told.
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
