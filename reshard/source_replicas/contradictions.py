"""Contradictions of a strategy whose replicas agree, such as equal slices; and `strategy check`.

A strategy with finer cuts than the true strategy passes every comparison of replicas, because it has fewer replicas or
none. But then some of its different slices are replicas. Slices of a trained weight are never equal, unless they have
few different elements: all may be zero, and a few bits agree by chance. So one parameter of every layout is
compared, at the same place in slices whose distance divides the number of slices: with a coarser true device matrix,
the slices repeat at this distance.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reshard.asked import Source
from reshard.checkpoints import FileHandles, files_alike
from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.errors import CheckpointError, IncompleteSourceError, InputError, ReshardError
from reshard.execute import Budget, Progress
from reshard.forms.ranks.checkpoint import (
    RankCheckpoint,
    contradictions,
    listed_by_source,
    read_parameters,
    stage_shardings,
)
from reshard.forms.ranks.selection import lost_slices
from reshard.forms.ranks.tree import SourceTree, StepFiles, find_checkpoints
from reshard.forms.request import Request
from reshard.layout import shape_of, volume_of
from reshard.source_replicas.choice import Holder, group_parameters, is_gradient, number_of
from reshard.source_replicas.compare import (
    MOST_PLACES,
    Contents,
    ReplicaComparison,
    ReplicaFiles,
    Sample,
    compare_replicas,
    entries_as_tensors,
    sample_box,
)
from reshard.strategies import Strategy
from reshard.text.globs import Filters, warn_of_unmatched
from reshard.text.messages import Report, listing, plural, quoted
from reshard.text.names import belongs_to_rank

# Maximum number of tied parameters.
_FEW_TIED = 3
# Parameters of a layout to try: all elements of some may be equal.
_MOST_TRIED = 4
_FEW_SLICES = 16
# Minimum different elements of a slice: fewer can be equal in another slice by chance.
_FEWEST_ELEMENTS = 8
_SECONDS = 2.0
# Maximum ranks to group by content.
_MOST_GROUPED = 64


class SameSlices(NamedTuple):
    """A parameter with equal bytes on two ranks that should hold different slices."""

    parameter: str
    ranks: tuple[int, int]


def same_slices(
    parameters: Iterable[GlobalTensor], step: RankCheckpoint, handles: FileHandles, budget: Budget
) -> tuple[list[SameSlices], int]:
    """Compare slices that should differ, of one parameter of each layout; unreadable slices are skipped.

    Returns:
        The parameters with equal slices if they show that the strategy's cuts are too fine, and the number of compared
        parameters. They show it if they are the majority, or if one that only optimizer shards cut is whole on
        every rank. A few may be intentional copies, such as key heads repeated for tensor parallelism.
    """
    same: list[SameSlices] = []
    compared, certain = 0, False
    with contextlib.closing(ReplicaFiles(step, handles, budget, _SECONDS)) as files:
        for group in group_parameters(list(parameters), step):
            holders = _holders(group.parameters[0], step) if group.is_cut else []
            for parameter, place in itertools.product(group.parameters[:_MOST_TRIED], range(MOST_PLACES)):
                if len(holders) < 2:
                    break
                (by_content,) = files.contents([_own_sample(parameter, holders, place)])
                varied = [ranks for data, ranks in by_content.items() if _is_varied(data, parameter.item_size)]
                if not varied or sum(map(len, by_content.values())) < len(holders):
                    continue
                compared += 1
                equal = next((ranks for ranks in varied if len(ranks) > 1), None)
                if equal is not None:
                    same.append(SameSlices(parameter.name, (equal[0], equal[1])))
                    layout = stage_shardings(parameter)[0].layout
                    certain |= layout.slice_count == layout.shards and len(equal) == len(holders)
                break
    return (same if certain or 2 * len(same) > compared else []), compared


def check_slices(
    source: Strategy,
    parameters: Iterable[GlobalTensor],
    step: RankCheckpoint,
    handles: FileHandles,
    budget: Budget,
) -> None:
    """Compare slices that should differ.

    Raises:
        CheckpointError: ranks hold equal bytes where the strategy has different slices.
    """
    same, compared = same_slices(parameters, step, handles, budget)
    if same:
        name, (first, second) = same[0]
        raise CheckpointError(
            f"the source strategy ({source.path}) does not fit this checkpoint: ranks hold equal bytes where they "
            f"should hold different slices, of {len(same)} of {compared} sampled parameters\n"
            f"  {quoted(name)} on rank {first} and rank {second} ({step.files[first]} and {step.files[second]})",
            file=step.files[second],
            rank=second,
            parameter=name,
            hint="pass the strategy that this checkpoint was saved with; if parts of its parameters are intentional "
            "copies of each other: --check-replicas never",
        )


def _is_varied(data: bytes, item_size: int) -> bool:
    """Whether a sample has enough different elements."""
    elements = set()
    for at in range(0, len(data), item_size):
        elements.add(data[at : at + item_size])
        if len(elements) == _FEWEST_ELEMENTS:
            return True
    return False


def _own_sample(parameter: GlobalTensor, holders: Sequence[Holder], place: int) -> Sample:
    """A sample of each holder's slice; at the same place in slices of the same shape."""
    number = number_of(parameter.name, place)
    return parameter, [((rank, box), sample_box(parameter, box, [box], number)) for rank, box in holders]


