"""The check of `strategy check`: shapes of all slices, and all bytes of replicas; it reports every contradiction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

from reshard.checkpoints import FileHandles
from reshard.errors import CheckpointError
from reshard.execute import Budget, Progress
from reshard.forms.ranks.checkpoint import RankCheckpoint, contradictions, listed_by_source, read_parameters
from reshard.forms.ranks.tree import SourceTree, StepFiles, find_checkpoints
from reshard.source_replicas.compare import compare_replicas, entries_as_tensors
from reshard.source_replicas.comparison import ReplicaComparison
from reshard.source_replicas.contradictions import SameSlices, misplaced, ranks_by_content, same_slices
from reshard.strategies import Strategy
from reshard.text.globs import Filters, warn_of_unmatched
from reshard.text.messages import Report
from reshard.text.names import belongs_to_rank


class Misfit(NamedTuple):
    """Parameters whose slices' shapes fit no tensor by the strategy: sorted names, and the problem of the first."""

    parameters: list[str]
    detail: str


class EqualRanks(NamedTuple):
    """Ranks of a stage, only the first of a large one, in groups with equal bytes of a parameter."""

    parameter: str
    groups: list[list[int]]


@dataclass(frozen=True)
class StrategyCheck:
    """Agreement of a strategy with a checkpoint's files.

    Attributes:
        step: the checked step; None if file names contain none.
        ranks: ranks with a readable file.
        absent_ranks: ranks of the strategy without a readable file.
        beyond_ranks: ranks with files beyond the strategy's devices.
        parameters: listed parameters whose slices have the right shapes.
        misfits: listed parameters whose slices have wrong shapes.
        not_held: listed parameters in no file.
        not_listed: unlisted tensors that are equal on all ranks, or single values.
        not_described: unlisted tensors that differ between ranks: probably slices.
        comparison: the comparison of replicas.
        same_slices: parameters with equal bytes on ranks that should hold different slices by the strategy;
            empty if these are too few to contradict it.
        misplaced: parameters in files of pipeline stages that do not list them; empty unless these are the majority
            and replicas could not test the strategy.
        alike: for a parameter that contradicts the strategy, the ranks with equal bytes.
    """

    step: Optional[str]
    ranks: list[int]
    absent_ranks: list[int]
    beyond_ranks: list[int]
    parameters: list[str]
    misfits: list[Misfit]
    not_held: list[str]
    not_listed: list[str]
    not_described: list[str]
    comparison: ReplicaComparison
    same_slices: list[SameSlices]
    misplaced: list[str]
    alike: Optional[EqualRanks]

    @property
    def other_network(self) -> bool:
        """Whether the files hold no listed parameter."""
        return bool(self.not_held) and not self.parameters and not self.misfits

    @property
    def fits(self) -> bool:
        """Whether the files agree with the strategy."""
        differing = self.comparison.differing or self.same_slices or self.misplaced
        return not (self.other_network or self.beyond_ranks or self.misfits or self.not_described or differing)


def check_strategy(
    strategy: Strategy,
    path: str,
    step: str,
    file_suffix: Optional[str],
    filters: Filters,
    handles: FileHandles,
    budget: Budget,
    progress: Progress,
    report: Report,
) -> StrategyCheck:
    """Check a strategy against the step of all ranks, by default the newest; warn about files that count as absent.

    Raises:
        ReshardError: the files cannot be read.
    """
    source = RankCheckpoint(_step(find_checkpoints(path, file_suffix), step), handles, report)
    if not source.indexes:
        raise CheckpointError(f"{path}: no file of {source.label} is readable", file=path)
    warn_of_unmatched(filters, (strategy.parameters, source.names()), report)
    laid_out = {name for name in listed_by_source(strategy, source) if filters.admit(name)}
    stored = {name for name in source.names() if filters.admit(name)}
    if not laid_out and not stored:
        raise CheckpointError(
            "nothing to check: no parameter of the checkpoint is selected",
            hint="check --include and --exclude",
        )
    parameters = read_parameters(strategy, source, laid_out, set())
    comparison = compare_replicas(parameters.values(), source, handles, budget, progress, "all")
    not_described = _not_described(sorted(stored - laid_out), source, handles, budget)
    same, _ = same_slices(parameters.values(), source, handles, budget)
    wrong = [*(item.parameter for item in comparison.differing), *(item.parameter for item in same)]
    return StrategyCheck(
        step=source.step,
        ranks=sorted(source.indexes),
        absent_ranks=sorted(set(range(strategy.device_count)) - source.readable),
        beyond_ranks=sorted(rank for rank in source.files if rank >= strategy.device_count),
        parameters=sorted(parameters),
        misfits=_misfits(sorted(laid_out & stored - parameters.keys()), strategy, source),
        not_held=sorted(laid_out - stored),
        not_listed=sorted(stored - laid_out - set(not_described)),
        not_described=not_described,
        comparison=comparison,
        same_slices=same,
        misplaced=[] if comparison.check.tested else misplaced(strategy, source),
        alike=None
        if not wrong
        else EqualRanks(wrong[0], ranks_by_content(parameters[wrong[0]], source, handles, budget)),
    )


def _step(tree: SourceTree, step: str) -> StepFiles:
    """The files of the newest step that all ranks have, or else of the newest step."""
    newest: Optional[StepFiles] = None
    for candidate in tree.candidates(step):
        if len(candidate.files) == len(tree.ranks):
            return candidate
        newest = newest or candidate
    if newest is None:
        raise CheckpointError(f"{tree.root}: holds no checkpoints", file=tree.root)
    return newest


def _misfits(names: Sequence[str], strategy: Strategy, step: RankCheckpoint) -> list[Misfit]:
    """Parameters that contradict the strategy, grouped by problem."""
    alike: dict[str, Misfit] = {}
    for name, error in contradictions(names, strategy, step).items():
        misfit = alike.setdefault(error.message.replace(name, ""), Misfit([], error.message))
        misfit.parameters.append(name)
    return list(alike.values())


def _not_described(names: Iterable[str], step: RankCheckpoint, handles: FileHandles, budget: Budget) -> list[str]:
    """Unlisted tensors of several elements that differ between ranks."""
    large = [
        name
        for name in names
        if not belongs_to_rank(name)
        and all(step.indexes[rank].tensors[name].elements > 1 for rank in step.holders(name))
    ]
    comparable, different = entries_as_tensors(large, step)
    comparison = compare_replicas(comparable, step, handles, budget, Progress(), "all")
    return sorted([*different, *(differing.parameter for differing in comparison.differing)])
