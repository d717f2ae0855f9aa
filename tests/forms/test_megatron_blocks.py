"""Optimizer state that Megatron flattened in blocks has the elements of its weight, or is refused."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from reshard.forms.megatron.blocks import unblock
from reshard.forms.pytorch.dcp import DescribedChunk, DescribedTensor, ReadMetadata, Record

WEIGHT = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
STATE = f"optimizer.state.fp32_param.{WEIGHT}"
Shape = tuple[int, ...]


class Flattened:
    """The state of a weight in a grid of blocks, each cut at random places; records are numbered by their offsets."""

    def __init__(self, random: np.random.Generator, shape: Shape, grid: Shape, transposed: bool) -> None:
        self.values = random.integers(0, 1 << 30, shape).astype("<i4")
        self.records: list[npt.NDArray[Any]] = []
        stored = self.values.swapaxes(-1, -2) if transposed else self.values
        block = [size // count for size, count in zip(stored.shape, grid)]
        flat = math.prod(block)
        chunks = []
        for place in np.ndindex(*grid):
            box = tuple(slice(at * size, (at + 1) * size) for at, size in zip(place, block))
            elements = stored[box].reshape(-1)
            edges = sorted({0, flat, *random.integers(0, flat + 1, random.integers(0, 3)).tolist()})
            for first, end in itertools.pairwise(edges):
                record = Record("__0_0.distcp", len(self.records), 1, "")
                chunks.append(DescribedChunk((*place, first), (*(1,) * len(grid), end - first), record))
                self.records.append(elements[first:end])
        random.shuffle(chunks)
        weight = DescribedTensor("BFloat16", shape, [DescribedChunk((0,) * len(shape), shape, Record("w", 0, 1, ""))])
        tensors = {WEIGHT: weight, STATE: DescribedTensor("Float32", (*grid, flat), chunks)}
        self.metadata = ReadMetadata(tensors, {}, {}, {}, {STATE: stored.shape})

    def read(self) -> npt.NDArray[Any] | None:
        """The state by the chunks that it is described with; None where it is refused. Every element is read once."""
        if STATE in self.metadata.faults:
            return None
        result = np.full(self.values.shape, -1, "<i4")
        for offsets, sizes, _, runs, strides in self.metadata.tensors[STATE].chunks:
            joined = np.concatenate([self.records[run.offset][run.first : run.first + run.elements] for run in runs])
            box = tuple(slice(first, first + size) for first, size in zip(offsets, sizes))
            assert (result[box] == -1).all()
            steps = None if strides is None else [4 * stride for stride in strides]
            result[box] = np.ndarray(sizes, "<i4", joined.tobytes(), strides=steps)
        return result


def divisor(random: np.random.Generator, size: int) -> int:
    return int(random.choice([each for each in range(1, size + 1) if size % each == 0]))


@pytest.mark.parametrize("seed", range(30))
def test_blocks_are_boxes_of_the_weight(seed: int) -> None:
    random = np.random.default_rng(seed)
    shape = tuple(random.integers(1, 7, random.integers(2, 5)).tolist())
    transposed = bool(random.integers(0, 2)) and shape[-1] != shape[-2]
    stored = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
    flattened = Flattened(random, shape, tuple(divisor(random, size) for size in stored), transposed)
    assert unblock("somewhere", flattened.metadata) == ({STATE} if transposed else set())
    if shape[-1] == shape[-2]:
        # A square shows nothing of its orientation; the cut of its weight may.
        result = flattened.read()
        assert result is None or (result == flattened.values).all()
    else:
        np.testing.assert_array_equal(flattened.read(), flattened.values)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_cut_of_a_square_shows_its_orientation(transposed: bool) -> None:
    """Gate and up rows are two blocks at least, in the dimension that is that of rows."""
    random = np.random.default_rng(7)
    flattened = Flattened(random, (1, 8, 8), (1, 1, 4) if transposed else (1, 4, 1), transposed)
    halves = [DescribedChunk((0, first, 0), (1, 4, 8), Record("w", first, 1, "")) for first in range(0, 8, 4)]
    tensors = flattened.metadata.tensors
    tensors[WEIGHT] = tensors[WEIGHT]._replace(chunks=halves)
    # Moments have the same blocks.
    for kind in ("exp_avg", "exp_avg_sq"):
        name = STATE.replace("fp32_param", kind)
        flattened.metadata.tensors[name] = tensors[STATE]
        flattened.metadata.flattened[name] = flattened.metadata.flattened[STATE]
    unblock("somewhere", flattened.metadata)
    assert not flattened.metadata.faults
    np.testing.assert_array_equal(flattened.read(), flattened.values)


@pytest.mark.parametrize("damage", ["hole", "overlap", "end", "weight", "grid", "shape"])
def test_blocks_that_are_not_the_weight_are_refused(damage: str) -> None:
    random = np.random.default_rng(3)
    flattened = Flattened(random, (4, 6), (2, 1), False)
    tensors = flattened.metadata.tensors
    state = tensors[STATE]
    first = next(number for number, chunk in enumerate(state.chunks) if chunk.offsets[-1] == 0)
    chunk = state.chunks[first]
    if damage == "hole":
        state.chunks[first] = chunk._replace(offsets=(*chunk.offsets[:-1], 1))
    elif damage == "overlap":
        state.chunks.append(chunk)
    elif damage == "end":
        last = max(range(len(state.chunks)), key=lambda number: state.chunks[number].offsets)
        state.chunks[last] = state.chunks[last]._replace(sizes=(1, 1, state.chunks[last].sizes[-1] - 1))
    elif damage == "weight":
        del tensors[WEIGHT]
    elif damage == "grid":
        tensors[STATE] = state._replace(shape=(3, 1, 12))
    else:
        flattened.metadata.flattened[STATE] = (6, 6)
    unblock("somewhere", flattened.metadata)
    assert flattened.read() is None
    error = flattened.metadata.faults[STATE]
    assert STATE in str(error) and "--exclude" in (error.hint or "")
