"""Filling a block of a target tensor from stored slices.

The strided side is always memory, never the file. Rows that are close together in the source are read in one request,
with the gaps, and gathered by NumPy. Rows far apart are read one by one. Bytes that are contiguous on both sides are
read directly into the block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from reshard.checkpoints.formats.elements import Words
from reshard.execute.casts import TILE, Bytes, Cast, Overflowed, as_words, put, word_of
from reshard.execute.reader import FileReader
from reshard.execute.runs import byte_strides, is_transposed, loops_in_source, runs, span_of
from reshard.layout import Box, boxes_of_range, inside, intersection, placed, shape_of, volume_of
from reshard.layout.views import Region
from reshard.plan.pieces import Piece, SharedRows, StoredSlice, TargetTensor

_FAR = 1 << 62
# Maximum bytes of each of the two buffers for rows with gaps, and for shared rows and elements to cast.
_MAX_ROOM = 4 << 20
# Bytes that are read before they are cast: they are still in the cache then.
_MAX_CAST = 1 << 20
# Rows with gaps are read with this many gaps that cost as much as a request: local ones are in the cache when they are
# gathered.
_GAPS_PER_READ = 64
# Path of slices that are in the staging buffer instead of a file.
_STAGED = ""
# Transposed elements are written this many bytes at a time: they are still in the cache then. Fewer rows than the
# minimum would be transposed slowly.
_HOT = 2 << 20
_MIN_HOT_ROWS = 2 * TILE
# Minimum bytes of transposed elements whose sources are staged together.
_MIN_STAGED = 1 << 20
_NOTHING = memoryview(b"")

Step = tuple[Box, Callable[[memoryview], None]]
"""A box of a tensor, counted from its own origin, and the function that fills its bytes."""


class BlockFiller:
    """Fills blocks of target tensors through one reader; one per thread.

    Args:
        scratch: buffer for rows that are read before they are gathered; half of it must hold an element. What exceeds
            8 MiB is only used for transposed tensors.
        overflowed: counts elements that a cast made infinite.
    """

    def __init__(
        self,
        reader: FileReader | _StageReader,
        scratch: memoryview,
        overflowed: Overflowed = lambda name, count: None,
    ) -> None:
        self._reader = reader
        self._overflowed = overflowed
        room = np.frombuffer(scratch, np.uint8)
        gaps = min(_MAX_ROOM, _GAPS_PER_READ * reader.worth_skipping)
        # Rows with gaps that are only copied.
        self._gaps = room[:gaps]
        # Shared rows and elements to cast, and rows with gaps on their way there.
        self._scratch = room[: min(len(room) // 4, gaps)]
        self._room = room[len(self._scratch) :][:_MAX_ROOM]
        # Transposed elements, and rows with gaps on their way there. The larger the stage is, the fewer times are the
        # rows of the source read.
        self._stage = room[len(self._scratch) :]
        # Sources of slices in the staging buffer, and the slices.
        self._in_buffer: list[tuple[StoredSlice, StoredSlice]] = []

    def fill(self, tensor: TargetTensor, block: Box, out: memoryview) -> None:
        """Fill ``out`` with the elements of ``block``, in C order.

        Args:
            block: a box of it, counted from the target slice's own origin.
            out: exactly the block's bytes.
        """
        first = 0
        for part, fill in self.steps(tensor, block):
            last = first + volume_of(part) * tensor.item_size
            fill(out[first:last])
            first = last

    def steps(self, tensor: TargetTensor, block: Box, most: int = _FAR) -> Iterator[Step]:
        """The boxes of a block that are filled one after the other, in C order.

        Elements of a transposed tensor are read before they are placed, so that long rows of the source are read, each
        once. Its boxes are small: they are still in the cache if they are written before the next is filled. Other
        blocks are filled at once.

        Args:
            block: a box of it, counted from the target slice's own origin.
            most: maximum bytes of a box of a transposed tensor, at least one element.
        """
        count = max(1, min(volume_of(block), most // tensor.item_size))
        if not is_transposed(tensor):
            self._in_buffer = []
            yield block, partial(self._fill, tensor, block)
            return
        if len(self._stage) < min(count * tensor.item_size, _HOT):
            # More columns fit the box than the stage.
            self._in_buffer = []
            for part in boxes_of_range(shape_of(block), 0, volume_of(block), count):
                part = placed(part, block)
                yield part, partial(self._fill, tensor, part)
            return
        stored_size = max(piece.stored_size(tensor.item_size) for piece in tensor.pieces)
        yield from self._steps(tensor, block, len(self._stage) // stored_size, most)

    def _steps(self, tensor: TargetTensor, block: Box, most_staged: int, most: int) -> Iterator[Step]:
        """As `steps`, of a transposed tensor, with at most ``most_staged`` elements in the staging buffer."""
        for box in _stages(tensor, block, most_staged):
            count = volume_of(box)
            staged = self._staged(tensor, box)
            if staged is not None:
                filler, size = BlockFiller(_StageReader(self._stage.data), _NOTHING, self._overflowed), _HOT
            elif count * tensor.item_size > _MIN_STAGED:
                # Boxes around the elements do not fit: they contain others, too.
                yield from self._steps(tensor, box, count // 2, most)
                continue
            else:
                self._in_buffer = []
                staged, filler, size = tensor, self, _FAR
            size = max(size, _MIN_HOT_ROWS * tensor.item_size * (count // _rows_of(box)))
            for part in boxes_of_range(shape_of(box), 0, count, max(1, min(most, size) // tensor.item_size)):
                part = placed(part, box)
                yield part, partial(filler._fill, staged, part)

    def _staged(self, tensor: TargetTensor, block: Box) -> TargetTensor | None:
        """The tensor with the elements of a block in the staging buffer; None if they do not fit."""
        box = placed(block, tensor.box)
        pieces: list[Piece] = []
        boxes: list[Box] = []
        for piece in tensor.pieces:
            common = intersection(piece.box, box)
            if common is None:
                continue
            for region in [None] if piece.region is None else piece.region.within_box(common):
                pieces.append(piece._replace(box=common if region is None else region.box, region=region))
                boxes.append(common if region is None else region.source_box)
        sizes = [piece.stored_size(tensor.item_size) for piece in pieces]
        slices = [self._in_stage(piece.source, each) for piece, each in zip(pieces, boxes)]
        if None in slices:
            # Whole rows, if they fit: gaps between short runs are read in any case, and other tensors may be in them.
            rows = [self._whole_rows(piece.source, each, size) for piece, each, size in zip(pieces, boxes, sizes)]
            if self._fits(rows, sizes):
                boxes = rows
            elif not self._fits(boxes, sizes):
                return None
            slices = self._read_to_stage([piece.source for piece in pieces], boxes, sizes)
        return tensor._replace(pieces=tuple(piece._replace(source=each) for piece, each in zip(pieces, slices) if each))

    def _in_stage(self, source: StoredSlice, box: Box) -> StoredSlice | None:
        """The slice in the staging buffer with a box of a source; None if there is none."""
        for read, staged in self._in_buffer:
            if intersection(box, staged.box) == box and read == source:
                return staged
        return None

    def _fits(self, boxes: Sequence[Box], sizes: Sequence[int]) -> bool:
        return sum(volume_of(box) * size for box, size in zip(boxes, sizes)) <= len(self._stage)

    def _whole_rows(self, source: StoredSlice, box: Box, item_size: int) -> Box:
        """A box of a source, or all of its rows if the gaps between them would be read."""
        if not box:
            return box
        (low, high), (first, last) = box[-1], source.box[-1]
        gap = (last - first - high + low) * item_size
        return (*box[:-1], source.box[-1]) if gap <= self._reader.worth_skipping else box

    def _read_to_stage(
        self, sources: Sequence[StoredSlice], boxes: Sequence[Box], sizes: Sequence[int]
    ) -> list[StoredSlice | None]:
        """Read boxes of sources to the staging buffer, given the bytes of their elements."""
        self._in_buffer = []
        slices: list[StoredSlice | None] = []
        first = 0
        for source, box, size in zip(sources, boxes, sizes):
            shape = shape_of(box)
            nbytes = volume_of(box) * size
            words = as_words(self._stage[first : first + nbytes].data, shape, size)
            start, strides = _place(source, box, size)
            self._copy(source, start, shape, strides, words, size, self._scratch)
            slices.append(StoredSlice(_STAGED, source.rank, ((first, nbytes),), box))
            first += nbytes
        self._in_buffer = [(source, staged) for source, staged in zip(sources, slices) if staged is not None]
        return slices

    def _fill(self, tensor: TargetTensor, block: Box, out: memoryview) -> None:
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
            rows: a box of the outer dimensions, counted from the members' origin there; at most
                `most_shared_rows`.
            outs: per member exactly the rows' bytes.
        """
        self._in_buffer = []
        axis = len(shared.outer)
        example = shared.tensors[0]
        outer = placed(rows, shared.outer)
        views = [
            as_words(out, (*shape_of(rows), *tensor.shape[axis:]), example.item_size)
            for out, tensor in zip(outs, shared.tensors)
        ]
        cast = None
        if shared.dtype is not None:
            cast = Cast(shared.dtype, str(example.dtype), example.name, self._overflowed)
        for source, uses in shared.uses:
            stored = intersection(outer, source.box[:axis])
            if stored is None:
                continue
            data = self._rows(source, (*stored, *source.box[axis:]), shared.stored_size)
            for member, box in uses:
                common = intersection(box[:axis], stored)
                if common is not None:
                    taken = (*common, *box[axis:])
                    out = views[member][inside(taken, (*outer, *shared.tensors[member].box[axis:]))]
                    put(data[inside(taken, (*stored, *source.box[axis:]))], out, cast)
        for tensor, view in zip(shared.tensors, views):
            if tensor.added is not None:
                tensor.added.add((*outer, *tensor.box[axis:]), view)

    def _rows(self, source: StoredSlice, region: Box, item_size: int) -> Words:
        """A region of whole rows of a stored slice, in a map or read into the scratch buffer."""
        word = word_of(item_size)
        counts = shape_of(region)
        start, strides = _place(source, region, item_size)
        span = span_of(counts, strides, item_size)
        mapped = self._reader.view(source, start, span)
        if mapped is not None:
            return np.ndarray(
                shape=(*counts, item_size // word), dtype=f"u{word}", buffer=mapped, strides=(*strides, word)
            )
        room = self._room[: math.prod(counts) * item_size]
        data = as_words(room.data, counts, item_size)
        self._copy(source, start, counts, strides, data, item_size, self._scratch)
        return data

    def _fill_region(self, source: StoredSlice, region: Box, out: Words, item_size: int, cast: Cast | None) -> None:
        """Fill ``out`` with a box whose dimensions have the same order in source and target."""
        stored_size = item_size if cast is None else cast.stored_size
        start, strides = _place(source, region, stored_size)
        self._take(source, start, shape_of(region), strides, out, stored_size, cast)

    def _fill_loops(
        self, source: StoredSlice, region: Region, box: Box, view: Words, item_size: int, cast: Cast | None
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
        cast: Cast | None,
    ) -> None:
        """Copy strided elements of a stored slice, or cast them through the scratch buffer."""
        if cast is None:
            self._copy(source, start, counts, strides, out, stored_size, self._gaps)
            return
        mapped = self._reader.view(source, start, span_of(counts, strides, stored_size))
        if mapped is not None:
            put(_strided(mapped, counts, strides, stored_size), out, cast)
            return
        most = max(1, min(len(self._room), _MAX_CAST) // stored_size)
        for part in boxes_of_range(counts, 0, math.prod(counts), most):
            shape = shape_of(part)
            room = as_words(self._room[: math.prod(shape) * stored_size].data, shape, stored_size)
            begin = start + sum(low * stride for (low, _), stride in zip(part, strides))
            self._copy(source, begin, shape, strides, room, stored_size, self._scratch)
            put(room, out[tuple(slice(low, high) for low, high in part)], cast)

    def _copy(
        self,
        source: StoredSlice,
        start: int,
        counts: Sequence[int],
        strides: Sequence[int],
        out: Words,
        item_size: int,
        scratch: Bytes,
    ) -> None:
        """Copy strided elements of a stored slice, in parts that fit the scratch buffer.

        Args:
            start: byte of the first element in it.
            counts: elements per axis.
            strides: bytes from one element to the next, per axis, none less than the next.
            out: one word or more per element, in the last dimension.
            scratch: buffer for rows with gaps.
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
        if span <= len(scratch) and span - needed <= skipped:
            self._reader.read_into(source, start, scratch[:span].data)
            gather(scratch[:span], counts, strides, out)
            return
        for part in self._parts(counts, strides, item_size, len(scratch)):
            inside = tuple(slice(low, high) for low, high in part)
            begin = start + sum(low * stride for (low, _), stride in zip(part, strides))
            self._copy(source, begin, shape_of(part), strides, out[inside], item_size, scratch)

    def _parts(self, counts: Sequence[int], strides: Sequence[int], item_size: int, room: int) -> list[Box]:
        """Cut a region that does not fit ``room`` bytes along its outermost axis longer than 1."""
        axis = next(axis for axis, count in enumerate(counts) if count > 1)
        row_span = span_of(counts[axis + 1 :], strides[axis + 1 :], item_size)
        gap = strides[axis] - row_span
        rows = 1 if gap > self._reader.worth_skipping else max(1, (room - row_span) // strides[axis] + 1)
        if rows >= counts[axis]:
            rows = max(1, counts[axis] // 2)
        head = tuple((0, 1) for _ in counts[:axis])
        tail = tuple((0, count) for count in counts[axis + 1 :])
        return [(*head, (first, min(first + rows, counts[axis])), *tail) for first in range(0, counts[axis], rows)]


class _StageReader:
    """Reads slices that are in the staging buffer."""

    worth_skipping = 0

    def __init__(self, stage: memoryview) -> None:
        self._stage = stage

    def read_into(self, source: StoredSlice, start: int, out: memoryview) -> None:
        out[:] = self.view(source, start, len(out))

    def view(self, source: StoredSlice, start: int, length: int) -> memoryview:
        first = source.extents[0][0] + start
        return self._stage[first : first + length]


def gather(data: memoryview | Bytes, counts: Sequence[int], strides: Sequence[int], out: Words) -> None:
    """Copy strided elements out of ``data``, whose first byte is the region's first."""
    put(_strided(data, counts, strides, out.shape[-1] * out.itemsize), out)


def _place(source: StoredSlice, region: Box, item_size: int) -> tuple[int, list[int]]:
    """The first byte of a box in a stored slice, and bytes from one element to the next per dimension."""
    strides = byte_strides(shape_of(source.box), item_size)
    return sum((low - first) * stride for (low, _), (first, _), stride in zip(region, source.box, strides)), strides


def _strided(data: memoryview | Bytes, counts: Sequence[int], strides: Sequence[int], item_size: int) -> Words:
    """Strided elements, each of one word or more in the last dimension."""
    word = word_of(item_size)
    return np.ndarray((*counts, item_size // word), f"u{word}", data, strides=(*strides, word))


def _rows_of(box: Box) -> int:
    """Elements along the outermost dimension longer than 1."""
    return next((high - low for low, high in box if high - low > 1), 1)


def _stages(tensor: TargetTensor, block: Box, most: int) -> Iterator[Box]:
    """Cut a block into boxes of at most ``most`` elements, in C order, between pieces where these are large."""
    axis = next((axis for axis, (low, high) in enumerate(block) if high - low > 1), None)
    if axis is None:
        yield block
        return
    low, high = block[axis]
    row = volume_of(block) // (high - low)
    first = tensor.box[axis][0]
    while low < high:
        at = first + low
        stop = low + max(1, most // row)
        edges = [last - first for begin, last in (piece.box[axis] for piece in tensor.pieces) if begin <= at < last]
        if edges:
            stop = min(stop, max(min(edges), low + _MIN_STAGED // (row * tensor.item_size)))
        stop = min(max(stop, low + 1), high)
        part = (*block[:axis], (low, stop), *block[axis + 1 :])
        if row > most:
            yield from _stages(tensor, part, most)
        else:
            yield part
        low = stop
