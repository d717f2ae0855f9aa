"""Verification from end to end: which files are compared with which."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Callable, NamedTuple, Optional, Protocol

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.errors import CheckpointError, TargetError
from reshard.forms.checkpoint2 import find_iterations
from reshard.forms.full import HUGGINGFACE
from reshard.forms.ranks import find_checkpoints
from reshard.forms.ranks.source_ranks import check_ranks
from reshard.forms.registry import CHECKPOINT2, RANKS, read_checkpoint
from reshard.records import Identity, Manifest
from reshard.records.ledger import current, ledgers_in
from reshard.records.status import status_of
from reshard.storage import is_directory, is_regular_file
from reshard.strategies import Strategy
from reshard.text.filter_advice import warn_of_unmatched
from reshard.text.messages import Message, joined, listing
from reshard.text.name_filters import Filters
from reshard.text.report import Report
from reshard.text.wording import plural, rank_ranges
from reshard.verification import (
    Difference,
    Means,
    Needs,
    RecordedCrcs,
    Tree,
    check_complete,
    compare_converted,
    compare_copies,
    has_copies,
    not_held,
    read_sound,
    read_step,
    read_tree,
)
from reshard.verification.beside import compare_beside
from reshard.verification.compare_forms import compare_with_form
from reshard.verification.edited import EditedTree, Edits, edited_tree
from reshard.verification.forms import FormTree, tree_of
from reshard.verification.own_names import casts_alone, weights_of, without_rules
from reshard.verification.products import products_of
from reshard.verification.tied import not_alike
from reshard.verification.written import read_written

if TYPE_CHECKING:
    from reshard.lora import Scale

_MOST_SHOWN = 3


class Source(NamedTuple):
    """What was converted.

    Attributes:
        path: tree, file or `{rank}` path, or the directory of another form.
        form: its form.
        strategy: of rank directories; `none` where the form tells the layouts.
        step: the step that was converted; ``latest`` for the newest complete one (see `verification.steps`).
        file_suffix: only files whose stem ends so.
        edits: the names, packing and types that it got; None where they stayed.
        recorded: whether these are what the target's records say, of whatever source that was made.
        beside: whether what lies beside its weights, such as a tokenizer, has to lie beside the target's.
        adapter: what was added to its weights; None where nothing was.
    """

    path: str
    form: str
    strategy: Strategy
    step: str = "latest"
    file_suffix: Optional[str] = None
    edits: Optional[Edits] = None
    recorded: bool = False
    beside: bool = True
    adapter: Optional[Adapter] = None


class Adapter(NamedTuple):
    """A low-rank adapter that was added.

    Attributes:
        source: its matrices.
        scale: what their products are multiplied with.
    """

    source: Source
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
    source: Source,
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
        source: what was converted.
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
    reader = _reader(source, target, filters, means, report)

    def differences(tree: Tree) -> list[Difference]:
        if source.edits is None:
            warn_of_unmatched(filters, (source.strategy.parameters, target.strategy.parameters, tree.names), report)
            return compared(tree, target.strategy)
        # What is needed of the source is known only when it is known what is made of it, so all of it has to be there.
        check_complete(tree, reader.strategy, Needs(Strategy.none()))
        if source.recorded and without_rules(tree, source.edits, weights()):
            report.note(
                f"{target.directory} has the names of {source.path}, to which the recorded rules would give others: "
                "compared without them; to compare otherwise, say how with --names or --rename"
            )
            plain = source._replace(edits=casts_alone(source.edits), recorded=False, beside=False)
            return verify_conversion(plain, target, filters=filters, means=means, report=report, crcs=crcs, known=known)
        edited = edited_tree(tree, source.edits, report)
        if source.adapter is not None:
            edited = _with_adapter(edited, source.adapter, means)
        laid_out = edited.same_layouts(target.strategy) if target.cut_as_source else target.strategy
        warn_of_unmatched(filters, (laid_out.parameters, edited.names), report)
        return [*not_alike(edited, means), *compared(edited, laid_out)]

    def weights() -> set[str]:
        return weights_of(target.directory, target.form, target.files, means.handles)

    def compared(tree: Tree, laid_out: Strategy) -> list[Difference]:
        admit, strategy = filters.admit, reader.strategy
        if target.form == RANKS:
            return compare_converted(
                tree,
                strategy,
                target.files,
                laid_out,
                means,
                ranks=target.ranks,
                admit=admit,
                recovered=recovered,
            )
        files = [*target.files.values()] or None
        written, found = read_written(target.directory, target.form, means.handles, files)
        if written is None:
            return found
        found += compare_with_form(tree, strategy, written, laid_out, target.directory, means, admit)
        if target.form == HUGGINGFACE and source.beside:
            cast = source.edits is not None and bool(source.edits.casts)
            found += compare_beside(reader.checkpoint, target.directory, written.tree, cast, report)
        return found

    damaged = dict(known or {})
    if known is not None:
        tree = reader.read(damaged)
        different = differences(tree)
        # What was made of replicas differs from a file that is damaged.
        more = crcs.damaged(tree.files_read) if different and crcs is not None else {}
        if not more:
            return different
        damaged.update(more)
    return differences(read_sound(reader.read, crcs, damaged))


def _with_adapter(edited: EditedTree, adapter: Adapter, means: Means) -> EditedTree:
    """Weights without the matrices of adapters beside them, and what one adds."""
    # Loaded only here, because it loads what conversions are carried out with.
    from reshard.lora.pairs import is_matrix

    kept = edited.only(lambda name: not is_matrix(name))
    assert isinstance(kept, EditedTree)
    return replace(
        kept, products=products_of(kept, _matrices(adapter.source, means), adapter.source.path, adapter.scale)
    )


def _matrices(source: Source, means: Means) -> Tree:
    """The files of an adapter, which have to be complete."""
    report = Report()
    if source.form != RANKS:
        return FormReader(source, lambda name: True, means, report).read({})
    found = find_checkpoints(source.path, source.file_suffix)
    check_ranks(found, source.strategy, means.handles)
    tree = read_step(found, source.strategy, source.step, means.handles, report)
    check_complete(tree, source.strategy, Needs(Strategy.none()))
    return tree


class _Reader(Protocol):
    """Reads a source.

    Attributes:
        strategy: how the tree that was read last is laid out.
        checkpoint: what was read last, if it is no rank tree.
    """

    strategy: Strategy
    checkpoint: Optional[Checkpoint]

    def read(self, damaged: Mapping[str, str]) -> Tree:
        """The files of the step, given those that are damaged, and why, by path."""


class _RankReader:
    """Reads rank directories."""

    def __init__(self, source: Source, target: Target, means: Means, report: Report) -> None:
        self.strategy = source.strategy
        self.checkpoint: Optional[Checkpoint] = None
        self._source, self._target, self._means, self._report = source, target, means, report
        self._found = find_checkpoints(source.path, source.file_suffix)
        check_ranks(self._found, source.strategy, means.handles)

    def read(self, damaged: Mapping[str, str]) -> Tree:
        source, target = self._source, self._target
        edited = source.edits is not None
        return read_step(
            self._found,
            source.strategy,
            source.step,
            self._means.handles,
            self._report,
            target=None if edited else target.strategy,
            ranks=None if edited else target.ranks,
            damaged=damaged,
        )


class FormReader:
    """Reads a checkpoint of any form but rank directories.

    Args:
        source: what to read.
        wanted: tells of a name whether the tensor has to be there whole.
        means: what may be used for reading.
        report: told what was decided.
        chosen: numbers of the files to look into; all where None.

    Attributes:
        strategy: how the tree that was read last is laid out.
        checkpoint: the checkpoint that was read last.
        found: the same as a tree.
    """

    def __init__(
        self,
        source: Source,
        wanted: Callable[[str], bool],
        means: Means,
        report: Report,
        chosen: Optional[Collection[int]] = None,
    ) -> None:
        self._source, self._wanted, self._means, self._report = source, wanted, means, report
        self._chosen = chosen
        self.strategy = source.strategy
        self.checkpoint: Optional[Checkpoint] = None
        self.found: Optional[FormTree] = None

    def read(self, damaged: Mapping[str, str]) -> Tree:
        """The files, given those that are damaged, and why, by path."""
        source = self._source
        found = tree_of(
            read_checkpoint(
                source.form, source.path, source.step, self._means.handles, self._report, damaged, self._wanted
            ),
            self._chosen,
        )
        self.strategy, self.checkpoint, self.found = found.strategy, found.checkpoint, found
        return found.tree


def _reader(source: Source, target: Target, filters: Filters, means: Means, report: Report) -> _Reader:
    if source.form == RANKS:
        return _RankReader(source, target, means, report)
    listed = frozenset(target.strategy.parameters)

    def wanted(name: str) -> bool:
        if source.edits is not None:
            return True
        return filters.admit(name) and (target.strategy.is_none or name in listed)

    return FormReader(source, wanted, means, report)


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
    files = candidate.files
    held = read_sound(
        lambda damaged: read_tree(files, strategy, means.handles, filters.admit, damaged), crcs, copies=True
    )
    warn_of_unmatched(filters, (strategy.parameters, held.names), report)
    _check_anything_left(held)
    found = compare_copies(held, means)
    _tell_not_held(held, strategy, report)
    return found, _verdict(held, report)


def _check_anything_left(held: Tree) -> None:
    if not (held.parameters or held.problems or held.outside):
        raise CheckpointError(
            "nothing would be compared: no parameter of the checkpoint is asked for",
            hint="check --include and --exclude, and that the strategy is of this model",
        )


def _verdict(held: Tree, report: Report) -> str:
    """What is said where copies do not differ; nothing where there are none, of which is warned."""
    alone = sum(1 for parameter in held.parameters.values() if not has_copies(parameter))
    if alone == len(held.parameters):
        report.warn("no two files hold the same slice of a parameter: nothing was compared")
        return ""
    left = f"; {plural(alone, 'parameter')} of which every slice is in one file only" if alone else ""
    return f"verified: copies do not differ{left}"


def verify_copies(
    source: Source, filters: Filters, means: Means, report: Report, crcs: Optional[RecordedCrcs]
) -> tuple[list[Difference], str]:
    """Which copies of slices within a checkpoint of any form but rank directories differ.

    Returns:
        The differences, and what is said where there are none.

    Raises:
        ReshardError: it cannot be read.
    """
    reader = FormReader(source, lambda name: False, means, report)
    tree = read_sound(reader.read, crcs, copies=True)
    assert reader.found is not None
    warn_of_unmatched(filters, (tree.names,), report)
    tree = tree.only(filters.admit)
    _check_anything_left(tree)
    place = source.path if is_directory(source.path) else os.path.dirname(source.path)
    found = []
    for difference in compare_copies(tree, means):
        files = tuple(os.path.relpath(path, place) for path in reader.found.paths(difference.ranks))
        detail = "differs from the copies in other files" if difference.kind == "replica" else difference.detail
        found.append(difference._replace(ranks=(), files=files, detail=detail))
    return found, _verdict(tree, report)


def _tell_not_held(tree: Tree, strategy: Strategy, report: Report) -> None:
    """A line on what was not compared because files lack it."""
    lacking = not_held(tree, strategy)
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
