"""A stretch of a tensor's bytes as boxes, in file order.

A file is written front to back, so whatever a target tensor is made of, it is produced in C order.
Any run of elements in C order is a short sequence of boxes that fix the outer axes, take a range of
one axis and all of the inner ones; each is a block to be filled in memory and written at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from reshard.layout import Box


def boxes_of_range(shape: Sequence[int], start: int, stop: int, most: int) -> Iterator[Box]:
    """The elements ``start`` to ``stop`` of a C-order array, as boxes of at most ``most`` elements.

    Args:
        shape: elements per dimension.
        start: first element, counted in C order.
        stop: one past the last.
        most: elements in a box at the most, at least 1.
    """
    rows = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if not shape:
        if start < stop:
            yield ()
        return
    position = start
    while position < stop:
        room = min(most, stop - position)
        # The outermost axis along which whole rows fit; the innermost always does.
        axis = next(a for a, row in enumerate(rows) if position % row == 0 and row <= room)
        row = rows[axis]
        first = position // row % shape[axis]
        count = min(shape[axis] - first, room // row)
        outer = tuple((i, i + 1) for i in (position // rows[a] % shape[a] for a in range(axis)))
        inner = tuple((0, size) for size in shape[axis + 1 :])
        yield (*outer, (first, first + count), *inner)
        position += count * row
