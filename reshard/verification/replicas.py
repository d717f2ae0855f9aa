"""Comparison of the copies of slices within one step of a checkpoint."""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Callable, Optional

from reshard.checkpoints import FileHandles, files_alike
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.errors import CheckpointError, InputError, UsageError
from reshard.forms.ranks.checkpoint import rank_checkpoint_of, read_some_ranks
from reshard.forms.ranks.selection import check_ranks
from reshard.forms.ranks.tree import StepFiles, find_checkpoints
from reshard.forms.registry import form_named
from reshard.storage import is_directory
from reshard.strategies import Strategy
from reshard.text.globs import Filters, warn_of_unmatched
from reshard.text.messages import Message, Report, joined, listing, plural, rank_ranges
from reshard.text.names import belongs_to_rank
from reshard.verification.boxes import Box, volume_of, whole_box
from reshard.verification.difference import Difference, kind_of_tensor
from reshard.verification.reading import Means, sums
from reshard.verification.sources import RecordedCrcs, read_sound
from reshard.verification.stored import SliceSet, Source, StoredTensor, stored_source, value_content
from reshard.verification.sums import PRIME

if TYPE_CHECKING:
    from reshard.plan.request import Request

_MAX_SHOWN = 3


def verify_replicas(
    request: Request,
    read: Callable[[Mapping[str, str]], Checkpoint],
    means: Means,
    report: Report,
    crcs: Optional[RecordedCrcs],
) -> tuple[list[Difference], str]:
    """Compare replicas of slices within one step of a checkpoint.

    Args:
        request: the checkpoint, as the source of a request.
        read: reads a form without ranks, complete or not; its argument is the damage of files, by path.
        means: files, threads and memory.
        report: gets warnings and notes.
        crcs: checks the CRCs of its files; None to check none.

    Returns:
        The differences and damaged files, and the line to print if there are none.

    Raises:
        ReshardError: files are missing or cannot be read, or there is nothing to compare.
    """
    filters, strategy, path = request.filters, request.source, str(request.src)
    problems: dict[str, InputError] = {}
    by_rank = form_named(request.form).options.by_rank
    if by_rank:
        files = _files_of_step(request, means.handles, report)
        source, problems = read_ranks(files, strategy, means.handles, crcs, filters.admit)
    else:
        source = read_sound(lambda damaged: stored_source(read(damaged), strategy), crcs, report, all_files=True)
    warn_of_unmatched(filters, (strategy.parameters, source.names), report)
    if not (problems or any(map(filters.admit, [*source.tensors, *source.values]))):
        raise CheckpointError(
            "nothing to compare: no parameter of the checkpoint is selected",
            hint="check --include and --exclude, and whether the strategy belongs to this model",
        )
    differences = compare_copies(source, means, filters.admit, problems)
    if by_rank:
        _note_not_held(source, strategy, filters, report)
    else:
        root = path if is_directory(path) else os.path.dirname(path)
        differences = [_by_file(difference, source.checkpoint.files, root) for difference in differences]
    return differences, "" if differences else _verdict(source, filters)


def _files_of_step(request: Request, handles: FileHandles, report: Report) -> Mapping[int, str]:
    """The files of the requested step of a rank tree, by rank."""
    path = str(request.src)
    tree = find_checkpoints(path, request.file_suffix)
    check_ranks(tree, request.source, handles)
    candidate = next(iter(tree.candidates(request.step)), None)
    if candidate is None:
        raise CheckpointError(f"{path}: holds no checkpoints", file=path)
    if candidate.step is not None:
        report.note(f"step {candidate.step} is compared")
    return candidate.files


def read_ranks(
    files: Mapping[int, str],
    strategy: Strategy,
    handles: FileHandles,
    crcs: Optional[RecordedCrcs],
    admit: Callable[[str], bool],
) -> tuple[Source, dict[str, InputError]]:
    """Read some ranks' files of one step, complete or not, without the files that do not match their recorded CRC.

    Returns:
        The checkpoint, and the problem of each parameter that contradicts the strategy; see `read_some_ranks`.
    """
    problems: dict[str, InputError] = {}

    def read(damaged: Mapping[str, str]) -> Source:
        damaged_ranks = {rank: damaged[path] for rank, path in files.items() if path in damaged}
        step_files = StepFiles(None, dict(files), damaged=damaged_ranks)
        checkpoint, contradicting = read_some_ranks(step_files, strategy, handles, Report(), admit)
        problems.clear()
        problems.update(contradicting)
        return stored_source(checkpoint, strategy)

    return read_sound(read, crcs, Report(), all_files=True), problems


def _by_file(difference: Difference, files: Mapping[int, str], root: str) -> Difference:
    """A difference of numbered files, with their names."""
    names = tuple(os.path.relpath(files[number], root) for number in difference.ranks)
    detail = "differs from the copies in other files" if difference.kind == "replica" else difference.detail
    return difference._replace(ranks=(), files=names, detail=detail)


def _verdict(source: Source, filters: Filters) -> str:
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


def _note_not_held(source: Source, strategy: Strategy, filters: Filters, report: Report) -> None:
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


