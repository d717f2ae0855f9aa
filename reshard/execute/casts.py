"""Copies and casts between arrays of elements in memory; transposed ones go through small buffers, tile by tile.

Casts go block by block in cache, and count values that become infinite.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.checkpoints.formats.elements import Words, cast_words, infinite, put_words
from reshard.execute.runs import MIN_TILE

Bytes = npt.NDArray[np.uint8]
Overflowed = Callable[[str, int], None]
"""Receives the name of a tensor and the number of its elements that became infinite."""

# Elements that are cast at a time: with their temporaries they fit into the cache.
_BLOCK = 1 << 16
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


class Cast:
    """The cast of the elements of one tensor.

    Args:
        stored: their type in the source, one of `dtypes.CASTABLE`.
        dtype: the new type, one of `dtypes.CAST_TO`.
    """

    def __init__(self, stored: str, dtype: str, name: str, overflowed: Overflowed) -> None:
        self.stored = stored
        self.dtype = dtype
        self.stored_size = ITEM_SIZES[stored]
        self._name = name
        self._overflowed = overflowed

    def put(self, source: Words, out: Words) -> None:
        """Cast elements of one word each.

        Args:
            source: words of the stored type, in any memory layout.
            out: words of the new type, of the same shape.
        """
        overflowed = 0
        if source.flags.c_contiguous and out.flags.c_contiguous:
            flat_source, flat_out = source.reshape(-1), out.reshape(-1)
            for first in range(0, len(flat_source), _BLOCK):
                overflowed += self._block(flat_source[first : first + _BLOCK], flat_out[first : first + _BLOCK])
        elif source.size > _BLOCK and source.ndim > 1:
            # Along the outermost axis longer than 1.
            axis = next(number for number, size in enumerate(source.shape) if size > 1)
            rows = max(1, _BLOCK // (source.size // source.shape[axis]))
            for first in range(0, source.shape[axis], rows):
                part = (*(slice(None),) * axis, slice(first, first + rows))
                if rows == 1:
                    self.put(source[part], out[part])
                else:
                    overflowed += self._block(source[part], out[part])
        else:
            overflowed += self._block(source, out)
        if overflowed:
            self._overflowed(self._name, overflowed)

    def _block(self, source: Words, out: Words) -> int:
        """Cast some elements; the number that became infinite."""
        if self.stored == "Float16":
            # All indices are valid; in its default mode NumPy would write to a copy first.
            np.take(_table(self.dtype), source, out=out, mode="wrap")
            return 0
        together = source.flags.c_contiguous and source.size <= _BLOCK
        narrowed = (self.stored, self.dtype) == ("Float32", "Float16")
        if narrowed and together and _ordinary_float16(source.reshape(-1), out):
            return 0
        put_words(source, self.stored, out, self.dtype)
        if (self.stored, self.dtype) == ("BFloat16", "Float32"):
            return 0
        infinities = int(np.count_nonzero(infinite(out, self.dtype)))
        return infinities - int(np.count_nonzero(infinite(source, self.stored))) if infinities else 0


@functools.cache
def _table(dtype: str) -> Words:
    """All elements of Float16 as another type: faster than one by one."""
    return cast_words(np.arange(1 << 16, dtype="u2"), "Float16", dtype)


def _ordinary_float16(bits: Words, out: Words) -> bool:
    """Cast contiguous Float32 to Float16 if all are finite and stay so; returns whether it did.

    NumPy takes 40 times as long for numbers that become subnormal, such as an optimizer's.
    Added to 2**13 times the power of two below it, or the least one of Float16, a number is rounded to the digits that
    Float16 has: they are the last bits of the sum.
    """
    room, powers = _buffer("bits", 8 * _BLOCK).view("u4").reshape(2, _BLOCK)[:, : len(bits)]
    np.bitwise_and(bits, 0x7FFFFFFF, out=room)
    # From 65520 on, half way to the next power of two, elements become infinite.
    if room.max(initial=0) >= 0x477FF000:
        return False
    np.bitwise_and(room, 0x7F800000, out=powers)
    np.maximum(powers, 0x38800000, out=powers)
    np.add(powers, 13 << 23, out=powers)
    sums = room.view("f4")
    np.add(sums, powers.view("f4"), out=sums)
    np.subtract(room, powers, out=room)
    # The digits begin with a one, which counts as a step of the exponent; those of subnormal numbers do not.
    np.subtract(powers, 0x38800000 + (13 << 23), out=powers)
    np.right_shift(powers, 13, out=powers)
    np.add(room, powers, out=room)
    np.right_shift(bits, 16, out=powers)
    np.bitwise_and(powers, 0x8000, out=powers)
    np.bitwise_or(room, powers, out=room)
    out[...] = room.reshape(out.shape)
    return True


def word_of(item_size: int) -> int:
    """Bytes of the words that elements are copied as.

    Words, not rows of bytes: a short row then costs an instruction, not a call.
    """
    return next(size for size in _WORDS if item_size % size == 0)


def as_words(data: memoryview, shape: Sequence[int], item_size: int) -> Words:
    """Bytes as an array of elements, each of one word or more in the last dimension."""
    word = word_of(item_size)
    return np.frombuffer(data, dtype=f"u{word}").reshape(*shape, item_size // word)


def put(source: Words, out: Words, cast: Cast | None = None) -> None:
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
    tile: _Tile | None = getattr(_BUFFERS, "tile", None)
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

    def move(self, source: Words, out: Words, cast: Cast | None) -> None:
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


def _put_rows(source: Words, rows: Words, cast: Cast | None) -> None:
    if cast is None:
        rows[...] = source
        return
    # Casts are faster where elements are contiguous.
    stored = _buffer("stored", source.nbytes).view(source.dtype).reshape(source.shape)
    stored[...] = source
    cast.put(stored, rows)


def _buffer(purpose: str, nbytes: int) -> Bytes:
    """Memory of this thread."""
    buffer: Bytes | None = getattr(_BUFFERS, purpose, None)
    if buffer is None or len(buffer) < nbytes:
        buffer = np.empty(nbytes, np.uint8)
        setattr(_BUFFERS, purpose, buffer)
    return buffer[:nbytes]
