"""The box of a tensor on each device, from the device matrix and the tensor map.

Written for proof alone, as plainly as possible: it shares no code with `reshard.layout`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from reshard.errors import LayoutError

Box = tuple[tuple[int, int], ...]
"""Per dimension the first element, and one past the last."""

Shape = tuple[int, ...]


class LayoutValues(NamedTuple):
    """The recorded values of a strategy's layout.

    Attributes:
        device_matrix: sizes of the axes of devices, slowest first.
        tensor_map: per dimension the axes that cut it, counted from the right, most significant first.
        shard_size: optimizer shards of a group of replicas; 0 for none, -1 for one per replica.
        uneven: sizes of the slices of dimension 0, if a table is split by hand.
        shape: full shape, if recorded; with one entry per entry of the map.
        expandable: whether several entries of the map may be one dimension.
    """

    device_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]
    shard_size: int = 0
    uneven: tuple[int, ...] | None = None
    shape: Shape | None = None
    expandable: bool = False

    @property
    def shards(self) -> int:
        """Optimizer shards of each slice."""
        sizes = self.device_matrix[::-1]
        replicas = math.prod(self.device_matrix)
        for axes in self.tensor_map:
            for axis in axes:
                replicas //= sizes[axis]
        return {0: 1, -1: replicas}.get(self.shard_size, self.shard_size)

    def unsharded(self) -> LayoutValues:
        """The same without optimizer shards."""
        return self._replace(shard_size=0)


def shape_of(box: Box) -> Shape:
    """Elements per dimension."""
    return tuple(stop - start for start, stop in box)


def volume_of(box: Box) -> int:
    """Elements."""
    return math.prod(stop - start for start, stop in box)


def whole_box(shape: Shape) -> Box:
    """The box of all elements."""
    return tuple((0, size) for size in shape)


def common(first: Box, second: Box) -> Box | None:
    """The common elements of two boxes; None without any."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second))
    return both if all(start < stop for start, stop in both) else None


def within(box: Box, around: Box) -> tuple[slice, ...]:
    """The index of a box in the array of a box around it."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, around))


@lru_cache(maxsize=64)
def device_boxes(layout: LayoutValues, shape: Shape) -> tuple[Box, ...] | None:
    """The box of each device in a tensor of this shape; None if the layout does not fit the shape."""
    for tensor_map in _maps(layout, shape):
        boxes = _plain_boxes(layout, tensor_map, shape)
        if boxes is not None:
            boxes = _sharded(boxes, layout.shards)
        if boxes is not None:
            # Equal boxes are one object, to save memory with many devices.
            distinct: dict[Box, Box] = {}
            return tuple(distinct.setdefault(box, box) for box in boxes)
    return None


def target_boxes(layout: LayoutValues, shape: Shape) -> tuple[Box, ...]:
    """The box of each device in a tensor of this shape.

    Raises:
        LayoutError: the layout does not fit the shape.
    """
    boxes = device_boxes(layout, shape)
    if boxes is None:
        raise LayoutError(
            f"device matrix {list(layout.device_matrix)} and tensor map {[list(axes) for axes in layout.tensor_map]} "
            f"do not lay out a tensor of shape {list(shape)}"
        )
    return boxes


def _maps(layout: LayoutValues, shape: Shape) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The tensor map with one entry per dimension, for every possible grouping of entries."""
    entries = layout.tensor_map
    if len(entries) == len(shape):
        if layout.shape in (None, shape):
            yield entries
        return
    if not layout.expandable or layout.shape is None or len(entries) < len(shape):
        return
    sizes = layout.device_matrix[::-1]
    for ends in itertools.combinations(range(1, len(entries)), len(shape) - 1):
        groups = [range(start, stop) for start, stop in zip((0, *ends), (*ends, len(entries)))]
        fits = all(math.prod(layout.shape[at] for at in group) == size for group, size in zip(groups, shape))
        # Every entry of a dimension but the last has the size of its axes.
        if fits and all(
            entries[at] and layout.shape[at] == math.prod(sizes[axis] for axis in entries[at])
            for group in groups
            for at in group[:-1]
        ):
            yield tuple(tuple(axis for at in group for axis in entries[at]) for group in groups)


def _plain_boxes(layout: LayoutValues, tensor_map: Sequence[Sequence[int]], shape: Shape) -> list[Box] | None:
    """The boxes without optimizer shards."""
    sizes = layout.device_matrix[::-1]
    uneven = layout.uneven or ()
    starts = [0, *itertools.accumulate(uneven)]
    boxes = []
    for device in range(math.prod(sizes)):
        # The device's place along every axis, the last axis first.
        places, remaining = [], device
        for size in sizes:
            places.append(remaining % size)
            remaining //= size
        box = []
        for dimension, axes in enumerate(tensor_map):
            slices, number = 1, 0
            for axis in axes:
                slices *= sizes[axis]
                number = number * sizes[axis] + places[axis]
            if dimension == 0 and layout.uneven is not None:
                if len(uneven) != slices or starts[-1] != shape[0]:
                    return None
                box.append((starts[number], starts[number + 1]))
                continue
            if shape[dimension] % slices:
                return None
            length = shape[dimension] // slices
            box.append((number * length, (number + 1) * length))
        boxes.append(tuple(box))
    return boxes


def _sharded(boxes: list[Box], shards: int) -> list[Box] | None:
    """Boxes, each cut along dimension 0 for their devices, in order."""
    if shards == 1:
        return boxes
    counts: dict[Box, int] = {}
    sharded = []
    for box in boxes:
        number = counts.get(box, 0) % shards
        counts[box] = counts.get(box, 0) + 1
        start, stop = box[0]
        if (stop - start) % shards:
            return None
        length = (stop - start) // shards
        sharded.append(((start + number * length, start + (number + 1) * length), *box[1:]))
    return sharded
