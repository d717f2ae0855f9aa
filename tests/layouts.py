"""Hypothesis strategies for conversions: random tensors, stages and layouts.

Layouts are made so that they are valid: an axis is used for a dimension only if the cuts divide it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from tests.conftest import LONG, QUICK
from tests.reference import LayoutDict, Strategy, boxes, shard_step
from tests.trees import Value, layout, layout_json, value

#: Sizes rich in divisors, so that few cuts are lost.
ROWS = [24, 16, 12, 8, 6, 4, 3, 2, 1]
COLUMNS = [1, 2, 3, 4, 6, 8, 12]
#: Device counts, likely ones several times.
DEVICES = [4, 2, 6, 3, 8, 4, 2, 6, 8, 1, 5, 7]
DTYPES = [
    "Float32", "Float16", "BFloat16", "Int8", "UInt8", "Bool", "Int16", "UInt16", "Int32", "UInt32",
    "Int64", "UInt64", "Float64", "Complex64", "Int4",
]  # fmt: skip
#: Names of which some hold what has confused parsers: dashes, a number, a dot, no ASCII.
NAMES = ["w", "adam_m.w", "w-0-b", "embedding-table", "块.权重", "moments.b"]
#: How many times as many examples a long run tries.
MORE = int(os.environ.get("RESHARD_EXAMPLES", "20"))


def examples(count: int) -> settings:
    """A third of so many examples by default; many times as many in a long run, a few in a quick one."""
    return settings(max_examples=count * MORE if LONG else max(2, count // 20) if QUICK else -(-count // 3))


def shapes(fewest: int) -> st.SearchStrategy[list[int]]:
    """Shapes of at least so many elements and not too many."""
    scalars: st.SearchStrategy[list[int]] = st.builds(list) if fewest <= 1 else st.nothing()
    more = st.lists(st.sampled_from(COLUMNS), max_size=3)
    tensors_ = st.builds(lambda rows, rest: [rows, *rest], st.sampled_from(ROWS), more)
    several = tensors_.filter(lambda shape: fewest <= math.prod(shape) <= 2000)
    return st.one_of(several, several, several, several, scalars)


@st.composite
def tensors(draw: st.DrawFn, fewest: int = 1) -> dict[str, Value]:
    """A checkpoint of a few tensors in full, of at least `fewest` elements each."""
    count = draw(st.integers(1, 4))
    names = draw(st.permutations(NAMES))[:count]
    return {name: value(name, draw(shapes(fewest)), draw(st.sampled_from(DTYPES))) for name in names}


@st.composite
def device_matrices(draw: st.DrawFn, devices: int) -> list[int]:
    """A device matrix of so many devices, perhaps with axes of size 1; perhaps empty for one device."""
    if devices == 1 and draw(st.booleans()):
        return []
    matrix: list[int] = []
    rest = devices
    while rest > 1:
        factor = draw(st.sampled_from([size for size in range(2, rest + 1) if rest % size == 0]))
        matrix.append(factor)
        rest //= factor
    for _ in range(draw(st.integers(0 if matrix else 1, 1))):
        matrix.insert(draw(st.integers(0, len(matrix))), 1)
    return matrix


@st.composite
def layouts(draw: st.DrawFn, devices: int, shape: Sequence[int]) -> dict[str, Any]:
    """A layout of a tensor of `shape` over so many devices."""
    matrix = draw(device_matrices(devices))
    axes: list[list[int]] = [[] for _ in shape]
    for axis in draw(st.permutations(range(len(matrix)))):
        fitting = [
            dimension
            for dimension, size in enumerate(shape)
            if size % math.prod(matrix[-1 - used] for used in [*axes[dimension], axis]) == 0
        ]
        dimension = draw(st.sampled_from([*fitting, -1, -1]))
        if dimension >= 0:
            axes[dimension].append(axis)
    nested = any(len(entry) > 1 for entry in axes) or (bool(shape) and draw(st.integers(0, 5)) == 0)
    tensor_map: list[Any] = (
        [entry or [-1] for entry in axes] if nested else [entry[0] if entry else -1 for entry in axes]
    )
    layout_record = layout(matrix, tensor_map)
    if not shape:
        return layout_record
    cuts = math.prod(matrix[-1 - axis] for axis in axes[0])
    if cuts > 1 and len(axes[0]) == 1 and shape[0] >= cuts and draw(st.integers(0, 3)) == 0:
        # At least one row in each slice, the others wherever they fall.
        bounds = draw(st.lists(st.integers(1, shape[0] - 1), min_size=cuts - 1, max_size=cuts - 1, unique=True))
        edges = [0, *sorted(bounds), shape[0]]
        layout_record["uneven"] = [stop - start for start, stop in pairwise(edges)]
    elif draw(st.integers(0, 3)) < 3:
        replicas = devices // math.prod(matrix[-1 - axis] for entry in axes for axis in entry)
        rows = shape[0] // cuts
        sizes = [size for size in range(2, replicas + 1) if replicas % size == 0 and rows % size == 0]
        if sizes:
            size = draw(st.sampled_from(sizes))
            layout_record["shard_size"] = -1 if size == replicas and draw(st.booleans()) else size
            layout_record["shard_step"] = shard_step(layout_record, shape)
    return layout_record


@st.composite
def strategies(draw: st.DrawFn, checkpoint: dict[str, Value], max_devices: int = 6, fewest_stages: int = 1) -> Strategy:
    """Stages that hold the checkpoint's tensors, each in at least one stage, some in several."""
    count = draw(st.integers(fewest_stages, 3))
    contents: list[set[str]] = [set() for _ in range(count)]
    for name in checkpoint:
        for number in draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=2)):
            contents[number].add(name)
    for names in contents:
        if not names:
            names.add(draw(st.sampled_from(sorted(checkpoint))))
    result = []
    for names in contents:
        most = max_devices if count == 1 else max(4, max_devices // count + 1)
        devices = draw(st.sampled_from([size for size in DEVICES if size <= most]))
        ordered = draw(st.permutations(sorted(names)))
        result.append(
            {
                "devices": devices,
                "layouts": {name: draw(layouts(devices, checkpoint[name].array.shape)) for name in ordered},
            }
        )
    return result


def holders(strategy: Strategy, checkpoint: dict[str, Value]) -> dict[tuple[int, str, Any], list[int]]:
    """Per stage, tensor and slice the global ranks that hold it."""
    result: dict[tuple[int, str, Any], list[int]] = {}
    first = 0
    for number, stage in enumerate(strategy):
        for name, layout_record in stage["layouts"].items():
            for local, box in enumerate(boxes(layout_record, checkpoint[name].array.shape)):
                result.setdefault((number, name, box), []).append(first + local)
        first += stage["devices"]
    return result


def json_is_ambiguous(strategy: Strategy, checkpoint: dict[str, Value]) -> bool:
    """Whether the JSON writer's expanded form of some layout can be read in two ways from its slices."""
    return any(
        _ambiguous(layout_record, checkpoint[name].array.shape)
        for stage in strategy
        for name, layout_record in stage["layouts"].items()
    )


def _ambiguous(layout_record: LayoutDict, shape: Sequence[int]) -> bool:
    written = layout_json(layout_record, shape)
    entries = list(zip(written["tensor_map"], written["tensor_shape"]))
    if len(entries) == len(shape):
        return False
    if layout_record["uneven"]:
        return True  # The recorded shape is wrong then, so it cannot group the entries.
    mine = _sliced(layout_record, shape)
    actual = 0
    for cuts in product([False, True], repeat=len(entries) - 1):
        groups = [[entries[0]]]
        for entry, split in zip(entries[1:], cuts):
            if split:
                groups.append([entry])
            else:
                groups[-1].append(entry)
        if len(groups) != len(shape) or any(len(group) > 1 and -1 in dict(group) for group in groups):
            continue
        other_shape = [math.prod(size for _, size in group) for group in groups]
        other = {**layout_record, "tensor_map": [[axis for axis, _ in group] for group in groups]}
        actual += _sliced(other, other_shape) == mine
    return actual != 1


def _sliced(layout_record: LayoutDict, shape: Sequence[int]) -> list[int] | None:
    try:
        return [stop - start for start, stop in boxes(layout_record, shape)[0]]
    except AssertionError:
        return None
