"""Filling a block of a target tensor from stored slices.

The strided side is always memory, never the file. Rows that are close together in the source are read in one request,
with the gaps, and gathered by NumPy. Rows far apart are read one by one. Bytes that are contiguous on both sides are
read directly into the block.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any, Optional, Union

import numpy as np
import numpy.typing as npt

from reshard.execute.casts import Cast, Overflowed, Words
from reshard.execute.parts import SharedRows
from reshard.execute.reading import ByteReader, byte_strides
from reshard.layout import Box, Loop, Region, boxes_of_range, inside, intersection, placed, shape_of, volume_of
from reshard.plan.pieces import StoredSlice, TargetTensor

_WORDS = (8, 4, 2, 1)
# Elements along the sides of a tile of a transposed copy: this number along the source's contiguous axis, twice as
# many along the target's. Smaller tiles cost more calls, larger ones do not fit the cache.
_TILE = 128
_MIN_TILE = 16
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

Bytes = npt.NDArray[np.uint8]


class BlockFiller:
    """Fills blocks of target tensors through one reader; one per thread.

    Args:
        reader: reads stored bytes.
        scratch: buffer for rows that are read before they are gathered; half of it must hold an element.
        overflowed: counts elements that a cast made infinite.
    """

    def __init__(
        self, reader: ByteReader, scratch: memoryview, overflowed: Overflowed = lambda name, count: None
    ) -> None:
        self._reader = reader
        self._overflowed = overflowed
        half = len(scratch) // 2
        self._scratch = np.frombuffer(scratch[:half], np.uint8)
        # Shared rows and elements to cast: reading them uses the other half.
        self._room = np.frombuffer(scratch[half:], np.uint8)

    def fill(self, tensor: TargetTensor, block: Box, out: memoryview) -> None:
        """Fill ``out`` with the elements of ``block``, in C order.

        Args:
            tensor: the target tensor.
            block: a box of it, counted from the target slice's own origin.
            out: exactly the block's bytes.
        """
        # Blocks and pieces meet in coordinates of the full tensor.
        box = placed(block, tensor.box)
        view = as_words(out, shape_of(block), tensor.item_size)
        if tensor.padded:
            view[...] = 0
        for piece in tensor.pieces:
            common = intersection(piece.box, box)
            if common is None:
                continue
            cast = None if piece.dtype is None else Cast(piece.dtype, str(tensor.dtype), tensor.name, self._overflowed)
            if piece.region is None:
                self._fill_region(piece.source, common, view[inside(common, box)], tensor.item_size, cast)
                continue
            for region in piece.region.within_box(common):
                self._fill_loops(piece.source, region, box, view, tensor.item_size, cast)
        if tensor.added is not None:
            tensor.added.add(box, view)

    def most_shared_rows(self, shared: SharedRows) -> int:
        """How many shared rows of the widest source fit the scratch room."""
        axis = len(shared.outer)
        item_size = shared.stored_size
        widest = max(volume_of(source.box[axis:]) for source, _ in shared.uses)
        return len(self._room) // (widest * item_size)

    def fill_shared(self, shared: SharedRows, rows: Box, outs: Sequence[memoryview]) -> None:
        """Fill the same rows of every member, reading each source's rows once.

        Args:
            shared: the tensor and the boxes of its members.
            rows: a box of the outer dimensions, counted from the members' origin there; at most
                `most_shared_rows`.
            outs: per member exactly the rows' bytes.
        """
        axis = len(shared.outer)
        example = shared.tensors[0]
        outer = placed(rows, shared.outer)
        boxes = [(*outer, *tensor.box[axis:]) for tensor in shared.tensors]
        views = [as_words(out, shape_of(box), example.item_size) for out, box in zip(outs, boxes)]
        cast = None
        if shared.dtype is not None:
            cast = Cast(shared.dtype, str(example.dtype), example.name, self._overflowed)
        for source, uses in shared.uses:
            region = intersection((*outer, *source.box[axis:]), source.box)
            if region is None:
                continue
            data = self._rows(source, region, shared.stored_size)
            for member, box in uses:
                common = intersection(box, region)
                if common is not None:
                    out = views[member][inside(common, boxes[member])]
                    put(data[inside(common, region)], out, cast)
        for tensor, box, view in zip(shared.tensors, boxes, views):
            if tensor.added is not None:
                tensor.added.add(box, view)

    def _rows(self, source: StoredSlice, region: Box, item_size: int) -> Words:
        """A region of whole rows of a stored slice, in a map or read into the scratch buffer."""
        word = word_of(item_size)
        counts = shape_of(region)
        strides = byte_strides(shape_of(source.box), item_size)
        start = sum((low - first) * stride for (low, _), (first, _), stride in zip(region, source.box, strides))
        span = span_of(counts, strides, item_size)
        mapped = self._reader.view(source, start, span)
        if mapped is not None:
            return np.ndarray(
                shape=(*counts, item_size // word), dtype=f"u{word}", buffer=mapped, strides=(*strides, word)
            )
        room = self._room[: math.prod(counts) * item_size]
        data = as_words(room.data, counts, item_size)
        self._copy(source, start, counts, strides, data, item_size)
        return data

    def _fill_region(self, source: StoredSlice, region: Box, out: Words, item_size: int, cast: Optional[Cast]) -> None:
        """Fill ``out`` with a box whose dimensions have the same order in source and target."""
        stored_size = item_size if cast is None else cast.stored_size
        strides = byte_strides(shape_of(source.box), stored_size)
        start = sum((low - first) * stride for (low, _), (first, _), stride in zip(region, source.box, strides))
        self._take(source, start, shape_of(region), strides, out, stored_size, cast)

    def _fill_loops(
        self, source: StoredSlice, region: Region, box: Box, view: Words, item_size: int, cast: Optional[Cast]
    ) -> None:
        """Fill the part of a block, given its box, that comes from a region of the source."""
        stored_size = item_size if cast is None else cast.stored_size
        strides = byte_strides(shape_of(source.box), stored_size)
        start = sum((at - first) * stride for at, (first, _), stride in zip(region.source_origin, source.box, strides))
        corner = view[tuple(slice(at - first, None) for at, (first, _) in zip(region.origin, box))]
        loops, counts, steps = loops_in_source(region, strides)
        out = np.lib.stride_tricks.as_strided(
            corner,
            (*counts, view.shape[-1]),
            (*(loop.step * view.strides[loop.dimension] for loop in loops), view.strides[-1]),
        )
        self._take(source, start, counts, steps, out, stored_size, cast)

    def _take(
        self,
        source: StoredSlice,
        start: int,
        counts: Sequence[int],
        strides: Sequence[int],
        out: Words,
        stored_size: int,
        cast: Optional[Cast],
    ) -> None:
        """Copy strided elements of a stored slice, or cast them through the scratch buffer."""
        if cast is None:
            self._copy(source, start, counts, strides, out, stored_size)
            return
        most = max(1, len(self._room) // stored_size)
        for part in boxes_of_range(counts, 0, math.prod(counts), most):
            shape = shape_of(part)
            room = as_words(self._room[: math.prod(shape) * stored_size].data, shape, stored_size)
            begin = start + sum(low * stride for (low, _), stride in zip(part, strides))
            self._copy(source, begin, shape, strides, room, stored_size)
            put(room, out[tuple(slice(low, high) for low, high in part)], cast)

    def _copy(
        self,
        source: StoredSlice,
        start: int,
        counts: Sequence[int],
        strides: Sequence[int],
        out: Words,
        item_size: int,
    ) -> None:
        """Copy strided elements of a stored slice, in parts that fit the scratch buffer.

        Args:
            source: the slice.
            start: byte of the first element in it.
            counts: elements per axis.
            strides: bytes from one element to the next, per axis, none less than the next.
            out: one word or more per element, in the last dimension.
            item_size: bytes of an element.
        """
        span = span_of(counts, strides, item_size)
        needed = math.prod(counts) * item_size
        if span == needed and out.flags.c_contiguous:
            self._reader.read_into(source, start, out.reshape(-1).view(np.uint8).data)
            return
        mapped = self._reader.view(source, start, span)
        if mapped is not None:
            gather(mapped, counts, strides, out)
            return
        skipped = self._reader.worth_skipping * max(1, runs(counts, strides, item_size))
        if span <= len(self._scratch) and span - needed <= skipped:
            self._reader.read_into(source, start, self._scratch[:span].data)
            gather(self._scratch[:span], counts, strides, out)
            return
        for part in self._parts(counts, strides, item_size):
            inside = tuple(slice(low, high) for low, high in part)
            begin = start + sum(low * stride for (low, _), stride in zip(part, strides))
            self._copy(source, begin, shape_of(part), strides, out[inside], item_size)

    def _parts(self, counts: Sequence[int], strides: Sequence[int], item_size: int) -> list[Box]:
        """Cut a region that does not fit the scratch buffer along its outermost axis longer than 1."""
        axis = next(axis for axis, count in enumerate(counts) if count > 1)
        row_span = span_of(counts[axis + 1 :], strides[axis + 1 :], item_size)
        gap = strides[axis] - row_span
        rows = 1 if gap > self._reader.worth_skipping else max(1, (len(self._scratch) - row_span) // strides[axis] + 1)
        if rows >= counts[axis]:
            rows = max(1, counts[axis] // 2)
        head = tuple((0, 1) for _ in counts[:axis])
        tail = tuple((0, count) for count in counts[axis + 1 :])
        return [(*head, (first, min(first + rows, counts[axis])), *tail) for first in range(0, counts[axis], rows)]


def span_of(counts: Sequence[int], strides: Sequence[int], item_size: int) -> int:
    """Bytes from the first byte of a region to its last, including gaps."""
    return sum((count - 1) * stride for count, stride in zip(counts, strides)) + item_size


def runs(counts: Sequence[int], strides: Sequence[int], item_size: int) -> int:
    """The number of contiguous runs of a region."""
    run = item_size
    for axis in range(len(counts) - 1, -1, -1):
        if strides[axis] != run:
            return math.prod(counts[: axis + 1])
        run *= counts[axis]
    return 1


def gather(data: Union[memoryview, Bytes], counts: Sequence[int], strides: Sequence[int], out: Words) -> None:
    """Copy strided elements out of ``data``, whose first byte is the region's first.

    Args:
        data: bytes of the source.
        counts: elements per dimension.
        strides: bytes from one element to the next, per dimension.
        out: one word or more per element, in the last dimension.
    """
    source: Words = np.ndarray(
        shape=(*counts, out.shape[-1]), dtype=out.dtype, buffer=data, strides=(*strides, out.itemsize)
    )
    put(source, out)


def loops_in_source(region: Region, strides: Sequence[int]) -> tuple[list[Loop], list[int], list[int]]:
    """The loops of a region by their steps in the source, the widest first.

    Args:
        region: the region.
        strides: bytes from one element of the stored slice to the next, per dimension.

    Returns:
        The loops, elements of each, and bytes from one to the next.
    """
    loops = sorted(region.loops, key=lambda loop: -loop.source_step * strides[loop.source_dimension])
    steps = [loop.source_step * strides[loop.source_dimension] for loop in loops]
    return loops, [loop.length for loop in loops], steps


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
    near_source = min(axes, key=lambda axis: source.strides[axis] if source.shape[axis] > 1 else _FAR, default=0)
    near_out = min(axes, key=lambda axis: out.strides[axis] if out.shape[axis] > 1 else _FAR, default=0)
    shorter = min(source.shape[near_source], source.shape[near_out])
    if near_source == near_out or shorter < _MIN_TILE:
        if cast is None:
            out[...] = source
        else:
            cast.put(source, out)
        return
    by_source = sorted(axes, key=lambda axis: (axis == near_source, -source.strides[axis]))
    by_out = sorted(axes, key=lambda axis: (axis == near_out, -out.strides[axis]))
    lanes = _LANES if out.itemsize <= 2 and out.shape[-1] == 1 and shorter >= _MIN_PACKED else 1
    wide, long = (_TILE, 2 * _TILE) if lanes == 1 else (2 * _TILE, 8 * _TILE)
    steps = {near_source: min(source.shape[near_source], wide), near_out: min(source.shape[near_out], long)}
    budget = 2 * _TILE * _TILE // math.prod(steps.values())
    for axis in reversed(by_source):
        if axis not in steps:
            steps[axis] = max(1, min(source.shape[axis], budget))
            budget //= steps[axis]
    slices = [
        [slice(first, first + steps[axis]) for first in range(0, source.shape[axis], steps[axis])] for axis in axes
    ]
    tile: Optional[_Tile] = None
    for place in itertools.product(*slices):
        source_tile, out_tile = source[place], out[place]
        if tile is None or tile.shape != out_tile.shape:
            tile = _Tile(out_tile.shape, out.dtype, by_source, by_out, lanes)
        tile.move(source_tile, out_tile, cast)


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
        self.shape = shape
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
