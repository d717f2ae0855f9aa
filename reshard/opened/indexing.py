"""Indices of tensors, and their boxes to read.

Indices are NumPy's basic ones: integers, slices with any step, ``...`` and None. Along each dimension, an index
selects positions at equal distances. After reading, another index reverses or drops dimensions of the array.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
import numpy.typing as npt

from reshard.layout import Box, volume_of

Array = npt.NDArray[Any]


class ChosenAxis(NamedTuple):
    """The chosen positions of a dimension, ascending.

    Attributes:
        start: the first position.
        step: distance between positions, at least 1.
        length: number of positions.
    """

    start: int
    step: int
    length: int

    @property
    def span(self) -> tuple[int, int]:
        """The first position, and one past the last."""
        return self.start, self.start + ((self.length - 1) * self.step + 1 if self.length else 0)


class Selection(NamedTuple):
    """The elements of an index.

    Attributes:
        axes: the positions per dimension of the tensor.
        finish: an index into the array of these elements, which reverses and drops dimensions.
    """

    axes: tuple[ChosenAxis, ...]
    finish: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of chosen elements, before `finish`."""
        return tuple(axis.length for axis in self.axes)

    @property
    def finished_shape(self) -> tuple[int, ...]:
        """Shape of the array after `finish`."""
        stand_in = np.broadcast_to(np.zeros((), np.uint8), self.shape)
        return np.shape(stand_in[self.finish])

    @property
    def turned(self) -> tuple[slice, ...]:
        """The part of `finish` that reverses dimensions."""
        kept = (part for part in self.finish if part is not None and part is not Ellipsis)
        return tuple(part if isinstance(part, slice) else slice(None) for part in kept)

    def part(self, box: Box) -> Selection:
        """A box of the selection, counted in the finished order; its `finish` only reverses dimensions."""
        axes = []
        for (start, step, length), (low, high), turn in zip(self.axes, box, self.turned):
            first = length - high if turn.step == -1 else low
            axes.append(ChosenAxis(start + first * step, step, high - low))
        return Selection(tuple(axes), self.turned)


class BoxReading(NamedTuple):
    """A box to read, and the place of its elements.

    Attributes:
        box: in elements of the tensor.
        chosen: index into the array of the box; None if all elements go to ``out`` in order.
        out: index of these elements in the result.
    """

    box: Box
    chosen: Optional[tuple[slice, ...]]
    out: Array


def select(index: Any, shape: Sequence[int]) -> Selection:
    """The elements that an index selects.

    Args:
        index: the index.
        shape: the tensor's shape.

    Raises:
        IndexError: the index is not a basic one, or out of bounds.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    count = sum(part is not Ellipsis and part is not None for part in parts)
    ellipses = [place for place, part in enumerate(parts) if part is Ellipsis]
    if len(ellipses) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if count > len(shape):
        raise IndexError(f"too many indices: the tensor has {len(shape)} dimensions, but {count} were indexed")
    place = ellipses[0] if ellipses else len(parts)
    parts[place : place + 1] = [slice(None)] * (len(shape) - count)
    axes: list[ChosenAxis] = []
    finish: list[Any] = []
    for part in parts:
        finishing = None
        if part is not None:
            axis, finishing = _one(part, shape[len(axes)], len(axes))
            axes.append(axis)
        finish.append(finishing)
    # As in NumPy, an ellipsis makes the result an array, even if it has one element.
    return Selection(tuple(axes), (*finish, Ellipsis) if ellipses else tuple(finish))


def _one(part: Any, size: int, number: int) -> tuple[ChosenAxis, Any]:
    """The positions along one dimension, and its part of `Selection.finish`."""
    if isinstance(part, slice):
        start, stop, step = part.indices(size)
        count = len(range(start, stop, step))
        if not count:
            return ChosenAxis(0, 1, 0), slice(None)
        if step > 0:
            return ChosenAxis(start, step, count), slice(None)
        return ChosenAxis(start + (count - 1) * step, -step, count), slice(None, None, -1)
    if isinstance(part, (bool, np.bool_)):
        raise IndexError(_NO_INDEX)
    try:
        position = operator.index(part)
    except TypeError as error:
        raise IndexError(_NO_INDEX) from error
    if not -size <= position < size:
        raise IndexError(f"index {position} is out of bounds for axis {number} with size {size}")
    return ChosenAxis(position % size, 1, 1), 0


_NO_INDEX = "only integers, slices (`:`), ellipsis (`...`) and None are valid indices of a tensor that is read lazily"


def readings(
    selection: Selection, shape: Sequence[int], item_size: int, out: Array, most: int, skip: int
) -> Iterator[BoxReading]:
    """The boxes to read for a selection, none without elements.

    Small gaps between positions are read with them; large gaps are skipped.

    Args:
        selection: the elements.
        shape: the tensor's shape.
        item_size: bytes of an element.
        out: an array of the selection's shape.
        most: maximum bytes of a box whose elements do not go to ``out`` in order.
        skip: gaps up to this many bytes are read.
    """
    if math.prod(selection.shape) == 0:
        return
    rows = [math.prod(shape[axis + 1 :]) * item_size for axis in range(len(shape))]
    pending = [(selection.axes, out)]
    while pending:
        axes, place = pending.pop()
        apart = next((a for a, axis in enumerate(axes) if _far(axis, rows[a], skip)), None)
        box = tuple(axis.span for axis in axes)
        if apart is None:
            steps = [axis.step if axis.length > 1 else 1 for axis in axes]
            if max(steps, default=1) == 1 and place.flags.c_contiguous:
                yield BoxReading(box, None, place)
                continue
            if volume_of(box) * item_size <= most or volume_of(box) == 1:
                yield BoxReading(box, tuple(slice(None, None, step) for step in steps), place)
                continue
            apart = next(a for a, axis in enumerate(axes) if axis.length > 1)
        # In halves, the first on top of the stack: files are read sequentially.
        half = axes[apart].length // 2
        pending += [_part(axes, place, apart, half, axes[apart].length), _part(axes, place, apart, 0, half)]


def _far(axis: ChosenAxis, row: int, skip: int) -> bool:
    """Whether positions of a dimension are so far apart that each is read separately."""
    return axis.length > 1 and axis.step > 1 and (axis.step - 1) * row > skip


def _part(
    axes: tuple[ChosenAxis, ...], out: Array, number: int, first: int, last: int
) -> tuple[tuple[ChosenAxis, ...], Array]:
    """The positions ``first`` to ``last`` of one dimension, and their place in the result."""
    start, step, _ = axes[number]
    some = ChosenAxis(start + first * step, step, last - first)
    place = (*(slice(None) for _ in axes[:number]), slice(first, last))
    return (*axes[:number], some, *axes[number + 1 :]), out[place]


def into(array: Array, selection: Selection) -> Array:
    """A view of a finished array that has the shape of the selection before `finish`.

    Raises:
        IndexError: the array has another shape.
    """
    expected = selection.finished_shape
    if array.shape != expected:
        raise IndexError(f"an array of shape {expected} is needed, not {array.shape}")
    back = {0: np.newaxis, None: 0}
    parts = [part if isinstance(part, slice) else back[part] for part in selection.finish if part is not Ellipsis]
    # With an ellipsis, the result is a view even if it has one element.
    view: Array = array[(*parts, Ellipsis)]
    return view
