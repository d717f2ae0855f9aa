"""The layout of one parameter over the devices of one pipeline stage.

A stage's devices form a row-major grid, the *device matrix*. The *tensor map* lists, per tensor
dimension, the axes of that grid that split the dimension; *optimizer sharding* cuts the
resulting slice once more along dimension 0 among the ranks that hold the same slice.

Ranks are local ranks of the stage, ``0 .. device_count - 1``. Axes are counted from the **right** as
MindSpore counts them, and a dimension split over several axes lists the most significant axis first.

A slice is always a box: one cut per dimension. `Layout.cuts` gives the slices per dimension,
`Layout.slice_of_rank` the slice of each rank, and `Layout.grid` their places in a tensor of a given shape.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from reshard.errors import LayoutError
from reshard.layout.grid import Box, Grid, place_of
from reshard.text.messages import some_numbers
from reshard.threads import cached_property


@dataclass(frozen=True)
class Layout:
    """The layout of one parameter in one stage.

    Attributes:
        device_matrix: sizes of the device grid's axes, slowest first; empty means one device.
        tensor_map: per tensor dimension the axes it is split over, counted from the right, most
            significant first; an empty tuple is a dimension that is not split.
        shard_size: optimizer shards per shard group; 0 is none, -1 the whole replica group.
        shard_step: the recorded distance of a shard group's members; only checked, and only if it is unambiguous.
            0 is not checked.
        uneven: sizes of dimension 0's slices of a table that is split by hand, else None.
        recorded_shape: full shape as recorded (JSON only), one entry per entry of ``tensor_map``.
        expandable: True if ``tensor_map`` may be the JSON writer's expanded form, with one entry per axis of a
            dimension that is split over several axes.

    Raises:
        LayoutError: the layout contradicts itself.
    """

    device_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]
    shard_size: int = 0
    shard_step: int = 0
    uneven: tuple[int, ...] | None = None
    recorded_shape: tuple[int, ...] | None = None
    expandable: bool = False

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.device_matrix):
            raise LayoutError(f"device matrix {list(self.device_matrix)} has an axis smaller than 1")
        axes = [axis for dimension in self.tensor_map for axis in dimension]
        for axis in axes:
            if not 0 <= axis < len(self.device_matrix):
                raise LayoutError(
                    f"tensor map {self.map_text} uses axis {axis}, but the device matrix "
                    f"{list(self.device_matrix)} has axes 0 to {len(self.device_matrix) - 1}"
                )
        if len(set(axes)) != len(axes):
            raise LayoutError(f"tensor map {self.map_text} uses an axis twice")
        if self.uneven is not None and (not self.tensor_map or len(self.uneven) != self.tensor_cuts[0]):
            raise LayoutError(
                f"a table split by hand into {len(self.uneven)} slices cannot be laid out by device matrix "
                f"{list(self.device_matrix)} and tensor map {self.map_text}"
            )
        if self.recorded_shape is not None and len(self.recorded_shape) != len(self.tensor_map):
            raise LayoutError(
                f"tensor shape {list(self.recorded_shape)} and tensor map {self.map_text} differ in length"
            )
        self._check_shards()

    def _check_shards(self) -> None:
        if self.shard_size == 0:
            return
        if self.shard_size < -1:
            raise LayoutError(f"optimizer shard size {self.shard_size} is neither -1 nor a number of shards")
        if not self.tensor_map:
            raise LayoutError("a scalar cannot be cut into optimizer shards")
        group = self.replica_count
        if self.shard_size > 0 and group % self.shard_size:
            raise LayoutError(
                f"optimizer shard size {self.shard_size} does not divide the {group} ranks that hold the same "
                f"slice (device matrix {list(self.device_matrix)}, tensor map {self.map_text})"
            )
        if self.shards > 1 and self.uneven is not None:
            raise LayoutError("a table split by hand cannot be cut into optimizer shards as well")
        strides = self._repeated_strides()
        if self.shard_step and self.shards > 1 and len(strides) == 1 and strides[0] != self.shard_step:
            raise LayoutError(
                f"optimizer shard step {self.shard_step} contradicts device matrix {list(self.device_matrix)} and "
                f"tensor map {self.map_text}, whose replicas lie {strides[0]} apart"
            )

    def _repeated_strides(self) -> list[int]:
        """Distances between neighbours along the axes that the tensor is not split over (size 1 aside)."""
        mapped = {axis for dimension in self.tensor_map for axis in dimension}
        strides, stride = [], 1
        for axis, size in enumerate(reversed(self.device_matrix)):
            if size > 1 and axis not in mapped:
                strides.append(stride)
            stride *= size
        return strides

    @property
    def map_text(self) -> str:
        """The tensor map as MindSpore writes it: -1 for a whole dimension, lists for several axes."""
        entries = [
            "-1" if not axes else str(axes[0]) if len(axes) == 1 else str(list(axes)) for axes in self.tensor_map
        ]
        return f"[{', '.join(entries)}]"

    @property
    def is_single(self) -> bool:
        """Whether the full tensor is known to have no more than one element."""
        shape = self.recorded_shape if self.tensor_map else ()
        return shape is not None and math.prod(shape) <= 1

    @cached_property
    def device_count(self) -> int:
        return math.prod(self.device_matrix)

    @cached_property
    def tensor_cuts(self) -> tuple[int, ...]:
        """Slices per dimension, without optimizer shards."""
        sizes = self.device_matrix[::-1]
        return tuple(math.prod(sizes[axis] for axis in axes) for axes in self.tensor_map)

    @cached_property
    def replica_count(self) -> int:
        """Ranks that hold the same slice, where optimizer shards are not distinguished."""
        return self.device_count // math.prod(self.tensor_cuts)

    @cached_property
    def shards(self) -> int:
        """Parts into which optimizer sharding cuts each slice; 1 where there is none."""
        if self.shard_size == 0:
            return 1
        return self.replica_count if self.shard_size == -1 else self.shard_size

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Slices per dimension, optimizer shards included."""
        if self.shards == 1:
            return self.tensor_cuts
        return (self.tensor_cuts[0] * self.shards, *self.tensor_cuts[1:])

    @cached_property
    def slice_count(self) -> int:
        return math.prod(self.cuts)

    @property
    def copies(self) -> int:
        return self.device_count // self.slice_count

    @cached_property
    def slice_of_rank(self) -> Sequence[int]:
        """The slice of every local rank; slices are numbered in C order of `cuts`."""
        if self.shards == 1:
            return self._tensor_slices
        # The position of a replica within its shard group is the number of its shard; replicas are in ascending order.
        replicas = [0] * (self.slice_count // self.shards)
        rows = math.prod(self.tensor_cuts[1:])
        slices = []
        for number in self._tensor_slices:
            slices.append((number // rows * self.shards + replicas[number] % self.shards) * rows + number % rows)
            replicas[number] += 1
        return slices

    @cached_property
    def _tensor_slices(self) -> Sequence[int]:
        # Between neighbours along an axis of the device matrix, the number of the slice grows by its step.
        steps = [0] * len(self.device_matrix)
        step = 1
        for axis in reversed([axis for axes in self.tensor_map for axis in axes]):
            steps[axis] = step
            step *= self.device_matrix[-1 - axis]
        slices = [0]
        for size, step in zip(self.device_matrix, reversed(steps)):
            slices = [number + place * step for number in slices for place in range(size)]
        return slices

    @cached_property
    def _ranks_by_slice(self) -> Sequence[Sequence[int]]:
        ranks: list[list[int]] = [[] for _ in range(self.slice_count)]
        for rank, number in enumerate(self.slice_of_rank):
            ranks[number].append(rank)
        return ranks

    def holders(self, slice_number: int) -> Sequence[int]:
        """Local ranks that hold a slice, ascending."""
        return self._ranks_by_slice[slice_number]

    def is_empty_by_hand(self, local_rank: int) -> bool:
        """Whether the table is split by hand and a local rank's slice has no rows."""
        if self.uneven is None:
            return False
        return not self.uneven[self.slice_index(self.slice_of_rank[local_rank])[0]]

    def slice_index(self, slice_number: int) -> tuple[int, ...]:
        return place_of(slice_number, self.cuts)

    def boundaries(self, dimension: int, size: int) -> tuple[int, ...]:
        """The edges of slices in a dimension of ``size`` elements: ``cuts[dimension] + 1`` ascending positions.

        Raises:
            LayoutError: the dimension does not divide by its slices.
        """
        if dimension == 0 and self.uneven is not None:
            return self._uneven_edges(size)
        part = self._part(dimension, size)
        return tuple(part * position for position in range(self.cuts[dimension] + 1))

    def check_size(self, dimension: int, size: int) -> None:
        """Check that a dimension of ``size`` elements divides by its slices.

        Raises:
            LayoutError: it does not divide by its slices.
        """
        self.interval(dimension, size, 0)

    def interval(self, dimension: int, size: int, position: int) -> tuple[int, int]:
        """Start and stop of one slice of a dimension of ``size`` elements.

        Raises:
            LayoutError: the dimension does not divide by its slices.
        """
        if dimension == 0 and self.uneven is not None:
            edges = self._uneven_edges(size)
            return edges[position], edges[position + 1]
        part = self._part(dimension, size)
        return part * position, part * (position + 1)

    def _part(self, dimension: int, size: int) -> int:
        count = self.cuts[dimension]
        if size % count:
            raise LayoutError(f"dimension {dimension} of size {size} does not divide into {count} slices")
        return size // count

    def _uneven_edges(self, size: int) -> tuple[int, ...]:
        edges = self._edges_by_hand
        if edges[-1] != size:
            sizes = some_numbers(self.uneven or ())
            raise LayoutError(f"slices {sizes} of dimension 0 do not add up to its size {size}")
        return edges

    @cached_property
    def _edges_by_hand(self) -> tuple[int, ...]:
        return (0, *itertools.accumulate(self.uneven or ()))

    def grid(self, shape: tuple[int, ...]) -> Grid:
        """The grid of a tensor of ``shape``.

        Raises:
            LayoutError: the tensor has another number of dimensions, or one does not divide by its slices.
        """
        if len(shape) != len(self.cuts):
            raise LayoutError(
                f"tensor map {self.map_text} lays out {len(self.cuts)} dimensions, but the tensor has "
                f"shape {list(shape)}"
            )
        return Grid(tuple(self.boundaries(dimension, size) for dimension, size in enumerate(shape)))

    def slice_box(self, shape: tuple[int, ...], slice_number: int) -> Box:
        return tuple(
            self.interval(dimension, shape[dimension], position)
            for dimension, position in enumerate(self.slice_index(slice_number))
        )

    def full_shape(self, slice_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the full tensor with slices of ``slice_shape``.

        Raises:
            LayoutError: the slice has another number of dimensions than the layout.
        """
        if len(slice_shape) != len(self.cuts):
            raise LayoutError(
                f"a tensor of shape {list(slice_shape)} has {len(slice_shape)} dimensions, but tensor map "
                f"{self.map_text} lays out {len(self.cuts)}"
            )
        shape = [size * count for size, count in zip(slice_shape, self.cuts)]
        if self.uneven is not None:
            shape[0] = sum(self.uneven)
        return tuple(shape)

    def without_shards(self) -> Layout:
        return replace(self, shard_size=0, shard_step=0)

    def regroupings(self) -> list[Layout]:
        """Every layout that the JSON writer may have expanded to this one, this one first.

        An expanded dimension has one entry per axis: all but its last entry have the size of their axis. Separate
        dimensions may have these sizes, too, so the tensor's number of dimensions must decide.
        """
        if not self.expandable or self.recorded_shape is None:
            return [self]
        sizes = self.device_matrix[::-1]
        # Per partial result the groups of entries so far.
        partial: list[list[list[int]]] = [[]]
        for entry, axes in enumerate(self.tensor_map):
            joins = (
                entry > 0
                and bool(axes)
                and bool(self.tensor_map[entry - 1])
                and self.recorded_shape[entry - 1] == math.prod(sizes[axis] for axis in self.tensor_map[entry - 1])
            )
            grown = [[*groups, [entry]] for groups in partial]
            if joins:
                grown += [[*groups[:-1], [*groups[-1], entry]] for groups in partial]
            partial = grown
        result = []
        for groups in partial:
            try:
                result.append(self._regrouped(groups))
            except LayoutError:
                continue
        return result

    def _regrouped(self, groups: list[list[int]]) -> Layout:
        assert self.recorded_shape is not None
        shape = tuple(math.prod(self.recorded_shape[entry] for entry in group) for group in groups)
        regrouped = replace(
            self,
            tensor_map=tuple(tuple(axis for entry in group for axis in self.tensor_map[entry]) for group in groups),
            recorded_shape=shape,
            expandable=False,
        )
        for dimension, size in enumerate(shape):
            regrouped.check_size(dimension, size)
        return regrouped


@lru_cache(maxsize=64)
def whole(dimensions: int) -> Layout:
    """The layout of an unsharded tensor on one device."""
    return Layout((), ((),) * dimensions)


def stand_in_shape(sources: Sequence[Layout], target: Layout) -> tuple[int, ...]:
    """The smallest shape that all layouts divide evenly, for planning without files.

    Even cuts overlap in the same way for every size, so a tensor of this shape needs the same source slices as the
    real one, whose shape strategy files may not contain.

    Raises:
        LayoutError: the layouts have different numbers of dimensions.
    """
    dimensions = {len(layout.cuts) for layout in (*sources, target)}
    if len(dimensions) > 1:
        maps = ", ".join(layout.map_text for layout in (*sources, target))
        raise LayoutError(f"tensor maps {maps} lay out different numbers of dimensions")
    shape = []
    for dimension in range(len(target.cuts)):
        by_hand = [sum(layout.uneven) for layout in (*sources, target) if dimension == 0 and layout.uneven is not None]
        even = math.lcm(*(layout.cuts[dimension] for layout in (*sources, target)))
        shape.append(by_hand[0] if by_hand else even)
    return tuple(shape)
