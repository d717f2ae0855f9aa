"""Random checkpoints in the forms of MindFormers, with random layouts.

Everything follows from a seed. Every dimension divides by its cut; pipelines have one layer in each stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.reference import LayoutDict, Strategy, axes_of, shard_step
from tests.trees import Value, layout, value

SIZES = (4, 8, 12, 24)
DTYPES = ("Float32", "BFloat16", "Float16", "Int32", "Int64", "Int8", "Bool", "UInt16")
STATE = "adam_m."


class World(NamedTuple):
    """A checkpoint: the layers of every stage, and the moments of its weights."""

    checkpoint: dict[str, Value]

    @property
    def states(self) -> list[str]:
        return [name for name in self.checkpoint if name.startswith(STATE)]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.array.shape for name, tensor in self.checkpoint.items()}


def world(seed: int) -> World:
    """Two layers with tensors of one to three dimensions, and their moments."""
    random = np.random.RandomState(seed)
    checkpoint = {}
    for layer in range(2):
        for part in ("weight0", "weight1", "weight2", "query's", "größe"):
            shape = [int(random.choice(SIZES)) for _ in range(1 + random.randint(3))]
            dtype = str(random.choice(DTYPES))
            name = f"layers.{layer}.{part}"
            # Values that are no numbers do not come through the other libraries bit by bit.
            finite = 0x3000 if dtype in ("BFloat16", "Float16") else 0
            contents = value(f"{seed}{name}", shape, dtype)
            checkpoint[name] = Value(dtype, contents.array % 0x1000 + finite if finite else contents.array)
            checkpoint[STATE + name] = value(f"{seed}{STATE}{name}", shape)
    return World(checkpoint)


def strategy(seed: int, world: World, devices: Sequence[int], sharded: bool = False) -> Strategy:
    """Random layouts over stages of so many devices each, one or two; `sharded`: some with an optimizer shard."""
    random = np.random.RandomState(seed)
    result = []
    for stage, count in enumerate(devices):
        layouts = {}
        for name, shape in world.shapes.items():
            if len(devices) == 1 or f"layers.{stage}." in name:
                plain = _layout(random, shape, count)
                layouts[name] = _shard(plain, shape) if sharded and random.randint(2) else plain
        result.append({"devices": count, "layouts": layouts})
    return result


def metadata_layouts(strategy: Strategy) -> dict[str, dict[str, Any]]:
    """A strategy without optimizer shards in the terms of metadata.json."""
    result, first = {}, 0
    for stage in strategy:
        ranks = list(range(first, first + stage["devices"]))
        for name, layout_record in stage["layouts"].items():
            assert not layout_record["shard_size"]
            axes = axes_of(layout_record["tensor_map"], len(layout_record["tensor_map"]))
            tensor_map = [entry if len(entry) > 1 else entry[0] if entry else -1 for entry in axes]
            result[name] = {
                "device_matrix": list(layout_record["dev_matrix"]),
                "tensor_map": tensor_map,
                "rank_list": ranks,
            }
        first += stage["devices"]
    return result


def _layout(random: Any, shape: Sequence[int], devices: int) -> dict[str, Any]:
    """A random device matrix, and some of its axes for dimensions that divide."""
    matrix: list[int] = []
    remaining = devices
    while remaining > 1:
        size = int(random.choice([size for size in range(2, remaining + 1) if remaining % size == 0]))
        matrix.append(size)
        remaining //= size
    matrix = matrix or [1]
    axes: list[list[int]] = [[] for _ in shape]
    cuts = [1] * len(shape)
    for axis in random.permutation(len(matrix)).tolist():
        dimension = random.randint(len(shape) + 1)
        size = matrix[-1 - axis]
        if dimension < len(shape) and shape[dimension] % (cuts[dimension] * size) == 0:
            axes[dimension].append(axis)
            cuts[dimension] *= size
    if any(len(entry) > 1 for entry in axes):
        return layout(matrix, [entry or [-1] for entry in axes])
    return layout(matrix, [entry[0] if entry else -1 for entry in axes])


def _shard(plain: LayoutDict, shape: Sequence[int]) -> dict[str, Any]:
    """The same with its first dimension cut again over the replicas, if there are any and it divides."""
    cuts = [
        math.prod(plain["dev_matrix"][-1 - axis] for axis in entry)
        for entry in axes_of(plain["tensor_map"], len(shape))
    ]
    replicas = math.prod(plain["dev_matrix"]) // math.prod(cuts)
    if replicas == 1 or shape[0] // cuts[0] % replicas:
        return dict(plain)
    sharded = {**plain, "shard_size": -1, "shard_step": 1}
    return {**sharded, "shard_step": shard_step(sharded, shape)}