def _holders(parameter: GlobalTensor, step: RankCheckpoint) -> list[Holder]:
    """A rank for each of some slices of a stage, of one shape and not empty."""
    sharding = stage_shardings(parameter)[0]
    rank_of: dict[int, int] = {}
    for rank in sorted(step.ranks_with(parameter.name, sharding.stage)):
        rank_of.setdefault(sharding.slice_of(rank), rank)
    count = sharding.grid.slice_count
    chosen = [number for number in sorted(rank_of) if count <= _FEW_SLICES or number == 0 or count % number == 0]
    holders = [(rank_of[number], sharding.grid.slice_box(number)) for number in chosen]
    return [(rank, box) for rank, box in holders if volume_of(box) and shape_of(box) == shape_of(holders[0][1])]


def ranks_by_content(
    parameter: GlobalTensor, step: RankCheckpoint, handles: FileHandles, budget: Budget
) -> list[list[int]]:
    """Ranks of a parameter's first stage, or the first of many, in groups with equal samples."""
    sharding = stage_shardings(parameter)[0]
    ranks = sorted(step.ranks_with(parameter.name, sharding.stage))[:_MOST_GROUPED]
    holders = [(rank, sharding.grid.slice_box(sharding.slice_of(rank))) for rank in ranks]
    by_content: Contents = {}
    with contextlib.closing(ReplicaFiles(step, handles, budget)) as files:
        for place in range(MOST_PLACES):
            (by_content,) = files.contents([_own_sample(parameter, holders, place)])
            if len(by_content) > 1:
                break
    return list(by_content.values())


def misplaced(strategy: Strategy, step: RankCheckpoint) -> list[str]:
    """Parameters on ranks of a pipeline stage that only other stages list, sorted; empty unless they are the majority.

    Ranks of a stage hold the parameters of that stage, and rarely a few tied parameters of another. If they hold most
    parameters of other stages, the stages are those of another run: slices with equal shapes would be combined
    wrongly.
    """
    stored = set(strategy.parameters) & step.names()
    foreign: set[str] = set()
    for stage in strategy.stages:
        for rank, *_ in files_alike({rank: step.indexes[rank] for rank in step.loaded(stage)}):
            foreign |= stored & step.indexes[rank].tensors.keys() - stage.layouts.keys()
    return sorted(foreign) if len(foreign) > max(_FEW_TIED, len(stored) // 2) else []


def check_stages(source: Strategy, step: RankCheckpoint) -> None:
    """Refuse files of other pipeline stages, which no replicas contradict.

    Raises:
        CheckpointError: most parameters are on other pipeline stages.
    """
    names = misplaced(source, step)
    if names:
        raise CheckpointError(
            f"the source strategy ({source.path}) does not fit this checkpoint: ranks hold "
            f"{plural(len(names), 'parameter')} that it lists for other pipeline stages only, and no replicas confirm "
            "it: " + listing(names),
            file=step.place,
            parameter=names[0],
            hint="pass the strategy that this checkpoint was saved with; if it is this one, and ranks hold "
            "parameters of other stages: --check-replicas never",
        )


@contextlib.contextmanager
def hint_of_swap(request: Request, handles: FileHandles) -> Iterator[None]:
    """Add to an error about the source's files that by shapes they fit the target's strategy, and not the source's."""
    by_rank = request.form.options.by_rank and request.to.options.by_rank
    source, target, read = request.source, request.target, request.asked.source
    try:
        yield
    except (CheckpointError, IncompleteSourceError) as error:
        if not by_rank or not request.edits.is_empty:
            raise
        # Lost files contradict a strategy only if the other one cuts them differently.
        lost = isinstance(error, IncompleteSourceError) and _cuts(source) == _cuts(target)
        if read.files is None and source is not target and not lost:
            # The error itself reports unreadable files.
            with contextlib.suppress(ReshardError, OSError):
                files = find_checkpoints(read).newest(read.step)
                if _fits(target, files, handles) and not _fits(source, files, handles):
                    swapped = f"the files fit --dst-strategy ({target.path}), by shapes: are the two swapped?"
                    error.add_hint(swapped, first=True)
        raise


def _fits(strategy: Strategy, files: StepFiles, handles: FileHandles) -> bool:
    """Whether every rank is present, every slice has a shape that fits the layouts, and nothing is missing."""
    step = RankCheckpoint(files, handles)
    laid_out = listed_by_source(strategy, step)
    # Without gradients: files alone may not determine their cuts.
    decisive = {name for name in laid_out if not is_gradient(name)}
    if step.readable != frozenset(range(strategy.device_count)):
        return False
    try:
        parameters = read_parameters(strategy, step, laid_out, decisive)
    except InputError:
        return False
    return bool(parameters) and not lost_slices(parameters.values(), step)


def _cuts(strategy: Strategy) -> dict[str, tuple[int, ...]]:
    """The cuts of every parameter that is not whole."""
    layouts = (item for stage in strategy.stages for item in stage.layouts.items())
    return {name: layout.cuts for name, layout in layouts if layout.slice_count > 1}


# The check of a strategy against a checkpoint: shapes of all slices, and all bytes of replicas.


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

    step: str | None
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
    alike: EqualRanks | None

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
    read: Source,
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
    source = RankCheckpoint(_step(find_checkpoints(read), read.step), handles)
    source.warn_of_damage(report)
    if not source.indexes:
        raise CheckpointError(f"{read.path}: no file of {source.label} is readable", file=read.path)
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
    of_all = (candidate for candidate in tree.candidates(step) if len(candidate.files) == len(tree.ranks))
    return next(of_all, None) or tree.newest(step)


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
