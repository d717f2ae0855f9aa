"""Stored boxes of a tensor: whether they are all of it, and the grid that they lie in.

Files may state for each of their tensors which box of a larger one it is. Most writers cut every dimension by itself,
and the boxes are those of a grid. Some do not: boxes as in a brick wall, or around a pinwheel. Then the grid is the
common refinement of all boxes, and several of its slices lie in one stored box.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.errors import LayoutError
from reshard.layout.grid import Box, Grid

Numbers = npt.NDArray[np.int64]

MAX_REFINED = 1 << 20
"""Slices of a refined grid: boxes that lie in no grid may need many more slices than there are boxes."""


class Covering(NamedTuple):
    """Boxes that together are all of a tensor, each element in one of them.

    Attributes:
        grid: the grid of the boxes, or one that refines them.
        box_of_slice: per slice of the grid the box that it lies in; None where box ``n`` is slice ``n``.
        boxes: the distinct boxes with elements; where they are a grid, in its order.
        members: per box the numbers of the given boxes that are equal to it, ascending.
    """

    grid: Grid
    box_of_slice: Numbers | None
    boxes: tuple[Box, ...]
    members: tuple[tuple[int, ...], ...]


def covering(shape: Sequence[int], starts: Numbers, sizes: Numbers) -> Covering:
    """See that boxes are all of a tensor; equal ones are replicas.

    Args:
        shape: of the tensor; at most 2^40 elements.
        starts: first element per dimension, shape (boxes, dimensions).
        sizes: elements per dimension, shape (boxes, dimensions).

    Raises:
        LayoutError: boxes lie outside the tensor, overlap, or leave elements out; names the elements.
    """
    shape = tuple(shape)
    stops = _inside(shape, starts, sizes)
    if not math.prod(shape):
        return Covering(Grid.whole(shape), None, (Grid.whole(shape).slice_box(0),), (tuple(range(len(starts))),))
    filled = np.flatnonzero((sizes > 0).all(axis=1))
    if not shape:
        if not len(filled):
            raise LayoutError("no chunk holds its element")
        return Covering(Grid(()), None, ((),), (tuple(filled.tolist()),))
    if not len(filled):
        raise LayoutError(f"no chunk holds {elements_of(Grid.whole(shape).slice_box(0), shape)}")
    # Distinct boxes in C order of where they begin, and for every given one its number among them.
    both = np.concatenate([starts[filled], stops[filled]], axis=1)
    distinct, number = np.unique(both, axis=0, return_inverse=True)
    number = number.reshape(-1)
    order = np.argsort(number, kind="stable")
    bounds = np.searchsorted(number[order], np.arange(len(distinct) + 1))
    numbers = filled[order].tolist()
    members = tuple(tuple(numbers[a:b]) for a, b in itertools.pairwise(bounds))
    first, last = distinct[:, : len(shape)], distinct[:, len(shape) :]
    boxes = tuple(tuple(zip(*pair)) for pair in zip(first.tolist(), last.tolist()))
    edges = [np.unique(np.concatenate([first[:, d], last[:, d], [0, size]])) for d, size in enumerate(shape)]
    low = np.stack([np.searchsorted(edge, first[:, d]) for d, edge in enumerate(edges)], axis=1)
    high = np.stack([np.searchsorted(edge, last[:, d]) for d, edge in enumerate(edges)], axis=1)
    cuts = [len(edge) - 1 for edge in edges]
    grid = Grid(tuple(tuple(edge.tolist()) for edge in edges))
    if math.prod(cuts) == len(boxes) and bool((high - low == 1).all()):
        # As many distinct slices of the grid as it has: in C order, as they are sorted.
        return Covering(grid, None, boxes, members)
    owners = _owners(shape, grid, boxes, low, high, cuts)
    return Covering(grid, owners, boxes, members)


def _inside(shape: tuple[int, ...], starts: Numbers, sizes: Numbers) -> Numbers:
    """Where boxes end.

    Raises:
        LayoutError: one does not lie in the tensor.
    """
    # Sums of hostile numbers may not fit 64 bits, differences of sound ones do.
    limits = np.asarray(shape, np.int64)
    outside = np.flatnonzero(((starts < 0) | (sizes < 0) | (starts > limits) | (sizes > limits - starts)).any(axis=1))
    if len(outside):
        at = int(outside[0])
        raise LayoutError(
            f"a chunk of shape {sizes[at].tolist()} at {starts[at].tolist()} does not lie in a tensor of shape "
            f"{list(shape)}"
        )
    return starts + sizes


def _owners(
    shape: tuple[int, ...], grid: Grid, boxes: Sequence[Box], low: Numbers, high: Numbers, cuts: Sequence[int]
) -> Numbers:
    """Per slice of a refined grid, in C order, the box that it lies in.

    Raises:
        LayoutError: a slice is in no box, or in two; or there are too many.
    """
    if math.prod(cuts) > MAX_REFINED:
        raise LayoutError(
            f"its {len(boxes)} chunks lie in no grid, and cut each other into {math.prod(cuts):,} parts: reshard "
            f"supports {MAX_REFINED:,}"
        )
    owners = np.full(cuts, -1, np.int64)
    for number in range(len(boxes)):
        part = owners[tuple(map(slice, low[number].tolist(), high[number].tolist()))]
        if part.max() >= 0:
            overlapped = boxes[int(part.max())]
            raise LayoutError(
                f"{elements_of(boxes[number], shape)} and {elements_of(overlapped, shape)} overlap, and are no replicas"
            )
        part[...] = number
    missing = np.argwhere(owners < 0)
    if len(missing):
        raise LayoutError(f"no chunk holds {elements_of(_hole(grid, owners, missing[0].tolist()), shape)}")
    return owners.reshape(-1)


def _hole(grid: Grid, owners: Numbers, first: list[int]) -> Box:
    """The box of missing slices that begins at one, widened along the last dimension first."""
    last = [at + 1 for at in first]
    for dimension in reversed(range(len(first))):
        while last[dimension] < owners.shape[dimension]:
            wider = [slice(a, b) for a, b in zip(first, last)]
            wider[dimension] = slice(last[dimension], last[dimension] + 1)
            if (owners[tuple(wider)] >= 0).any():
                break
            last[dimension] += 1
    return tuple((edges[a], edges[b]) for edges, a, b in zip(grid.edges, first, last))


def elements_of(box: Box, shape: Sequence[int]) -> str:
    """A box in words: rows where it is cut along dimension 0 alone, otherwise the interval of every dimension."""
    if all(interval == (0, size) for interval, size in zip(box[1:], shape[1:])) and box:
        start, stop = box[0]
        return f"rows {start} to {stop - 1}" if stop - start > 1 else f"row {start}"
    return "elements [" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
