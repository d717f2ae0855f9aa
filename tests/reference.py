"""A naive reference of layouts, which the tests compare conversions with.

Nothing here knows of `reshard`. A strategy is plain data, one mapping per pipeline stage::

    [{"devices": 4, "layouts": {"w": {"dev_matrix": [2, 2], "tensor_map": [0, -1],
                                      "shard_step": 2, "shard_size": -1, "uneven": None}}}, ...]

``tensor_map`` is flat, or nested with one list per dimension. Devices are enumerated one by one, and
coverage is counted element by element, so arrays have to be small.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

LayoutDict = Mapping[str, Any]
StageDict = Mapping[str, Any]
Strategy = Sequence[StageDict]
Array = npt.NDArray[Any]
Box = tuple[tuple[int, int], ...]

#: The strategy of a checkpoint that nobody has cut, listing nothing.
ONE_DEVICE: Strategy = [{"devices": 1, "layouts": {}}]


def axes_of(tensor_map: Sequence[Any], dimensions: int) -> list[list[int]]:
    """Per tensor dimension the device axes it is split over, counted from the right."""
    if any(isinstance(entry, (list, tuple)) for entry in tensor_map):
        axes = [[axis for axis in entry if axis != -1] for entry in tensor_map if len(entry)]
    else:
        axes = [[] if entry == -1 else [entry] for entry in tensor_map]
    assert len(axes) == dimensions, f"tensor map {tensor_map} does not fit {dimensions} dimensions"
    return axes


def boxes(layout: LayoutDict, shape: Sequence[int], sharded: bool = True) -> list[Box]:
    """Every local rank's slice of a tensor of `shape`, as one (start, stop) per dimension.

    With ``sharded`` False the optimizer shard is not cut, as the compiler does for ``accu_grads``.
    """
    matrix = list(layout["dev_matrix"]) or [1]
    devices = math.prod(matrix)
    axes = axes_of(layout["tensor_map"], len(shape))
    coordinates = list(itertools.product(*(range(size) for size in matrix)))
    assert len(coordinates) == devices

    plain: list[Box] = []
    for coordinate in coordinates:
        box = []
        for dimension, size in enumerate(shape):
            index, cuts = 0, 1
            for axis in axes[dimension]:
                index = index * matrix[-1 - axis] + coordinate[-1 - axis]
                cuts *= matrix[-1 - axis]
            uneven = layout.get("uneven")
            if uneven and dimension == 0:
                assert len(uneven) == cuts and sum(uneven) == size
                box.append((sum(uneven[:index]), sum(uneven[: index + 1])))
            else:
                assert size % cuts == 0, f"{size} does not divide by {cuts}"
                box.append((size // cuts * index, size // cuts * (index + 1)))
        plain.append(tuple(box))

    if not (sharded and layout["shard_size"] and layout["shard_step"]):
        return plain
    result = []
    for rank in range(devices):
        group = [other for other in range(devices) if plain[other] == plain[rank]]
        count = len(group) if layout["shard_size"] == -1 else layout["shard_size"]
        assert len(group) % count == 0
        start, stop = plain[rank][0]
        assert (stop - start) % count == 0
        part = (stop - start) // count
        position = group.index(rank) % count
        result.append(((start + part * position, start + part * (position + 1)), *plain[rank][1:]))
    return result


def shard_step(layout: LayoutDict, shape: Sequence[int]) -> int:
    """The step that MindSpore records for an optimizer shard: (last - first) // (n - 1), of a group."""
    plain = boxes({**layout, "shard_size": 0, "shard_step": 0}, shape)
    group = [rank for rank, box in enumerate(plain) if box == plain[0]]
    count = len(group) if layout["shard_size"] == -1 else layout["shard_size"]
    return (group[count - 1] - group[0]) // (count - 1) if count > 1 else 0


def cut(array: Array, box: Box) -> Array:
    """The elements of `array` in `box`."""
    return np.ascontiguousarray(array[tuple(slice(start, stop) for start, stop in box)]).reshape(
        [stop - start for start, stop in box]
    )


def rank_count(strategy: Strategy) -> int:
    return sum(stage["devices"] for stage in strategy)


def stage_of(strategy: Strategy, rank: int) -> tuple[int, int]:
    """Stage number and local rank of a global rank."""
    for number, stage in enumerate(strategy):
        if rank < stage["devices"]:
            return number, rank
        rank -= stage["devices"]
    raise AssertionError("no such rank")


def names_of(strategy: Strategy) -> set[str]:
    return {name for stage in strategy for name in stage["layouts"]}


def rank_boxes(
    strategy: Strategy, shapes: Mapping[str, Sequence[int]], rank: int, unsharded: Iterable[str] = ()
) -> dict[str, Box]:
    """The slices that one global rank holds of the parameters in `shapes`."""
    number, local = stage_of(strategy, rank)
    plain = set(unsharded)
    return {
        name: boxes(layout, shapes[name], name not in plain)[local]
        for name, layout in strategy[number]["layouts"].items()
        if name in shapes
    }


def slices(strategy: Strategy, full: Mapping[str, Array], unsharded: Iterable[str] = ()) -> dict[int, dict[str, Array]]:
    """What every global rank holds, cut from the full arrays."""
    plain = set(unsharded)
    result: dict[int, dict[str, Array]] = {rank: {} for rank in range(rank_count(strategy))}
    first = 0
    for stage in strategy:
        for name, layout in stage["layouts"].items():
            if name in full:
                array = full[name]
                for local, box in enumerate(boxes(layout, array.shape, name not in plain)):
                    result[first + local][name] = cut(array, box)
        first += stage["devices"]
    return result


def uncovered(
    source: Strategy,
    target: Strategy,
    shapes: Mapping[str, Sequence[int]],
    target_rank: int | None,
    available: Iterable[int],
    unsharded: Iterable[str] = (),
) -> set[str]:
    """Parameters of which the target needs elements that none of the available source ranks hold.

    With `target_rank` None the whole tensors are needed.
    """
    needed: dict[str, Box]
    if target_rank is None:
        common = names_of(source) & set(shapes)
        needed = {name: tuple((0, size) for size in shapes[name]) for name in common}
    else:
        expected = rank_boxes(target, shapes, target_rank, unsharded)
        needed = {name: box for name, box in expected.items() if name in names_of(source)}
    contents = {name: np.zeros(tuple(shapes[name]), bool) for name in needed}
    for rank in available:
        for name, box in rank_boxes(source, shapes, rank, unsharded).items():
            if name in contents:
                contents[name][tuple(slice(*interval) for interval in box)] = True
    return {name for name, box in needed.items() if not cut(contents[name], box).all()}
