"""Comparison of slices that should differ, and of stages that should hold their own parameters.

A strategy with finer cuts than the true strategy passes every comparison of replicas, because it has fewer replicas or
none. But then some of its different slices are replicas. Slices of a trained weight are never equal, unless they have
few different elements: all may be zero, and a few bits agree by chance. So some parameters of every layout are
compared, at the same place in slices whose distance divides the number of slices: with a coarser true device matrix,
the slices repeat at this distance.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Optional, TypeVar

from reshard.checkpoints import FileHandles, files_alike
from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.execute import ExecutionOptions
from reshard.forms.ranks.checkpoint import SourceStep, stage_shardings
from reshard.layout import shape_of, volume_of
from reshard.named_tuple import NamedTuple
from reshard.source_replicas.choice import Holder, group_parameters
from reshard.source_replicas.samples import MOST_PLACES, UNREADABLE, ReplicaFiles
from reshard.strategies import Strategy

_Data = TypeVar("_Data", bytes, Optional[bytes])

# Maximum number of tied parameters.
_FEW_TIED = 3
_MOST_OF_A_KIND = 2
_FEW_SLICES = 16
# Minimum different elements of a slice: fewer can be equal in another slice by chance.
_FEWEST_ELEMENTS = 8
# Minimum number of whole parameters that the strategy cuts; fewer may be a coincidence.
_SEVERAL = 2
_SECONDS = 2.0
# Maximum ranks to group by content.
_MOST_GROUPED = 64


class SameSlices(NamedTuple):
    """A parameter with equal bytes on ranks that should hold different slices.

    Attributes:
        parameter: its name.
        ranks: two of these ranks.
        is_whole: whether all compared ranks hold the same bytes, and the strategy has only optimizer shards: then each
            rank probably holds the whole parameter.
    """

    parameter: str
    ranks: tuple[int, int]
    is_whole: bool


class Distinctness(NamedTuple):
    """The comparison of slices that should differ.

    Attributes:
        compared: number of parameters with enough different elements to compare.
        same: the parameters with equal slices.
    """

    compared: int
    same: list[SameSlices]

    @property
    def contradicts(self) -> bool:
        """Whether most parameters have equal slices, or several are whole: the strategy's cuts are too fine.

        A few may be intentional copies, such as key heads repeated for tensor parallelism.
        """
        whole_count = sum(parameter.is_whole for parameter in self.same)
        return 2 * len(self.same) > self.compared or whole_count >= _SEVERAL


def compare_slices(
    parameters: Iterable[GlobalTensor], step: SourceStep, handles: FileHandles, execution: ExecutionOptions
) -> Distinctness:
    """Compare slices that should differ; unreadable slices are skipped.

    Args:
        parameters: the parameters, as read from the files.
        step: the files.
        handles: open files.
        execution: storage, threads and memory.
    """
    deadline = time.monotonic() + _SECONDS
    chosen = [
        (one, holders)
        for kind in group_parameters(list(parameters), step)
        if kind.is_cut
        for one in kind.parameters[:_MOST_OF_A_KIND]
        if len(holders := _holders(one, step)) > 1
    ]

    groups_of: dict[str, list[list[int]]] = {}
    with contextlib.closing(ReplicaFiles(step, handles, execution)) as files:

        def read(parameter: GlobalTensor, holder: Holder, place: int) -> Optional[bytes]:
            with contextlib.suppress(*UNREADABLE):
                return files.own_sample(parameter, holder, place) if time.monotonic() < deadline else None
            return None

        pending = chosen
        for place in range(MOST_PLACES):
            reads = ([partial(read, one, holder, place) for holder in holders] for one, holders in pending)
            undecided = []
            for (one, holders), samples in zip(pending, files.each(reads)):
                by_content = _by_content(holders, samples)
                if None in by_content:
                    continue
                groups = [ranks for data, ranks in by_content.items() if data and _is_varied(data, one.item_size)]
                if groups:
                    groups_of[one.name] = groups
                else:
                    undecided.append((one, holders))
            pending = undecided
    same_slices: list[SameSlices] = []
    for parameter, holders in chosen:
        first = next((group for group in groups_of.get(parameter.name, ()) if len(group) > 1), None)
        if first is not None:
            layout = stage_shardings(parameter)[0].layout
            is_whole = len(first) == len(holders) and layout.slice_count == layout.shards
            same_slices.append(SameSlices(parameter.name, (first[0], first[1]), is_whole))
    return Distinctness(len(groups_of), same_slices)


def _by_content(holders: Sequence[Holder], samples: Iterable[_Data]) -> dict[_Data, list[int]]:
    """Ranks grouped by equal samples."""
    groups: dict[_Data, list[int]] = {}
    for holder, data in zip(holders, samples):
        groups.setdefault(data, []).append(holder.rank)
    return groups


def _is_varied(data: bytes, item_size: int) -> bool:
    """Whether a sample has enough different elements."""
    elements = set()
    for at in range(0, len(data), item_size):
        elements.add(data[at : at + item_size])
        if len(elements) == _FEWEST_ELEMENTS:
            return True
    return False


def ranks_by_content(
    parameter: GlobalTensor, step: SourceStep, handles: FileHandles, execution: ExecutionOptions
) -> list[list[int]]:
    """Group the ranks of the first stage with a parameter by samples of their slices.

    Returns:
        Groups of ranks with equal samples; only the first ranks of a large stage.

    Raises:
        RetryableError: a file cannot be read.
    """
    sharding = stage_shardings(parameter)[0]
    ranks = sorted(step.ranks_with(parameter.name, sharding.stage))[:_MOST_GROUPED]
    holders = [Holder(rank, sharding.grid.slice_box(sharding.slice_of(rank))) for rank in ranks]
    with contextlib.closing(ReplicaFiles(step, handles, execution)) as files:
        for place in range(MOST_PLACES):
            (samples,) = files.each([[partial(files.own_sample, parameter, holder, place) for holder in holders]])
            groups = _by_content(holders, samples)
            if len(groups) > 1:
                break
    return list(groups.values())


def _holders(parameter: GlobalTensor, step: SourceStep) -> list[Holder]:
    """A rank for each of some slices of a stage, of one shape and not empty."""
    sharding = stage_shardings(parameter)[0]
    rank_of: dict[int, int] = {}
    for rank in sorted(step.ranks_with(parameter.name, sharding.stage)):
        rank_of.setdefault(sharding.slice_of(rank), rank)
    count = sharding.grid.slice_count
    chosen = [number for number in sorted(rank_of) if count <= _FEW_SLICES or number == 0 or count % number == 0]
    holders = [Holder(rank_of[number], sharding.grid.slice_box(number)) for number in chosen]
    return [holder for holder in holders if volume_of(holder.box) and shape_of(holder.box) == shape_of(holders[0].box)]


def misplaced(strategy: Strategy, step: SourceStep) -> list[str]:
    """Parameters on ranks of a pipeline stage that only other stages list, sorted; empty unless they are the majority.

    Ranks of a stage hold the parameters of that stage, and rarely a few tied parameters of another. If they hold most
    parameters of other stages, the stages are those of another run: slices with equal shapes would be combined
    wrongly.

    Args:
        strategy: the strategy of the checkpoint.
        step: the files.
    """
    stored = set(strategy.parameters) & step.names()
    foreign: set[str] = set()
    for stage in strategy.stages:
        for rank, *_ in files_alike({rank: step.indexes[rank] for rank in step.loaded(stage)}):
            foreign |= stored & step.indexes[rank].tensors.keys() - stage.layouts.keys()
    return sorted(foreign) if len(foreign) > max(_FEW_TIED, len(stored) // 2) else []
