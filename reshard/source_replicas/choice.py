"""The bytes and ranks to compare. Files of forms without ranks count as ranks here.

Ranks with the same slice of a parameter by the strategy must hold equal bytes. A wrong strategy with the same number
of slices passes every comparison of shapes, but its replicas are not replicas in the files. Only some pairs of ranks
show it: a rank's place in the device matrix is its number in mixed radix, and the replicas of a group differ in the
digits of the axes that do not split the parameter. With any other device matrix, the digits that determine a slice
change along one of these axes, in steps of one or of a divisor of the group's size. So a *probe* compares the first
rank of a group with the ranks at these distances, and with the last: about ten ranks of a thousand. Further samples
compare any two ranks.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from reshard.checkpoints.checkpoint import Checkpoint, FileSharding, GlobalTensor
from reshard.layout import Box, Grid, Overlap, volume_of
from reshard.strategies import Holding
from reshard.text.names import ACCUMULATED_GRADIENTS, belongs_to_rank, is_weight
from reshard.threads import cached_property

# Maximum ranks of a group to compare.
_FEWEST_PROBED = 4


class HolderGroup(NamedTuple):
    """Ranks, ascending, that hold the same slice by one sharding; at least one of them is available."""

    ranks: tuple[int, ...]
    available: tuple[int, ...]
    box: Box

    def probed(self) -> list[int]:
        """The available ranks to compare, from the first on: they reveal a wrong device matrix."""
        count, start = len(self.ranks), self.ranks.index(self.available[0])
        steps = dict.fromkeys([0, *_divisors(count), count - 1])
        available = set(self.available)
        chosen = dict.fromkeys(
            rank for rank in (self.ranks[(start + step) % count] for step in steps) if rank in available
        )
        # Other ranks replace missing ones.
        most = max(_FEWEST_PROBED, len(steps))
        chosen.update(dict.fromkeys(self.available[:: -max(1, len(self.available) // most)]))
        return list(chosen)[:most]


Holder = tuple[int, Box]
"""A rank, and the box that it stores."""


class Replicated(NamedTuple):
    """A box of a parameter, in elements of the full tensor, that at least two available ranks hold.

    Several groups hold it if pipeline stages share the parameter.
    """

    box: Box
    groups: tuple[HolderGroup, ...]

    @property
    def slices(self) -> list[Box]:
        """The box of each group, around this one."""
        return [group.box for group in self.groups]

    @property
    def holders(self) -> list[Holder]:
        return [(rank, group.box) for group in self.groups for rank in group.available]

    def probe(self) -> list[Holder]:
        """The ranks to compare: they reveal a wrong device matrix."""
        return [(rank, group.box) for group in self.groups for rank in group.probed()]

    def pair(self, number: int) -> list[Holder]:
        """Two of the ranks, different ones for every number."""
        count = sum(len(group.available) for group in self.groups)
        first = number % count
        second = (first + 1 + number // count % (count - 1)) % count
        return [self._holder(first), self._holder(second)]

    def _holder(self, number: int) -> Holder:
        """One of `holders`; there may be thousands."""
        for group in self.groups:
            if number < len(group.available):
                return group.available[number], group.box
            number -= len(group.available)
        raise IndexError(number)


def run_in(box: Box, slices: Sequence[Box], most: int, number: int) -> Box:
    """A box of at most ``most`` elements in a box, contiguous in all slices, at a place that ``number`` gives.

    Args:
        slices: boxes around ``box``, as holders store them.
    """
    axis, count = _run_shape(box, slices, most)
    run = []
    for dimension, (start, stop) in enumerate(box):
        if dimension > axis:
            run.append((start, stop))
            continue
        length = count if dimension == axis else 1
        number, place = divmod(number, stop - start - length + 1)
        run.append((start + place, start + place + length))
    return tuple(run)


def runs_in(box: Box, slices: Sequence[Box], most: int) -> Iterator[Box]:
    """All of a box, in boxes of at most ``most`` elements that are contiguous in all slices; see `run_in`."""
    if not box:
        yield ()
        return
    axis, count = _run_shape(box, slices, most)
    start, stop = box[axis]
    for outer in itertools.product(*(range(low, high) for low, high in box[:axis])):
        fixed = tuple((place, place + 1) for place in outer)
        for first in range(start, stop, count):
            yield (*fixed, (first, min(first + count, stop)), *box[axis + 1 :])


def _run_shape(box: Box, slices: Sequence[Box], most: int) -> tuple[int, int]:
    """The outermost dimension with several elements of a contiguous run, and their number."""
    axis = len(box) - 1
    inner = 1
    while axis > 0 and all(each[axis] == box[axis] for each in slices):
        start, stop = box[axis]
        if inner * (stop - start) > most:
            break
        inner *= stop - start
        axis -= 1
    if axis < 0:
        return axis, 1
    start, stop = box[axis]
    return axis, max(1, min(stop - start, most // inner))


class ParameterGroup:
    """Parameters with the same cuts and the same available ranks, weights first.

    Attributes:
        is_cut: whether ranks hold parts of them; a parameter that is whole on every rank tests less of a strategy.
        structure: cuts and holders of all slices, which determine the ranks to probe.
    """

    def __init__(self, example: GlobalTensor, present: Sequence[frozenset[int]]) -> None:
        self.parameters: list[GlobalTensor] = []
        self._shardings = example.shardings
        self._present = present
        self.is_cut = any(sharding.grid.slice_count > 1 for sharding in self._shardings)
        self._holders = [
            [tuple(sharding.holders(number)) for number in range(sharding.grid.slice_count)]
            for sharding in self._shardings
        ]
        self.structure = tuple(
            (sharding.grid.cuts, tuple(holders)) for sharding, holders in zip(self._shardings, self._holders)
        )

    def __len__(self) -> int:
        """Number of boxes of each parameter that several available ranks hold."""
        return len(self._slices)

    def replicated(self, number: int) -> Replicated:
        """One of these boxes, by number."""
        boxes, groups = [], []
        for sharding, ranks_of, present, part in zip(
            self._shardings, self._holders, self._present, self._slices[number]
        ):
            boxes.append(sharding.grid.slice_box(part))
            available = tuple(rank for rank in ranks_of[part] if rank in present)
            if available:
                groups.append(HolderGroup(ranks_of[part], available, sharding.stored_box(part)))
        box = tuple((max(start for start, _ in cut), min(stop for _, stop in cut)) for cut in zip(*boxes))
        return Replicated(box, tuple(groups))

    @cached_property
    def _slices(self) -> list[tuple[int, ...]]:
        """Per box, its slice in every sharding."""
        grids = [sharding.grid for sharding in self._shardings]
        counts = [
            [sum(rank in present for rank in ranks) for ranks in holders]
            for holders, present in zip(self._holders, self._present)
        ]
        if not math.prod(grids[0].shape):
            return []
        if len(grids) > 1:
            parts = [cell.slices for cell in Overlap(grids, Grid.whole(grids[0].shape)).cells(0)]
        else:
            parts = [(number,) for number, count in enumerate(counts[0]) if count > 1]
            parts = [part for part in parts if volume_of(grids[0].slice_box(*part))]
        return [part for part in parts if sum(count[number] for count, number in zip(counts, part)) > 1]


def group_parameters(parameters: Collection[GlobalTensor], source: Checkpoint) -> list[ParameterGroup]:
    """Parameters grouped by layout and holders, most useful groups first; without values of single ranks."""
    groups: dict[object, ParameterGroup] = {}
    names = {parameter.name for parameter in parameters}
    for parameter in parameters:
        if belongs_to_rank(parameter.name):
            continue
        files = [sharding.present for sharding in parameter.shardings if isinstance(sharding, FileSharding)]
        present = tuple(files) or source.present(parameter)
        shardings = tuple(
            (sharding.stage.number, sharding.layout) if isinstance(sharding, Holding) else sharding
            for sharding in parameter.shardings
        )
        key = (parameter.shape, parameter.item_size, shardings, present, is_gradient(parameter.name))
        if key not in groups:
            groups[key] = ParameterGroup(parameter, present)
        groups[key].parameters.append(parameter)
    for group in groups.values():
        group.parameters.sort(key=lambda parameter: (not is_weight(parameter.name, names), number_of(parameter.name)))
    return sorted(
        groups.values(),
        key=lambda group: (not group.is_cut, not is_weight(group.parameters[0].name, names), group.parameters[0].name),
    )


def is_gradient(name: str) -> bool:
    """Whether a parameter is accumulated gradients, which may differ until they are reduced."""
    return name.startswith(ACCUMULATED_GRADIENTS)


def number_of(*words: object) -> int:
    """A hash of 64 bits, equal in every run."""
    data = repr(words).encode()
    return zlib.crc32(data) << 32 | zlib.crc32(data[::-1], 1)


def _divisors(count: int) -> list[int]:
    """The divisors, ascending, without ``count`` itself."""
    low = [number for number in range(1, math.isqrt(count) + 1) if count % number == 0]
    return sorted({*low, *(count // number for number in low)} - {count})
