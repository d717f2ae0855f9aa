"""Comparison of slices that should differ, and of stages that should hold their own parameters.

A strategy with finer cuts than the true strategy passes every comparison of replicas, because it has fewer replicas or
none. But then some of its different slices are replicas. Slices of a trained weight are never equal, unless they have
few different elements: all may be zero, and a few bits agree by chance. So some parameters of every layout are
compared, at the same place in slices whose distance divides the number of slices: with a coarser true device matrix,
the slices repeat at this distance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from reshard.checkpoints import FileHandles, files_alike
from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.errors import CheckpointError
from reshard.execute import ExecutionOptions
from reshard.forms.ranks.checkpoint import SourceStep, stage_shardings
from reshard.layout import shape_of, volume_of
from reshard.source_replicas.choice import Holder, group_parameters
from reshard.source_replicas.samples import MOST_PLACES, Contents, ReplicaFiles, Sample, own_sample
from reshard.strategies import Strategy
from reshard.text.messages import listing, plural, quoted

# Maximum number of tied parameters.
_FEW_TIED = 3
# Parameters of a layout to compare, and to try: all elements of some may be equal.
_MOST_COMPARED = 2
_MOST_TRIED = 4
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
    """

    parameter: str
    ranks: tuple[int, int]


@dataclass
class _Kind:
    """Samples of parameters of one layout, not yet read; and whether only optimizer shards cut them."""

    samples: list[Sample]
    by_shards: bool
    compared: int = 0


def same_slices(
    parameters: Iterable[GlobalTensor], step: SourceStep, handles: FileHandles, execution: ExecutionOptions
) -> tuple[list[SameSlices], int]:
    """Compare slices that should differ; unreadable slices are skipped.

    Args:
        parameters: the parameters, as read from the files.
        step: the files.
        handles: open files.
        execution: storage, threads and memory.

    Returns:
        The parameters with equal slices if they show that the strategy's cuts are too fine, and the number of compared
        parameters. They show it if they are the majority, or if several that only optimizer shards cut are whole on
        every rank. A few may be intentional copies, such as key heads repeated for tensor parallelism.
    """
    kinds = []
    for group in group_parameters(list(parameters), step):
        holders = _holders(group.parameters[0], step) if group.is_cut else []
        if len(holders) > 1:
            layout = stage_shardings(group.parameters[0])[0].layout
            tried = [own_sample(one, holders, n) for one in group.parameters[:_MOST_TRIED] for n in range(MOST_PLACES)]
            kinds.append(_Kind(tried, layout.slice_count == layout.shards))
    same: list[SameSlices] = []
    whole = 0
    with contextlib.closing(ReplicaFiles(step, handles, execution, _SECONDS)) as files:
        while pending := [kind for kind in kinds if kind.samples and kind.compared < _MOST_COMPARED]:
            for kind, found in zip(pending, files.contents([kind.samples[0] for kind in pending])):
                parameter, compared_ranks, _ = kind.samples.pop(0)
                groups = [ranks for data, ranks in found.items() if _is_varied(data, parameter.item_size)]
                if not groups or sum(map(len, found.values())) < len(compared_ranks):
                    continue
                kind.compared += 1
                kind.samples = [sample for sample in kind.samples if sample.parameter is not parameter]
                equal = next((ranks for ranks in groups if len(ranks) > 1), None)
                if equal is not None:
                    same.append(SameSlices(parameter.name, (equal[0], equal[1])))
                    whole += kind.by_shards and len(equal) == len(compared_ranks)
    compared = sum(kind.compared for kind in kinds)
    return (same if 2 * len(same) > compared or whole >= _SEVERAL else []), compared


def check_slices(
    source: Strategy,
    parameters: Iterable[GlobalTensor],
    step: SourceStep,
    handles: FileHandles,
    execution: ExecutionOptions,
) -> None:
    """Compare slices that should differ.

    Args:
        source: the strategy of the checkpoint.
        parameters: the parameters, as read from the files.
        step: the files.
        handles: open files.
        execution: storage, threads and memory.

    Raises:
        CheckpointError: ranks hold equal bytes where the strategy has different slices.
    """
    same, compared = same_slices(parameters, step, handles, execution)
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


def ranks_by_content(
    parameter: GlobalTensor, step: SourceStep, handles: FileHandles, execution: ExecutionOptions
) -> list[list[int]]:
    """Ranks of a parameter's first stage, or the first of many, in groups with equal samples."""
    sharding = stage_shardings(parameter)[0]
    ranks = sorted(step.ranks_with(parameter.name, sharding.stage))[:_MOST_GROUPED]
    holders = [Holder(rank, sharding.grid.slice_box(sharding.slice_of(rank))) for rank in ranks]
    found: Contents = {}
    with contextlib.closing(ReplicaFiles(step, handles, execution)) as files:
        for place in range(MOST_PLACES):
            (found,) = files.contents([own_sample(parameter, holders, place)])
            if len(found) > 1:
                break
    return list(found.values())


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


def check_stages(source: Strategy, step: SourceStep) -> None:
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
