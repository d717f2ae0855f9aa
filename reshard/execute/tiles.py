"""Copies and casts between arrays of elements in memory; transposed ones go through small buffers, tile by tile."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.formats.elements import Words
from reshard.execute.casts import Cast
from reshard.execute.runs import MIN_TILE

Bytes = npt.NDArray[np.uint8]

_WORDS = (8, 4, 2, 1)
# Elements along the sides of a tile of a transposed copy: this number along the source's contiguous axis, twice as
# many along the target's. Smaller tiles cost more calls, larger ones do not fit the cache.
TILE = 128
_TILE_GAP = 8
# Elements of one or two bytes that are transposed together: a wide word takes NumPy as long as a narrow one. Tiles are
# twice as wide then, and four times as long, so that longer runs are written. Along axes shorter than the minimum, the
# calls for this take longer than it saves.
_LANES = 4
_MIN_PACKED = 256
# Rows of such a tile that are transposed at a time: the cache next to the core has a line for each.
_STRIP = 256
_FAR = 1 << 62
_BUFFERS = threading.local()


def word_of(item_size: int) -> int:
    """Bytes of the words that elements are copied as.

    Words, not rows of bytes: a short row then costs an instruction, not a call.
    """
    return next(size for size in _WORDS if item_size % size == 0)


def as_words(data: memoryview, shape: Sequence[int], item_size: int) -> Words:
    """Bytes as an array of elements, each of one word or more in the last dimension."""
    word = word_of(item_size)
    return np.frombuffer(data, dtype=f"u{word}").reshape(*shape, item_size // word)


def put(source: Words, out: Words, cast: Optional[Cast] = None) -> None:
    """Copy elements, or cast them, between arrays of one word or more per element in the last dimension.

    Transposed copies go tile by tile through buffers in the cache.
    """
    axes = range(source.ndim - 1)
    near_source, near_out = _nearest_axis(source), _nearest_axis(out)
    shorter = min(source.shape[near_source], source.shape[near_out])
    if near_source == near_out or shorter < MIN_TILE:
        if cast is None:
            out[...] = source
        else:
            cast.put(source, out)
        return
    by_source = sorted(axes, key=lambda axis: (axis == near_source, -source.strides[axis]))
    by_out = sorted(axes, key=lambda axis: (axis == near_out, -out.strides[axis]))
    lanes = _LANES if out.itemsize <= 2 and out.shape[-1] == 1 and shorter >= _MIN_PACKED else 1
    wide, long = (TILE, 2 * TILE) if lanes == 1 else (2 * TILE, 8 * TILE)
    steps = {near_source: min(source.shape[near_source], wide), near_out: min(source.shape[near_out], long)}
    budget = 2 * TILE * TILE // math.prod(steps.values())
    for axis in reversed(by_source):
        if axis not in steps:
            steps[axis] = max(1, min(source.shape[axis], budget))
            budget //= steps[axis]
    slices = [
        [slice(first, first + steps[axis]) for first in range(0, source.shape[axis], steps[axis])] for axis in axes
    ]
    tile: Optional[_Tile] = getattr(_BUFFERS, "tile", None)
    for place in itertools.product(*slices):
        source_tile, out_tile = source[place], out[place]
        kind = (out_tile.shape, out.dtype, by_source, by_out, lanes)
        if tile is None or tile.kind != kind:
            tile = _BUFFERS.tile = _Tile(*kind)
        tile.move(source_tile, out_tile, cast)


def _nearest_axis(words: Words) -> int:
    """The axis along which elements are nearest to each other; 0 for a single element."""
    shape, strides, last = words.shape, words.strides, words.ndim - 2
    if last > 0 and shape[last] > 1 and strides[last] == shape[-1] * words.itemsize:
        return last
    return min(range(last + 1), key=lambda axis: strides[axis] if shape[axis] > 1 else _FAR, default=0)


class _Tile:
    """Elements between the order of the source in memory and that of the target, in buffers of this thread.

    Rows of tensors are often a power of two apart, so that they evict each other from the cache. Rows of the buffer
    are not. Where elements are narrow, neighbours along the source's contiguous axis are transposed together, as one
    word. Then casts to narrower words separate them: a cast keeps the lowest bytes of words that begin at a neighbour.

    Args:
        shape: elements per axis, and words per element.
        dtype: of the words.
        by_source: the axes, largest step in the source first.
        by_out: the axes, largest step in the target first.
        lanes: neighbours that are transposed together.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        by_source: Sequence[int],
        by_out: Sequence[int],
        lanes: int,
    ) -> None:
        self.kind = (shape, dtype, by_source, by_out, lanes)
        self._near_out = by_out[-1]
        self._by_source, self._by_out = (*by_source, len(by_source)), tuple(by_out)
        strip = shape[by_out[-1]] if lanes == 1 else min(shape[by_out[-1]], _STRIP)
        counts = [strip if axis == by_out[-1] else shape[axis] for axis in by_source]
        packed = -(-counts[-1] // lanes)
        row = packed * lanes + _TILE_GAP
        buffer = _buffer("rows", math.prod(counts[:-1]) * row * shape[-1] * dtype.itemsize)
        rows = buffer.view(dtype).reshape(*counts[:-1], row, shape[-1])
        self._rows: Words = rows[..., : counts[-1], :]
        self._turned: list[Words] = []
        if lanes == 1:
            return
        word = np.dtype(f"u{dtype.itemsize * lanes}")
        words = buffer.view(word).reshape(*counts[:-1], row // lanes)
        self._packed: Words = words[..., :packed].transpose([by_source.index(axis) for axis in by_out])
        # Words that begin at a later neighbour end behind the last word.
        turned_shape = [packed if axis == by_source[-1] else shape[axis] for axis in by_out]
        turned = _buffer("turned", (math.prod(turned_shape) + 1) * word.itemsize)
        self._turned = [np.ndarray(turned_shape, word, turned.data, lane * dtype.itemsize) for lane in range(lanes)]
        self._axis = by_out.index(by_source[-1])

    def move(self, source: Words, out: Words, cast: Optional[Cast]) -> None:
        """Copy or cast the elements of a tile."""
        ordered = source.transpose(self._by_source)
        if not self._turned:
            _put_rows(ordered, self._rows, cast)
            out.transpose(self._by_source)[...] = self._rows
            return
        before = (slice(None),) * self._by_source.index(self._near_out)
        for first in range(0, source.shape[self._near_out], _STRIP):
            strip = slice(first, first + _STRIP)
            part = ordered[(*before, strip)]
            count = part.shape[len(before)]
            _put_rows(part, self._rows[(*before, slice(count))], cast)
            self._turned[0][..., strip] = self._packed[..., :count]
        ordered = out[..., 0].transpose(self._by_out)
        before = (slice(None),) * self._axis
        for lane, words in enumerate(self._turned):
            neighbours = ordered[(*before, slice(lane, None, len(self._turned)))]
            words = words[(*before, slice(neighbours.shape[self._axis]))]
            np.copyto(neighbours, words, casting="unsafe")


def _put_rows(source: Words, rows: Words, cast: Optional[Cast]) -> None:
    if cast is None:
        rows[...] = source
        return
    # Casts are faster where elements are contiguous.
    stored = _buffer("stored", source.nbytes).view(source.dtype).reshape(source.shape)
    stored[...] = source
    cast.put(stored, rows)


def _buffer(purpose: str, nbytes: int) -> Bytes:
    """Memory of this thread."""
    buffer: Optional[Bytes] = getattr(_BUFFERS, purpose, None)
    if buffer is None or len(buffer) < nbytes:
        buffer = np.empty(nbytes, np.uint8)
        setattr(_BUFFERS, purpose, buffer)
    return buffer[:nbytes]
