"""Rules on whole arrays: views element by element, and steps in plain NumPy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.layout.views import ZEROS, View
from reshard.names import Applied, SizedOperation

Array = npt.NDArray[np.int64]
Shapes = Mapping[str, tuple[int, ...]]


def numbered(shapes: Shapes) -> dict[str, Array]:
    """Arrays whose elements are all different, and none of them zero."""
    actual, first = {}, 1
    for name, shape in shapes.items():
        count = math.prod(shape)
        actual[name] = np.arange(first, first + count).reshape(shape)
        first += count
    return actual


def elements(view: View, sources: Sequence[Array]) -> Array:
    """The elements of a view, each exactly once."""
    actual = np.full(view.shape, -1, np.int64)
    for region in view.regions:
        grid = np.indices([loop.length for loop in region.loops]).reshape(len(region.loops), region.volume)
        here = np.array(region.origin, np.int64)[:, None] + np.zeros((1, region.volume), np.int64)
        source_positions = np.array(region.source_origin, np.int64)[:, None] + np.zeros((1, region.volume), np.int64)
        for loop, index in zip(region.loops, grid):
            here[loop.dimension] += index * loop.step
            source_positions[loop.source_dimension] += index * loop.source_step
        assert (actual[tuple(here)] == -1).all()
        actual[tuple(here)] = 0 if region.source == ZEROS else sources[region.source][tuple(source_positions)]
    assert (actual != -1).all()
    return actual


class Made(NamedTuple):
    """A tensor that rules make: the tensors that it is made of, and its view of them."""

    sources: tuple[str, ...]
    view: View


def made_by(applied: Applied) -> dict[str, Made]:
    """All tensors that rules make."""
    return {name: Made(sources, view) for name, sources, view in applied.views()}


def arrays_of(applied: Applied, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Their elements."""
    made = made_by(applied)
    return {name: elements(each.view, [arrays[source] for source in each.sources]) for name, each in made.items()}


def redone(applied: Applied, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The same by the steps, without views."""
    contents: dict[str, Array] = {}
    for step in applied.steps:
        tensors: list[Any] = [arrays[name] for name in step.sources]
        for operation in step.operations:
            tensors = _done(operation, tensors)
        contents.update(zip(step.targets, tensors))
        assert len(tensors) == len(step.targets)
    return contents


def _done(operation: SizedOperation, tensors: list[Any]) -> list[Any]:
    dimension, sizes, count = operation.dimension, operation.sizes, operation.count
    if operation.kind == "join":
        each = len(tensors) // len(sizes)
        created = []
        for number in range(each):
            pieces = []
            for group in range(operation.groups):
                for size, tensor in zip(sizes, tensors[number::each]):
                    pieces.append(np.take(tensor, range(group * size, (group + 1) * size), dimension))
            created.append(np.concatenate(pieces, dimension))
        return created
    if operation.kind == "cut":
        created = []
        for column, size in enumerate(sizes):
            for tensor in tensors:
                first = sum(sizes[:column])
                rows = [group * sum(sizes) + first + row for group in range(operation.groups) for row in range(size)]
                created.append(np.take(tensor, rows, dimension))
        return created
    if operation.kind == "stack":
        return [np.stack(tensors[start : start + count], dimension) for start in range(0, len(tensors), count)]
    if operation.kind == "unstack":
        return [np.take(tensor, number, dimension) for tensor in tensors for number in range(count)]
    if operation.kind == "transpose":
        return [tensor.transpose(operation.order) for tensor in tensors]
    if operation.kind == "reshape":
        return [tensor.reshape(operation.shape) for tensor in tensors]
    if operation.kind == "pad":
        return [
            np.pad(tensor, [(0, sizes[1] - sizes[0] if each == dimension else 0) for each in range(tensor.ndim)])
            for tensor in tensors
        ]
    if operation.kind == "unpad":
        return [np.take(tensor, range(sizes[1]), dimension) for tensor in tensors]
    if operation.kind == "copy":
        return tensors * count
    assert operation.kind == "take"
    return tensors[: len(tensors) // count]


def assert_equal(one: Mapping[str, Array], other: Mapping[str, Array]) -> None:
    """The same names, shapes and elements."""
    assert sorted(one) == sorted(other)
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], name)
