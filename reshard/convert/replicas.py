"""Comparison of the copies of slices within one step of a checkpoint, for `verify --replicas`."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from reshard.asked import cpus_of
from reshard.checkpoints import FileHandles, files_alike, unchecked
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.errors import CheckpointError, InputError, UsageError
from reshard.execute import Budget, Progress
from reshard.forms.ranks.checkpoint import read_some_ranks
from reshard.forms.ranks.selection import check_ranks
from reshard.forms.ranks.tree import StepFiles, find_checkpoints
from reshard.forms.request import Means, Request
from reshard.plan.planner import read_source
from reshard.source_replicas import damaged_files
from reshard.source_replicas.compare import compare_replicas, entries_as_tensors
from reshard.storage import costs_of, is_directory
from reshard.strategies import Strategy
from reshard.text.globs import Filters, warn_of_unmatched
from reshard.text.messages import Message, Report, joined, listing, plural, rank_ranges
from reshard.text.names import belongs_to_rank
from reshard.verification.reading import Difference

_MAX_SHOWN = 3


def verify_replicas(
    request: Request, handles: FileHandles, progress: Progress, report: Report
) -> tuple[list[Difference], str]:
    """Compare replicas of slices within one step of a checkpoint, the source of a request.

    Of three or more copies, the minority is reported; of two, both files. Missing files are skipped.

    Returns:
        The differences and damaged files, and the line to print if there are none.

    Raises:
        ReshardError: files are missing or cannot be read, or there is nothing to compare.
    """
    path, filters, strategy, effort = request.src, request.filters, request.source, request.asked.effort
    by_rank = request.form.options.by_rank
    budget = Budget.of(cpus_of(effort), effort.max_memory, costs_of(path))
    files = _files_of_step(request, handles, report) if by_rank else {}

    def read(damaged: Mapping[str, str]) -> tuple[Checkpoint, Mapping[str, InputError]]:
        if not by_rank:
            reading = request._replace(damaged=damaged, partial=True)
            return read_source(reading, Means(handles, report)), {}
        damaged_ranks = {rank: damaged[path] for rank, path in files.items() if path in damaged}
        step_files = StepFiles(None, dict(files), damaged=damaged_ranks)
        return read_some_ranks(step_files, strategy, handles, Report(), filters.admit)

    damage: dict[str, str] = {}
    checked: set[object] = set()
    while True:
        checkpoint, problems = read(damage)
        unread = unchecked(checkpoint.indexes.values(), checked) if effort.crc == "auto" else []
        damaged = damaged_files(unread, budget, handles, report, progress) if unread else {}
        if not damaged:
            break
        # Another step may be read without these files.
        damage.update((path, error.message) for path, error in damaged.items())
    warn_of_unmatched(filters, (checkpoint.names(), strategy.parameters), report)
    if not any(map(filters.admit, [*checkpoint.names(), *problems])):
        raise CheckpointError(
            "nothing to compare: no parameter of the checkpoint is selected",
            hint="check --include and --exclude, and whether the strategy belongs to this model",
        )
    differences, alone = differing_copies(checkpoint, problems, filters, budget, handles, progress)
    handles.check_unchanged(sorted({index.path for index in checkpoint.indexes.values()}))
    if by_rank:
        _note_not_held(checkpoint, strategy, filters, report)
    else:
        root = path if is_directory(path) else os.path.dirname(path)
        differences = [_by_file(difference, checkpoint.files, root) for difference in differences]
    if differences:
        return differences, ""
    if alone == sum(map(filters.admit, checkpoint.tensors)):
        raise UsageError(
            "no two files hold the same slice of a parameter: nothing was compared",
            hint="compare with the source: reshard verify OUT --src SRC; or record checksums with --checksum",
        )
    single = f"; {plural(alone, 'parameter')} without copies" if alone else ""
    return [], f"verified: copies do not differ{single}"


def differing_copies(
    checkpoint: Checkpoint,
    problems: Mapping[str, InputError],
    filters: Filters,
    budget: Budget,
    handles: FileHandles,
    progress: Progress,
) -> tuple[list[Difference], int]:
    """Every difference between the copies of a slice or value, by parameter; and the parameters without copies.

    Args:
        checkpoint: the step; of rank directories, with the reasons why files count as absent.
        problems: contradictions with the strategy, by parameter.
        filters: the compared parameters.
        budget: threads and memory.
        handles: open files.
        progress: counts bytes.

    Raises:
        ReshardError: a file cannot be read.
    """
    damaged: Mapping[int, str] = getattr(checkpoint, "damaged", {})
    differences = [Difference("file", None, (rank,), text) for rank, text in damaged.items()]
    for name, problem in problems.items():
        ranks = () if problem.rank is None else (problem.rank,)
        differences.append(Difference("strategy", name, ranks, problem.message))
    values = [name for name in (*checkpoint.values(), *checkpoint.without_layout()) if not belongs_to_rank(name)]
    values = [name for name in values if filters.admit(name) and len(checkpoint.holders(name)) > 1]
    entries, different = entries_as_tensors(values, checkpoint)
    tensors = [checkpoint.tensors[name] for name in checkpoint.tensors if filters.admit(name)]
    comparison = compare_replicas([*tensors, *entries], checkpoint, handles, budget, progress, "all")
    for item in comparison.differences:
        differences.append(_minority(item.parameter, item.groups))
    for name in different:
        by_kind: dict[object, list[int]] = defaultdict(list)
        for file in checkpoint.holders(name):
            by_kind[checkpoint.indexes[file].tensors[name].header].append(file)
        differences.append(_minority(name, [*by_kind.values()]))
    ordered = sorted(
        differences, key=lambda difference: (difference.parameter or "", difference.kind, difference.ranks)
    )
    return ordered, comparison.alone


def _minority(name: str, groups: Sequence[Sequence[int]]) -> Difference:
    """The files whose copy differs from the majority, or all files without a majority, from files by content."""
    (most, count), (_, second) = Counter({tuple(files): len(files) for files in groups}).most_common(2)
    everywhere = sorted(file for files in groups for file in files)
    if count > second:
        wrong = tuple(file for file in everywhere if file not in most)
        return Difference("replica", name, wrong, f"differs from the copies on {rank_ranges(most)}")
    detail = "copies differ, without a majority that shows the wrong one"
    return Difference("replicas", name, tuple(everywhere), detail)


def _files_of_step(request: Request, handles: FileHandles, report: Report) -> Mapping[int, str]:
    """The files of the requested step of a rank tree, by rank."""
    tree = find_checkpoints(request.asked.source)
    check_ranks(tree, request.source, handles)
    newest = tree.newest(request.asked.source.step)
    if newest.step is not None:
        report.note(f"step {newest.step} is compared")
    return newest.files


def _by_file(difference: Difference, files: Mapping[int, str], root: str) -> Difference:
    """A difference of numbered files, with their names."""
    names = tuple(os.path.relpath(files[number], root) for number in difference.ranks)
    detail = "differs from the copies in other files" if difference.kind == "replica" else difference.detail
    return difference._replace(ranks=(), files=names, detail=detail)


def _note_not_held(checkpoint: Checkpoint, strategy: Strategy, filters: Filters, report: Report) -> None:
    """Report parameters that some files lack, as in a de-duplicated save: conversions read any rank's copy."""
    lacking: dict[str, list[int]] = defaultdict(list)
    for group in files_alike(checkpoint.indexes):
        held = checkpoint.indexes[group[0]].tensors
        for stage in strategy.stages:
            ranks = [rank for rank in group if rank in stage.ranks]
            for name in stage.layouts if ranks else ():
                if name in checkpoint.tensors and name not in held and filters.admit(name):
                    lacking[name] += ranks
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, ranks in sorted(lacking.items()):
        by_ranks.setdefault(tuple(sorted(ranks)), []).append(name)
    if by_ranks:
        # Parameters that few ranks lack come first: they are the exception in a de-duplicated save.
        sets = sorted(by_ranks, key=lambda ranks: (len(ranks), ranks))
        lines = [listing(by_ranks[ranks], _MAX_SHOWN) + f" not on {rank_ranges(ranks)}" for ranks in sets]
        more = len(sets) - _MAX_SHOWN
        shown = joined("; ", lines[:_MAX_SHOWN]) + (f"; and {more} more sets of ranks" if more > 0 else "")
        report.note(
            f"{plural(len(lacking), 'parameter')} missing in some files, as in a de-duplicated save; the copies "
            "in other files are compared: " + Message(shown, joined("; ", lines).full)
        )
