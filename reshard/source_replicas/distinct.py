"""Comparison of slices that should differ, and of stages that should hold their own parameters.

A strategy with finer cuts than the true strategy passes every comparison of replicas, because it has fewer replicas or
none. But then some of its different slices are replicas. Slices of a trained weight are never equal, unless they have
few different elements: all may be zero, and a few bits agree by chance. So some parameters of every layout are
compared, at the same place in slices whose distance divides the number of slices: with a coarser true device matrix,
the slices repeat at this distance.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable
from typing import NamedTuple, Optional

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.execute import ExecutionOptions
from reshard.forms.ranks.checkpoint import SourceStep
from reshard.forms.ranks.holding import stage_shardings
from reshard.layout import shape_of, volume_of
from reshard.source_replicas.choice import Holder, group_parameters
from reshard.source_replicas.samples import MOST_PLACES, UNREADABLE, ReplicaFiles, own_sample_box
from reshard.strategies import Strategy

# Maximum number of tied parameters.
_FEW_TIED = 3
_MOST_OF_A_KIND = 2
_FEW_SLICES = 16
# Minimum different elements of a slice: fewer can be equal in another slice by chance.
_FEWEST_ELEMENTS = 8
# Minimum number of whole parameters that the strategy cuts; fewer may be a coincidence.
_SEVERAL = 2
_SECONDS = 2.0


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
        one
        for kind in group_parameters(list(parameters), step)
        if kind.is_cut
        for one in kind.parameters[:_MOST_OF_A_KIND]
    ]
    holders_of = {one.name: holders for one in chosen if len(holders := _holders(one, step)) > 1}
    groups: dict[str, list[list[int]]] = {}
    with contextlib.closing(ReplicaFiles(step, handles, execution)) as files:

        def read(task: tuple[GlobalTensor, int, Holder]) -> Optional[bytes]:
            parameter, place, holder = task
            if time.monotonic() > deadline:
                return None
            box = own_sample_box(parameter, holder, place)
            with contextlib.suppress(*UNREADABLE):
                return files.sample(parameter, holder, box)
            return None

        pending = [parameter for parameter in chosen if parameter.name in holders_of]
        for place in range(MOST_PLACES):
            tasks = ((parameter, place, holder) for parameter in pending for holder in holders_of[parameter.name])
            data = files.each(read, tasks)
            undecided = []
            for parameter in pending:
                samples = list(itertools.islice(data, len(holders_of[parameter.name])))
                if None in samples:
                    continue
                equal = _equal(parameter.item_size, holders_of[parameter.name], samples)
                if equal:
                    groups[parameter.name] = equal
                else:
                    undecided.append(parameter)
            pending = undecided
    same_slices: list[SameSlices] = []
    for parameter in chosen:
        first = next((group for group in groups.get(parameter.name, ()) if len(group) > 1), None)
        if first is not None:
            layout = stage_shardings(parameter)[0].layout
            is_whole = len(first) == len(holders_of[parameter.name]) and layout.slice_count == layout.shards
            same_slices.append(SameSlices(parameter.name, (first[0], first[1]), is_whole))
    return Distinctness(len(groups), same_slices)


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


def _equal(item_size: int, holders: list[Holder], samples: list[Optional[bytes]]) -> list[list[int]]:
    """Ranks grouped by equal samples; samples with too few different elements are skipped."""
    groups: dict[bytes, list[int]] = {}
    for holder, data in zip(holders, samples):
        assert data is not None
        elements = {data[at : at + item_size] for at in range(0, len(data), item_size)}
        if len(elements) >= _FEWEST_ELEMENTS:
            groups.setdefault(data, []).append(holder.rank)
    return list(groups.values())


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
        # Files with equal structure share their tensors.
        tensors = {id(step.indexes[rank].tensors): step.indexes[rank].tensors for rank in step.loaded(stage)}
        for names in tensors.values():
            foreign |= stored & names.keys() - stage.layouts.keys()
    return sorted(foreign) if len(foreign) > max(_FEW_TIED, len(stored) // 2) else []
