"""Verification from end to end: which files are compared with which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional

from reshard.checkpoints import SourceTree, find_checkpoints
from reshard.errors import CheckpointError
from reshard.plan.replicas import ReplicaChoice
from reshard.plan.selection import Filters, StepSelector, check_ranks
from reshard.report import Report
from reshard.strategies import Strategy
from reshard.verification import Difference, Means, compare_replicas, compare_trees


def verify_conversion(
    src: str,
    source: Strategy,
    files: Mapping[int, str],
    target: Strategy,
    *,
    step: str,
    file_suffix: Optional[str],
    ranks: Optional[tuple[int, ...]],
    filters: Filters,
    means: Means,
    report: Report,
) -> list[Difference]:
    """What of a converted checkpoint is not what its source makes of it.

    Args:
        src: tree, file or `{rank}` path of the source.
        source: its strategy.
        files: the converted files, by rank.
        target: their strategy.
        step: the step that was converted; ``latest`` for the newest complete one.
        file_suffix: only source files whose stem ends so.
        ranks: target ranks to look at; all where None.
        filters: which parameters were converted.
        means: what may be used for reading.
        report: told what was decided.

    Raises:
        ReshardError: the source is not complete, or cannot be read.
    """
    tree = find_checkpoints(src, file_suffix)
    check_ranks(tree, source, target, means.handles)
    chosen = step_files(tree, source, target, step=step, ranks=ranks, filters=filters, means=means, report=report)
    return compare_trees(chosen, source, files, target, means, ranks=ranks, admit=filters.admit)


def verify_replicas(
    path: str,
    strategy: Strategy,
    step: str,
    file_suffix: Optional[str],
    filters: Filters,
    means: Means,
    report: Report,
) -> list[Difference]:
    """Which copies of slices within one step of a tree differ.

    Raises:
        ReshardError: there are no files, or they cannot be read.
    """
    tree = find_checkpoints(path, file_suffix)
    check_ranks(tree, strategy, Strategy.none(), means.handles)
    candidate = next(iter(tree.candidates(step)), None)
    if candidate is None:
        raise CheckpointError(f"{path}: holds no checkpoints", file=path)
    if candidate.step is not None:
        report.note(f"step {candidate.step} is compared")
    return compare_replicas(candidate.files, strategy, means, filters.admit)


def step_files(
    tree: SourceTree,
    source: Strategy,
    target: Strategy,
    *,
    step: str,
    ranks: Optional[tuple[int, ...]],
    filters: Filters,
    means: Means,
    report: Report,
) -> dict[int, str]:
    """The files of a step that hold what a target needs, by rank.

    Raises:
        IncompleteSourceError: no step has it all.
    """
    choice = ReplicaChoice(source, target)
    selector = StepSelector(source, target, ranks, filters, choice, means.handles, report)
    selected = selector.select(tree.candidates(step)).step
    return {rank: path for rank, path in selected.files.items() if rank not in selected.damaged}
