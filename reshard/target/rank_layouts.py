"""Layouts as Checkpoint 2.0 says them: every cut is an axis of the device matrix, optimizer shards too."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from reshard.errors import LayoutError
from reshard.layout import Layout


class PlainLayout(NamedTuple):
    """A layout of a device matrix and a tensor map alone.

    Attributes:
        device_matrix: sizes of the axes, slowest first; at least one.
        tensor_map: per dimension the axes that it is split over, counted from the right, most significant first.
    """

    device_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]


def plain_layout(layout: Layout) -> PlainLayout:
    """Say optimizer shards as axes.

    Shards go round among the ranks that hold the same slice, in ascending order: so they lie along the
    fastest of the axes that the tensor is not split over, of which the last one taken may have to be divided.

    Raises:
        LayoutError: no device matrix says the same.
    """
    if layout.uneven is not None:
        raise LayoutError("a table split by hand cannot be said by a device matrix and a tensor map")
    # From the right: sizes of axes, and which of them each dimension is split over.
    sizes = list(reversed(layout.device_matrix)) or [1]
    dimensions = [list(axes) for axes in layout.tensor_map]
    if layout.shards > 1:
        mapped = {axis for axes in dimensions for axis in axes}
        left = layout.shards
        taken: list[int] = []
        axis = 0
        while left > 1 and axis < len(sizes):
            if axis in mapped or sizes[axis] == 1:
                axis += 1
                continue
            common = math.gcd(sizes[axis], left)
            if common < min(sizes[axis], left):
                break
            if sizes[axis] > common:
                # Its faster part is taken; all axes to the left count one more.
                sizes[axis : axis + 1] = [common, sizes[axis] // common]
                dimensions = [[a + (a > axis) for a in axes] for axes in dimensions]
                mapped = {a + (a > axis) for a in mapped}
            taken.append(axis)
            left //= common
            axis += 1
        dimensions[0] += reversed(taken)
    plain = PlainLayout(tuple(reversed(sizes)), tuple(map(tuple, dimensions)))
    same = Layout(plain.device_matrix, plain.tensor_map)
    if same.cuts != layout.cuts or not np.array_equal(same.slice_of_rank, layout.slice_of_rank):
        raise LayoutError(
            f"{layout.shards} optimizer shards over device matrix {list(layout.device_matrix)} and tensor map "
            f"{layout.map_text} cannot be said by a device matrix and a tensor map alone"
        )
    return plain
