"""Where the elements of a tensor that rules make come from, worked out index by index.

Everything here follows from what `names.SizedOperation` says of its kinds in numbers, read backwards: for every
element of the last list of tensors, which element of the list before it is. It shares nothing with the views by
which a conversion is planned, so that a mistake there is not made here again.

Indices of a box are kept as vectors, one per dimension, as long as dimensions do not mix: the box is their outer
product. Where a reshape mixes some, their indices are written out for every combination.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Callable, NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.layout import Box
from reshard.names import SizedOperation

Indices = npt.NDArray[np.int64]
Shape = tuple[int, ...]


class Axis(NamedTuple):
    """Some elements, and where they are: one of the vectors of which a box is the outer product.

    Attributes:
        length: how many.
        there: per dimension of the tensor that they come from, the index of each; dimensions of no axis do not exist.
        here: per dimension of the box, the place of each, counted from where the box begins.
    """

    length: int
    there: Mapping[int, Indices]
    here: Mapping[int, Indices]

    def chosen(self, mask: npt.NDArray[np.bool_]) -> Axis:
        """Some of the elements."""
        there = {dimension: indices[mask] for dimension, indices in self.there.items()}
        here = {dimension: indices[mask] for dimension, indices in self.here.items()}
        return Axis(int(np.count_nonzero(mask)), there, here)


class Origin(NamedTuple):
    """Elements of a box that come from one tensor: the outer product of the axes.

    Attributes:
        tensor: its number in the list.
        axes: every dimension of it, and of the box, is in just one of them.
    """

    tensor: int
    axes: tuple[Axis, ...]

    def taken(self, dimension: int) -> tuple[int, Axis]:
        """The axis that has a dimension of the tensor, and its number."""
        return next((number, axis) for number, axis in enumerate(self.axes) if dimension in axis.there)

    def with_axis(self, number: int, axis: Axis, tensor: int) -> Origin:
        """The same with another axis, and of another tensor."""
        return Origin(tensor, (*self.axes[:number], axis, *self.axes[number + 1 :]))


def origins(operations: Sequence[SizedOperation], shapes: Sequence[Shape], number: int, box: Box) -> list[Origin]:
    """Where the elements of a box come from; those that come from nowhere are zero.

    Args:
        operations: what is done with a list of tensors, one after the other.
        shapes: of these tensors.
        number: of a tensor in the list that this makes.
        box: of its elements, at least one.
    """
    whole = (np.arange(start, stop, dtype=np.int64) for start, stop in box)
    axes = (
        Axis(len(indices), {dimension: indices}, {dimension: indices - indices[0]})
        for dimension, indices in enumerate(whole)
    )
    found = [Origin(number, tuple(axes))]
    lists = lists_of(tuple(operations), tuple(shapes))
    for operation, before, after in zip(reversed(operations), lists[-2::-1], lists[:0:-1]):
        found = [one for origin in found for one in _back(operation, before, after, origin)]
    return found


@lru_cache(maxsize=256)
def lists_of(operations: tuple[SizedOperation, ...], shapes: tuple[Shape, ...]) -> tuple[tuple[Shape, ...], ...]:
    """The shapes of the list that is there at the beginning, and of those after each operation."""
    lists = [shapes]
    for operation in operations:
        lists.append(tuple(_shapes_after(operation, lists[-1])))
    return tuple(lists)


def needed(operations: Sequence[SizedOperation], count: int, number: int, lists: Sequence[Sequence[Shape]]) -> set[int]:
    """Which of so many tensors a tensor may have elements of."""
    numbers = {number}
    for operation, before in zip(reversed(operations), lists[-2::-1]):
        numbers = {one for each in numbers for one in _tensors_before(operation, len(before), each)}
    assert all(0 <= each < count for each in numbers)
    return numbers


def _shapes_after(operation: SizedOperation, shapes: Sequence[Shape]) -> Iterator[Shape]:
    kind, dimension, count = operation.kind, operation.dimension, operation.count
    if kind == "join":
        each = len(shapes) // len(operation.sizes)
        for shape in shapes[:each]:
            yield (*shape[:dimension], operation.groups * sum(operation.sizes), *shape[dimension + 1 :])
    elif kind == "cut":
        for size in operation.sizes:
            for shape in shapes:
                yield (*shape[:dimension], operation.groups * size, *shape[dimension + 1 :])
    elif kind == "stack":
        for shape in shapes[::count]:
            yield (*shape[:dimension], count, *shape[dimension:])
    elif kind == "unstack":
        for shape in shapes:
            yield from [(*shape[:dimension], *shape[dimension + 1 :])] * count
    elif kind == "transpose":
        for shape in shapes:
            yield tuple(shape[each] for each in operation.order)
    elif kind == "reshape":
        yield from [operation.shape] * len(shapes)
    elif kind in ("pad", "unpad"):
        for shape in shapes:
            yield (*shape[:dimension], operation.sizes[1], *shape[dimension + 1 :])
    elif kind == "copy":
        yield from itertools.chain.from_iterable([shapes] * count)
    elif kind == "take":
        yield from shapes[: len(shapes) // count]
    else:
        raise AssertionError(f"{kind} is no operation")


def _tensors_before(operation: SizedOperation, count: int, number: int) -> Iterable[int]:
    """The tensors, of so many, that tensor ``number`` of the list after an operation may be made of."""
    kind = operation.kind
    if kind == "join":
        return range(number, count, count // len(operation.sizes))
    if kind == "stack":
        return range(number * operation.count, (number + 1) * operation.count)
    if kind == "unstack":
        return [number // operation.count]
    return [number % count]


def _back(
    operation: SizedOperation, before: Sequence[Shape], after: Sequence[Shape], origin: Origin
) -> Iterator[Origin]:
    """From elements of a tensor after an operation to those of the tensors before it."""
    kind, dimension, sizes, number = operation.kind, operation.dimension, operation.sizes, origin.tensor
    if kind == "join":
        at, axis = origin.taken(dimension)
        group, rest = np.divmod(axis.there[dimension], sum(sizes))
        first = 0
        for column, size in enumerate(sizes):
            mask = (rest >= first) & (rest < first + size)
            if mask.any():
                indices = group * size + rest - first
                moved = axis._replace(there={**axis.there, dimension: indices}).chosen(mask)
                yield origin.with_axis(at, moved, number + column * (len(before) // len(sizes)))
            first += size
    elif kind == "cut":
        column, tensor = divmod(number, len(before))
        at, axis = origin.taken(dimension)
        group, rest = np.divmod(axis.there[dimension], sizes[column])
        indices = group * sum(sizes) + sum(sizes[:column]) + rest
        yield origin.with_axis(at, axis._replace(there={**axis.there, dimension: indices}), tensor)
    elif kind == "stack":
        at, axis = origin.taken(dimension)
        for value in np.unique(axis.there[dimension]).tolist():
            some = axis.chosen(axis.there[dimension] == value)
            without = {each: indices for each, indices in some.there.items() if each != dimension}
            found = origin.with_axis(at, some._replace(there=without), number * operation.count + value)
            yield _renumbered(found, lambda each: each - 1 if each > dimension else each)
    elif kind == "unstack":
        tensor, value = divmod(number, operation.count)
        moved_up = _renumbered(origin, lambda each: each + 1 if each >= dimension else each)
        yield Origin(tensor, (*moved_up.axes, Axis(1, {dimension: np.array([value])}, {})))
    elif kind == "transpose":
        yield _renumbered(origin, lambda each: operation.order[each])
    elif kind == "reshape":
        yield _reshaped(origin, before[number], after[number])
    elif kind == "pad":
        at, axis = origin.taken(dimension)
        mask = axis.there[dimension] < sizes[0]
        if mask.any():
            yield origin.with_axis(at, axis.chosen(mask), number)
    elif kind == "copy":
        yield origin._replace(tensor=number % len(before))
    else:
        # unpad and take: what stays is where it was.
        yield origin


def _renumbered(origin: Origin, to: Callable[[int], int]) -> Origin:
    """The same elements of a tensor whose dimensions have other numbers."""
    axes = (axis._replace(there={to(each): indices for each, indices in axis.there.items()}) for axis in origin.axes)
    return origin._replace(axes=tuple(axes))


def _reshaped(origin: Origin, before: Shape, after: Shape) -> Origin:
    """Elements of a tensor of shape ``after`` as those of the same tensor in shape ``before``, in C order."""
    axes = list(origin.axes)
    # What is done has negative numbers until all is.
    for old, new in _groups(before, after):
        mixed = [axis for axis in axes if any(each in axis.there for each in new)]
        axes = [axis for axis in axes if all(axis is not other for other in mixed)]
        joined = _outer(mixed)
        flat = np.zeros(joined.length, np.int64)
        for each in new:
            flat = flat * after[each] + joined.there[each]
        there = {each: indices for each, indices in joined.there.items() if each not in new}
        for each in reversed(old):
            flat, there[-1 - each] = np.divmod(flat, before[each])
        axes.append(joined._replace(there=there))
    return _renumbered(Origin(origin.tensor, tuple(axes)), lambda each: -1 - each)


def _groups(before: Shape, after: Shape) -> list[tuple[range, range]]:
    """The fewest dimensions of both shapes that are the same elements, from the first on."""
    found = []
    old = new = 0
    while old < len(before) or new < len(after):
        first_old, first_new = old, new
        here = there = 1
        while True:
            if here <= there and old < len(before) and (here < there or old == first_old):
                here *= before[old]
                old += 1
            elif there <= here and new < len(after) and (there < here or new == first_new):
                there *= after[new]
                new += 1
            elif here == there:
                break
            else:
                raise AssertionError(f"{before} and {after} have not as many elements")
        found.append((range(first_old, old), range(first_new, new)))
    return found


def _outer(axes: Sequence[Axis]) -> Axis:
    """Several axes as one: every combination of their elements."""
    length = math.prod(axis.length for axis in axes)
    there: dict[int, Indices] = {}
    here: dict[int, Indices] = {}
    inner = length
    for axis in axes:
        inner //= axis.length
        for mine, all_of_them in ((axis.there, there), (axis.here, here)):
            for dimension, indices in mine.items():
                all_of_them[dimension] = np.tile(np.repeat(indices, inner), length // (inner * axis.length))
    return Axis(length, there, here)
