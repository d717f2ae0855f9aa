"""Where the slices of a tensor lie, by a rule and sizes: device matrix and tensor map as a compile records them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from reshard.layout import Layout
from reshard.strategies.model import RecordedLayout
from reshard.strategies.rules.model import Cut, Matrix
from reshard.strategies.rules.sizes import NoReadingError, Product, Sizes
from reshard.text.products import ExpressionError

# What repeats over these is written as one axis, since operators do not tell samples from parts of a sequence.
_SAMPLES = frozenset(("dp", "cp"))

Strided = tuple[int, int]
"""A cut over neighbouring devices: the rank's part is ``rank // stride % size``."""


class Axis(NamedTuple):
    """One axis of a device matrix: what it is in words, and its size."""

    name: str
    size: int


@dataclass(frozen=True)
class Placement:
    """How a tensor is cut over the devices of a stage, before optimizer sharding.

    Attributes:
        axes: the device matrix, slowest axis first.
        tensor_map: per dimension the axes it is split over, counted from the right, most significant first.
        nested: whether the file has a map per dimension.
        split_sizes: sizes of dimension 0's slices where it is split by hand.
    """

    axes: tuple[Axis, ...]
    tensor_map: tuple[tuple[int, ...], ...]
    nested: bool = False
    split_sizes: tuple[int, ...] = ()

    @property
    def device_matrix(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(axis.size for axis in self.axes)

    @cached_property
    def layout(self) -> Layout:
        """The same as the layout algebra has it."""
        return Layout(self.device_matrix, self.tensor_map, uneven=self.split_sizes or None)

    def recorded(self, shard_step: int = 0, shard_size: int = 0) -> RecordedLayout:
        """The record of a strategy file."""
        if self.nested:
            maps = tuple(axes or (-1,) for axes in self.tensor_map)
        else:
            maps = (tuple(axes[0] if axes else -1 for axes in self.tensor_map),)
        offsets = tuple(sum(self.split_sizes[:index]) for index in range(len(self.split_sizes)))
        return RecordedLayout(
            self.device_matrix,
            maps,
            self.nested,
            shard_step=shard_step,
            shard_size=shard_size,
            split_sizes=self.split_sizes,
            split_offsets=offsets,
        )


def place(
    matrix: Matrix, cuts: Sequence[Cut], shape: Sequence[int], sizes: Sizes, nested: bool, split_sizes: Sequence[int]
) -> Placement:
    """Cut a tensor.

    Args:
        matrix: the axes of the device matrix, slowest first.
        cuts: one per dimension.
        shape: the full tensor's.
        sizes: of the axes.
        nested: written in the nested form.
        split_sizes: sizes of dimension 0's slices where it is split by hand.

    Raises:
        ExpressionError: the matrix is not the stage's devices, a cut is over no axes of it, two are over the same,
            or a dimension does not divide.
    """
    counts = [axis.whole(sizes) for axis in matrix]
    if math.prod(counts) != sizes.stage_devices:
        names = " x ".join(f"{axis.text} ({count})" for axis, count in zip(matrix, counts))
        raise ExpressionError(f"matrix {names} is not the {sizes.stage_devices} devices of a stage")
    grid = _Grid(matrix, counts)
    for dimension, cut in enumerate(cuts):
        size = shape[dimension]
        slices = _slices(cut, sizes)
        if slices == 1 and not nested:
            continue
        if split_sizes and dimension == 0:
            if len(split_sizes) != slices or sum(split_sizes) != size:
                raise ExpressionError(f"split_sizes are not {slices} slices that add up to {size}, dimension 0")
        elif size % slices:
            if cut.where_divides:
                continue
            raise ExpressionError(f"dimension {dimension} of size {size} does not divide by {cut.text} = {slices}")
        if len(cut.factors) > 1 and not nested:
            axes = " and ".join(factor.text for factor in cut.factors)
            raise ExpressionError(
                f"dimension {dimension} is cut by {axes}, which only the nested form records: nested = true"
            )
        for factor in cut.factors:
            grid.take(dimension, factor, min(factor.whole(sizes), cut.most or slices))
    return grid.placement(len(shape), nested, tuple(split_sizes))


def strided_cuts(layout: Layout) -> tuple[tuple[Strided, ...], ...]:
    """Per dimension what it is cut over, most significant first; neighbouring axes as one, none where it is whole.

    Layouts that have these in common put the same slices on the same devices, whatever their device matrices.
    """
    sizes = layout.device_matrix[::-1]
    found = []
    for axes in layout.tensor_map:
        cuts: list[Strided] = []
        for axis in axes:
            stride, size = math.prod(sizes[:axis]), sizes[axis]
            if size == 1:
                continue
            if cuts and cuts[-1][0] == stride * size:
                cuts[-1] = (stride, cuts[-1][1] * size)
            else:
                cuts.append((stride, size))
        found.append(tuple(cuts))
    return tuple(found)


def run_of(matrix: Matrix, factor: Product) -> tuple[int, int]:
    """First and behind the last of the neighbouring axes that together are a factor.

    Raises:
        NoReadingError: there are none.
    """
    for start in range(len(matrix)):
        found = matrix[start]
        for stop in range(start + 1, len(matrix) + 1):
            if found == factor:
                return start, stop
            if stop < len(matrix):
                found = found * matrix[stop]
    axes = ", ".join(axis.text for axis in matrix)
    raise NoReadingError(f"{factor.text} is no axis of the matrix [{axes}], nor several that lie side by side")


def _slices(cut: Cut, sizes: Sizes) -> int:
    count = math.prod(factor.whole(sizes) for factor in cut.factors)
    if cut.most is None or count <= cut.most:
        return count
    if count % cut.most:
        raise ExpressionError(f"{cut.text}: {count} does not divide by {cut.most}")
    return cut.most


class _Grid:
    """The axes of a matrix, and what each cuts."""

    def __init__(self, matrix: Matrix, counts: Sequence[int]) -> None:
        self._matrix = matrix
        self._counts = counts
        # First and behind the last axis of a run: dimension, its order there, and slices.
        self._runs: dict[tuple[int, int], tuple[int, int]] = {}
        self._cut_by: dict[int, list[tuple[int, int]]] = {}

    def take(self, dimension: int, factor: Product, slices: int) -> None:
        """Cut a dimension over neighbouring axes."""
        run = run_of(self._matrix, factor)
        for start, stop in self._runs:
            if run[0] < stop and start < run[1]:
                raise NoReadingError(f"{factor.text} cuts two dimensions")
        self._runs[run] = (dimension, slices)
        self._cut_by.setdefault(dimension, []).append(run)

    def placement(self, dimensions: int, nested: bool, split_sizes: tuple[int, ...]) -> Placement:
        axes: list[Axis] = []
        # Positions of a run's axes, most significant first.
        places: dict[tuple[int, int], list[int]] = {}
        samples = False
        position = 0
        while position < len(self._matrix):
            run = next((run for run in self._runs if run[0] == position), None)
            if run is None:
                axis, count = self._matrix[position], self._counts[position]
                joins = _SAMPLES.issuperset(axis.names) and bool(axis.names)
                if count > 1 or nested:
                    if samples and joins and not nested:
                        axes[-1] = Axis(f"{axes[-1].name}*{axis.text}", axes[-1].size * count)
                    else:
                        axes.append(Axis(axis.text, count))
                    samples = joins
                position += 1
                continue
            samples = False
            places[run] = self._add_run(axes, run, nested)
            position = run[1]
        if not axes:
            return Placement((Axis("dp", 1),), ((),) * dimensions, nested, split_sizes)
        tensor_map = tuple(
            tuple(len(axes) - 1 - place for run in self._cut_by.get(dimension, ()) for place in places[run])
            for dimension in range(dimensions)
        )
        return Placement(tuple(axes), tensor_map, nested, split_sizes)

    def _add_run(self, axes: list[Axis], run: tuple[int, int], nested: bool) -> list[int]:
        """Add the axes of a cut; the positions of those that cut."""
        counts = self._counts[run[0] : run[1]]
        names = [axis.text for axis in self._matrix[run[0] : run[1]]]
        whole, slices = math.prod(counts), self._runs[run][1]
        name = "*".join(names)
        if slices < whole:
            # What an operator is too narrow for repeats innermost.
            axes += [Axis(f"min({name},{slices})", slices), Axis(f"{name}/{slices}", whole // slices)]
            return [len(axes) - 2]
        if not nested:
            axes.append(Axis(name, whole))
            return [len(axes) - 1]
        first = len(axes)
        axes += [Axis(name, count) for name, count in zip(names, counts)]
        return list(range(first, len(axes)))
