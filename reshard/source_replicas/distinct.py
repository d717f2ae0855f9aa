"""Whether ranks that should hold different slices of a parameter do.

A strategy that cuts finer than the true one passes every comparison of replicas, since it has fewer of them or none.
But what it takes for different slices are replicas then. Slices of a trained weight are never equal, unless they have
few different elements, which says nothing: all may be zero, and a few bits agree by chance. So of every kind of
parameter some are compared at the same place, as many places apart as divide the number of slices: a true device
matrix that is coarser repeats them so.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.errors import DamagedCheckpointError, RetryableError
from reshard.execute import ExecutionOptions
from reshard.forms.ranks.checkpoint import SourceStep
from reshard.forms.ranks.holding import stage_shardings
from reshard.layout import shape_of, volume_of
from reshard.source_replicas.choice import Group, Holder, Replicated, alike, number_of
from reshard.source_replicas.files import Each, ReplicaFiles, at_a_time
from reshard.source_replicas.samples import MOST_PLACES, sample_box

_MOST_OF_A_KIND = 2
_FEW_SLICES = 16
# Different elements of a slice that no other one has by chance.
_FEWEST_ELEMENTS = 8
# Parameters that are whole where they should be cut, as no accident makes them.
_SEVERAL = 2
_SECONDS = 2.0


class SameSlices(NamedTuple):
    """A parameter of which ranks hold the same where they should hold different slices.

    Attributes:
        parameter: its name.
        ranks: two such ranks.
        is_whole: whether all ranks that were compared hold the same, and by the strategy only optimizer shards: each
            of them holds the parameter whole, as far as that tells.
    """

    parameter: str
    ranks: tuple[int, int]
    is_whole: bool


class Distinctness(NamedTuple):
    """What came of comparing slices that should differ.

    Attributes:
        compared: parameters of which slices were compared that tell something.
        same: those of them of which some are equal.
    """

    compared: int
    same: list[SameSlices]

    @property
    def speaks_against(self) -> bool:
        """Whether most are equal, or several are whole: the layouts cut finer than the files are.

        A few may be copies on purpose, such as heads of keys that are repeated for tensor parallelism.
        """
        whole = sum(same.is_whole for same in self.same)
        return 2 * len(self.same) > self.compared or whole >= _SEVERAL


def compare_slices(
    parameters: Iterable[GlobalTensor], step: SourceStep, handles: FileHandles, execution: ExecutionOptions
) -> Distinctness:
    """Compare slices that should differ; what cannot be read is passed over.

    Args:
        parameters: what is compared, as read from the files.
        step: the files.
        handles: open files.
        execution: what they lie on.
    """
    files = ReplicaFiles(step, handles, execution.storage)
    deadline = time.monotonic() + _SECONDS
    chosen = [one for kind in alike(list(parameters), step) if kind.is_cut for one in kind.parameters[:_MOST_OF_A_KIND]]
    compared = 0
    same: list[SameSlices] = []
    with at_a_time(execution.storage.remote) as (compare_each, read_each):

        def equal(parameter: GlobalTensor) -> tuple[list[Holder], list[list[int]]]:
            if time.monotonic() > deadline:
                return [], []
            holders = _holders(parameter, step)
            try:
                return holders, _equal(parameter, holders, files, read_each) if len(holders) > 1 else []
            except (DamagedCheckpointError, RetryableError):
                return holders, []

        for parameter, (holders, groups) in zip(chosen, compare_each(equal, chosen)):
            compared += bool(groups)
            first = next((group for group in groups if len(group) > 1), None)
            if first is not None:
                layout = stage_shardings(parameter)[0].layout
                is_whole = len(first) == len(holders) and layout.slice_count == layout.shards
                same.append(SameSlices(parameter.name, (first[0], first[1]), is_whole))
    return Distinctness(compared, same)


def _holders(parameter: GlobalTensor, step: SourceStep) -> list[Holder]:
    """Of some slices of a stage that are of one shape and not empty, a rank that holds each."""
    sharding = stage_shardings(parameter)[0]
    held: dict[int, int] = {}
    for rank in sorted(step.ranks_with(parameter.name, sharding.stage)):
        held.setdefault(sharding.slice_of(rank), rank)
    count = sharding.grid.slice_count
    chosen = [number for number in sorted(held) if count <= _FEW_SLICES or number == 0 or count % number == 0]
    made = [Holder(held[number], sharding.grid.slice_box(number)) for number in chosen]
    return [holder for holder in made if volume_of(holder.box) and shape_of(holder.box) == shape_of(made[0].box)]


def _equal(parameter: GlobalTensor, holders: list[Holder], files: ReplicaFiles, read_each: Each) -> list[list[int]]:
    """Ranks, those together whose slices are equal; none where they have too few different elements to tell."""
    for place in range(MOST_PLACES):

        def read(holder: Holder, place: int = place) -> bytes:
            own = Replicated(holder.box, (Group((holder.rank,), (holder.rank,), holder.box),))
            box = sample_box(own, parameter, number_of(parameter.name, place))
            data = bytearray(volume_of(box) * parameter.item_size)
            files.read(parameter, holder, box, memoryview(data))
            return bytes(data)

        found: dict[bytes, list[int]] = {}
        for holder, data in zip(holders, read_each(read, holders)):
            elements = {data[at : at + parameter.item_size] for at in range(0, len(data), parameter.item_size)}
            if len(elements) >= _FEWEST_ELEMENTS:
                found.setdefault(data, []).append(holder.rank)
        if found:
            return list(found.values())
    return []