def compare_copies(
    source: Source,
    means: Means,
    admit: Callable[[str], bool] = lambda name: True,
    problems: Optional[Mapping[str, InputError]] = None,
) -> list[Difference]:
    """Compare the copies of each slice within a checkpoint.

    Of three or more copies, the minority is reported; of two, both files. Missing files are skipped.

    Args:
        source: the checkpoint.
        means: files, threads and memory.
        admit: whether a parameter is compared, by name.
        problems: contradictions with the strategy, by parameter.

    Returns:
        Every difference, by parameter.

    Raises:
        ReshardError: a file cannot be read.
    """
    ranks = rank_checkpoint_of(source.checkpoint)
    damaged = {} if ranks is None else ranks.damaged
    differences = [Difference("file", None, (rank,), text) for rank, text in damaged.items()]
    for name, problem in (problems or {}).items():
        differences.append(
            Difference("strategy", name, () if problem.rank is None else (problem.rank,), problem.message)
        )
    values = {name: files for name, files in source.values.items() if len(files) > 1 and not belongs_to_rank(name)}
    values = {name: files for name, files in values.items() if admit(name)}
    tensors = [tensor for name, tensor in source.tensors.items() if admit(name) and isinstance(tensor, StoredTensor)]
    total = sum(source.value(name, file).nbytes for name, files in values.items() for file in files)
    for tensor in tensors:
        slices = _copied_slices(tensor)
        total += sum(tensor.item_size * volume_of(box) * len(files) for _, box, files in slices)
    with means.counting(total, "comparing copies"):
        differences += _differing_slices(tensors, means)
        kinds: dict[str, dict[int, Hashable]] = defaultdict(dict)
        for (name, file), number in sums(_value_copies(source, values), means):
            kinds[name][file] = (kind_of_tensor(source.value(name, file)), number)
        for name, copies in kinds.items():
            differences += _minority(name, copies)
    return sorted(differences, key=lambda difference: (difference.parameter or "", difference.kind, difference.ranks))


def _value_copies(
    source: Source, values: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[tuple[str, int], StoredTensor, Box]]:
    for name, files in values.items():
        for file in files:
            content = value_content(source.indexes, name, file)
            yield (name, file), content, whole_box(content.shape)


def has_copies(tensor: StoredTensor) -> bool:
    """Whether several files hold the same slice of a parameter, or several stages share it."""
    return any(volume_of(box) for _, box, _ in _copied_slices(tensor))


def _copied_slices(tensor: StoredTensor) -> list[tuple[SliceSet, Box, tuple[int, ...]]]:
    """The slices of a parameter in several files or stages."""
    tied = len(tensor.slice_sets) > 1
    return [
        (slices, box, files)
        for slices in tensor.slice_sets
        for box, files in slices.files_of.items()
        if len(files) > 1 or (files and tied)
    ]


def _differing_slices(tensors: Iterable[StoredTensor], means: Means) -> Iterator[Difference]:
    copies = (
        (
            (tensor, slices.number, box, file),
            replace(tensor, slice_sets=(SliceSet(slices.number, {box: (file,)}),)),
            box,
        )
        for tensor in tensors
        for slices, box, files in _copied_slices(tensor)
        for file in files
    )
    for _, tensor_sums in itertools.groupby(sums(copies, means), key=lambda item: item[0][0].name):
        totals: dict[int, int] = defaultdict(int)
        agree = True
        for (tensor, stage, _), slice_sums in itertools.groupby(tensor_sums, key=lambda item: item[0][:3]):
            by_file = {file: total for (*_, file), total in slice_sums}
            totals[stage] += Counter(by_file.values()).most_common(1)[0][0]
            for difference in _minority(tensor.name, by_file):
                agree = False
                yield difference
        complete = {slices.number for slices in tensor.whole_slice_sets()}
        if agree and len({totals[stage] % PRIME for stage in complete & set(totals)}) > 1:
            yield Difference("stages", tensor.name, (), "pipeline stages hold different values of it")


def _minority(name: str, copies: Mapping[int, Hashable]) -> Iterator[Difference]:
    """The files whose copy differs from the majority, or all files without a majority."""
    ranked = Counter(copies.values()).most_common(2)
    if len(ranked) == 1:
        return
    if ranked[0][1] > ranked[1][1]:
        wrong = [file for file, copy in copies.items() if copy != ranked[0][0]]
        most = rank_ranges(set(copies) - set(wrong))
        yield Difference("replica", name, tuple(wrong), f"differs from the copies on {most}")
    else:
        yield Difference("replicas", name, tuple(copies), "copies differ, without a majority that shows the wrong one")


def not_held(source: Source, strategy: Strategy, admit: Callable[[str], bool]) -> dict[str, list[int]]:
    """Per parameter the ranks of its stages, ascending, whose files lack it although other files hold it.

    This is not a difference: de-duplicated saves omit replicas, and conversions read any rank's copy.
    """
    lacking: dict[str, list[int]] = defaultdict(list)
    for group in files_alike(source.indexes):
        tensors = source.indexes[group[0]].tensors
        for stage in strategy.stages:
            ranks = [rank for rank in group if rank in stage.ranks]
            for name in stage.layouts if ranks else ():
                if name in source.tensors and name not in tensors and admit(name):
                    lacking[name] += ranks
    return {name: sorted(ranks) for name, ranks in sorted(lacking.items())}
