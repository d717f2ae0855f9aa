"""Operations as views of their sources."""

from __future__ import annotations

import math
from collections.abc import Sequence

from reshard.layout.views import View
from reshard.names import operations as kinds
from reshard.names.operations import Shape, SizedOperation


def views_of(operations: Sequence[SizedOperation], shapes: Sequence[Shape]) -> list[View]:
    """The results of a chain of operations.

    Args:
        operations: the chain.
        shapes: of the sources, numbered in this order.
    """
    views = [View.whole(number, shape) for number, shape in enumerate(shapes)]
    for operation in operations:
        views = _applied(operation, views)
    return views


def _applied(operation: SizedOperation, views: list[View]) -> list[View]:
    kind, dimension, count = operation.kind, operation.dimension, operation.count
    if kind == kinds.JOIN:
        each = len(views) // len(operation.sizes)
        return [_joined(views[number::each], operation) for number in range(each)]
    if kind == kinds.CUT:
        pieces = [_cut(view, operation) for view in views]
        return [piece[column] for column in range(len(operation.sizes)) for piece in pieces]
    if kind == kinds.STACK:
        raised = [view.reshape((*view.shape[:dimension], 1, *view.shape[dimension:])) for view in views]
        return [View.concat(raised[start : start + count], dimension) for start in range(0, len(views), count)]
    if kind == kinds.UNSTACK:
        return [
            view.part(dimension, number, number + 1).reshape((*view.shape[:dimension], *view.shape[dimension + 1 :]))
            for view in views
            for number in range(count)
        ]
    if kind == kinds.TRANSPOSE:
        return [view.transpose(operation.order) for view in views]
    if kind == kinds.RESHAPE:
        return [view.reshape(operation.shape) for view in views]
    if kind == kinds.PAD:
        before, after = operation.sizes
        return [
            View.concat(
                [view, View.zeros((*view.shape[:dimension], after - before, *view.shape[dimension + 1 :]))], dimension
            )
            for view in views
        ]
    if kind == kinds.UNPAD:
        return [view.part(dimension, 0, operation.sizes[1]) for view in views]
    if kind == kinds.COPY:
        return views * count
    assert kind == kinds.TAKE
    return views[: len(views) // count]


def _joined(views: Sequence[View], operation: SizedOperation) -> View:
    dimension, groups = operation.dimension, operation.groups
    if groups == 1:
        return View.concat(views, dimension)
    shape = views[0].shape
    grouped = [
        view.reshape((*shape[:dimension], groups, size, *shape[dimension + 1 :]))
        for view, size in zip(views, operation.sizes)
    ]
    joined_shape = (*shape[:dimension], groups * sum(operation.sizes), *shape[dimension + 1 :])
    return View.concat(grouped, dimension + 1).reshape(joined_shape)


def _cut(view: View, operation: SizedOperation) -> list[View]:
    dimension, groups = operation.dimension, operation.groups
    shape = view.shape
    # Without elements the shape cannot be split into groups.
    if groups == 1 or not math.prod(shape):
        grouped, place = view, dimension
    else:
        place = dimension + 1
        grouped = view.reshape((*shape[:dimension], groups, sum(operation.sizes), *shape[dimension + 1 :]))
    pieces, start = [], 0
    for size in operation.sizes:
        length = size if place != dimension or groups == 1 else size * groups
        piece = grouped.part(place, start, start + length)
        pieces.append(piece.reshape((*shape[:dimension], groups * size, *shape[dimension + 1 :])))
        start += length
    return pieces
