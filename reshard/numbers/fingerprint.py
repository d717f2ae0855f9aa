"""Fingerprints of a checkpoint: equal before and after any conversion.

A fingerprint is a sum over the elements of a tensor that is independent of its slices.

Every element has a weight that depends only on its place in the full tensor, so the sums of disjoint slices
add up to the sum of the whole, on any machines. Steps:

1. The tensor is a tensor of bytes, with the bytes of an element as one more dimension. Its *rows* are the smallest
   groups of trailing dimensions with at least 1024 bytes. A row consists of signed little-endian words of 4 bytes,
   padded with zeros at its end, and is cut into *tiles* of 512 words.
2. Per tile and *column* (eight independent instances), ``y = sum(b[place in tile] * word)`` with b from
   -2**13 to 2**13 - 1. Every partial sum is an integer of at most 2**53, so double precision is
   exact in any order of additions, and the matrix products of BLAS do the work.
3. Per column, ``t = sum(a[tile] * y)`` in whole numbers of any size; a has 48 bits.
4. The sum is ``sum(g[column] * t) mod 2**127 - 1``.

A slice that begins or ends within a word has zeros for the other bytes: a word is itself a weighted sum of its
bytes, so the parts still add up.

The probability that two different tensors have the same sum: their difference has a tile with a word d != 0. For any
other weights, at most one of the 2**14 values of d's weight b makes that tile's y zero; otherwise at most one of the
2**48 values of its weight a makes t zero. So a column misses the difference with probability 2**-14 + 2**-48 at most,
and the columns are independent: all eight miss it with 2**-111 at most. The last step adds 2**-127. This holds for
accidental damage. It is no protection against forgery: the weights are fixed and public.

Weights come from the splitmix64 generator (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", 2014). They are part of the fingerprint's definition: any change here
needs another `VERSION`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.formats.dtypes import NO_ARRAYS
from reshard.errors import CheckpointError
from reshard.text.messages import number_ranges, quoted
from reshard.text.names import belongs_to_rank
from reshard.verification.boxes import Box, volume_of, whole_box
from reshard.verification.operations import same_nans
from reshard.verification.reading import Reading, Task, blocks, run_tasks
from reshard.verification.stored import Content, Source, StoredTensor, value_content

VERSION = "reshard-1"
PRIME = 2**127 - 1

_LEAST_ROW = 1024
_WORD = 4
_TILE = 512
_TILE_BYTES = _TILE * _WORD
_COLUMNS = 8
_INNER_BITS = 13
# Words per matrix product: OpenBLAS starts threads of its own above 2**18 multiplications.
_PRODUCT = (1 << 18) // _COLUMNS
# The sum of this many terms of 51 bits fits an int64.
_MOST_TILES = 1 << 12
_FEW_TILES = 2

_BLOCK = 1 << 19

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.uint64]


class Workspace:
    """The buffer of one thread; sums boxes, a block at a time."""

    # Padded rows exist twice; 3 MiB are for tiles and products.
    LEAST_MEMORY = (3 << 20) + 2 * _BLOCK

    def __init__(self, block: int = _BLOCK) -> None:
        self._block = block
        self._floats = np.empty(_PRODUCT, dtype=np.float64)

    def sum(self, shape: Sequence[int], item_size: int, box: Box, content: Bytes) -> int:
        """The sum over a box of a tensor of this shape; ``content`` is the box's bytes in C order.

        Returns:
            A number below `PRIME`.
        """
        rows = _Rows((*shape, item_size), (*box, (0, item_size)))
        totals = [0] * _COLUMNS
        for block in rows.blocks(self._block):
            raw = content[block.offset : block.offset + block.nbytes]
            for column, total in enumerate(self._add(rows, block, rows.dense(raw, block))):
                totals[column] += total
        return sum(factor * total for factor, total in zip(_factors(), totals)) % PRIME

    def _add(self, rows: _Rows, block: _RowBlock, content: Bytes) -> list[int]:
        """Each column's t of a block, of shape (rows, bytes of each from ``block.start`` on)."""
        words = _words(content, block.start)
        start = block.start // _WORD
        stop = start + words.shape[1]
        # The end of a tile, whole tiles, and the beginning of the last one.
        edges = sorted({start, min(-(-start // _TILE) * _TILE, stop), max(stop // _TILE * _TILE, start), stop})
        sums, tiles = [], []
        row_tiles = (rows.numbers(block) * np.uint64(rows.tiles))[:, None]
        for begin, end in itertools.pairwise(edges):
            width = min(_TILE, end - begin)
            part = words[:, begin - start : end - start].reshape(len(words), -1, width)
            sums.append(self._tile_sums(part, begin % _TILE))
            numbers = np.arange(begin // _TILE, begin // _TILE + part.shape[1], dtype=np.uint64)
            tiles.append((row_tiles + numbers).reshape(-1))
        return _weighted(np.concatenate(tiles), np.concatenate(sums))

    def _tile_sums(self, part: Words, place: int) -> Floats:
        """Every tile's y, for words of shape (rows, tiles, words) that begin at a place in their tile."""
        rows, tiles, width = part.shape
        weights = _inner_weights()[place : place + width]
        sums = np.empty((rows, tiles, _COLUMNS))
        most = _PRODUCT // width
        some_tiles = min(tiles, most)
        some_rows = max(1, most // tiles)
        for row in range(0, rows, some_rows):
            for tile in range(0, tiles, some_tiles):
                where = (slice(row, row + some_rows), slice(tile, tile + some_tiles))
                exact = self._floats[: part[where].size].reshape(-1, width)
                np.copyto(exact.reshape(part[where].shape), part[where])
                np.matmul(exact, weights, out=sums[where].reshape(-1, _COLUMNS))
        return sums.reshape(-1, _COLUMNS)


class _RowBlock(NamedTuple):
    """A part of a box that is read at once: whole rows, or a part of one row.

    Attributes:
        row: the first row, counted within the box.
        rows: number of rows.
        start: the first byte within the full tensor's row.
        positions: number of positions of the row's first dimension.
        offset: offset of the block in the box's bytes.
        nbytes: bytes of the box in it.
    """

    row: int
    rows: int
    start: int
    positions: int
    offset: int
    nbytes: int


class _Rows:
    """A box of a tensor of bytes, as parts of the tensor's rows."""

    def __init__(self, shape: tuple[int, ...], box: Box) -> None:
        group = len(shape) - 1
        while group and math.prod(shape[group:]) < _LEAST_ROW:
            group -= 1
        self.tiles = -(-math.prod(shape[group:]) // _TILE_BYTES)
        self._outer_shape, self._outer_box = shape[:group], box[:group]
        self._first, self._last = box[group]
        # Bytes of a position of the row's first dimension, in the tensor and in the box.
        self._unit_shape, self._unit_box = shape[group + 1 :], box[group + 1 :]
        self._unit = math.prod(self._unit_shape)
        self._held = math.prod(stop - start for start, stop in self._unit_box)

    def blocks(self, most: int) -> Iterator[_RowBlock]:
        """The blocks of at most ``most`` bytes each, including places outside the box."""
        rows = math.prod(stop - start for start, stop in self._outer_box)
        positions = self._last - self._first
        if not rows * positions * self._held:
            return
        most = min(most, (_MOST_TILES - 2) * _TILE_BYTES)
        width = positions * self._unit
        if width <= most:
            at_once = min(most // width, _MOST_TILES // (width // _TILE_BYTES + 2))
            for row in range(0, rows, at_once):
                yield self._block(row, min(at_once, rows - row), self._first, positions)
            return
        at_once = most // self._unit
        if at_once >= _TILE_BYTES:
            # A tile ends after a multiple of this many positions.
            at_once -= at_once % _TILE_BYTES
        for row in range(rows):
            for begin in range(self._first // at_once * at_once, self._last, at_once):
                position = max(begin, self._first)
                yield self._block(row, 1, position, min(begin + at_once, self._last) - position)

    def _block(self, row: int, rows: int, position: int, positions: int) -> _RowBlock:
        offset = (row * (self._last - self._first) + position - self._first) * self._held
        return _RowBlock(row, rows, position * self._unit, positions, offset, rows * positions * self._held)

    def numbers(self, block: _RowBlock) -> Numbers:
        """The block's rows as rows of the full tensor."""
        remaining = np.arange(block.row, block.row + block.rows)
        numbers, stride = np.zeros(block.rows, dtype=np.int64), 1
        for size, (start, stop) in zip(reversed(self._outer_shape), reversed(self._outer_box)):
            numbers += (remaining % (stop - start) + start) * stride
            remaining //= stop - start
            stride *= size
        return numbers.astype(np.uint64)

    def dense(self, raw: Bytes, block: _RowBlock) -> Bytes:
        """The block as (rows, bytes), with zeros outside the box, which add nothing."""
        if self._held != self._unit:
            filled = np.zeros((block.rows * block.positions, *self._unit_shape), raw.dtype)
            inside = tuple(slice(start, stop) for start, stop in self._unit_box)
            filled[(slice(None), *inside)] = raw.reshape(-1, *(stop - start for start, stop in self._unit_box))
            raw = filled
        return raw.reshape(block.rows, -1)


def _words(content: Bytes, start: int) -> Words:
    """Rows of bytes as words; zeros complete the first and the last word."""
    rows, width = content.shape
    before = start % _WORD
    after = -(before + width) % _WORD
    if before or after:
        filled = np.zeros((rows, before + width + after), dtype=np.uint8)
        filled[:, before : before + width] = content
        content = filled
    return content.view("<i4")


def _weighted(tiles: Numbers, sums: Floats) -> list[int]:
    """Each column's t of at most `_MOST_TILES` tiles."""
    columns = np.arange(_COLUMNS, dtype=np.uint64)
    weights = _splitmix64(tiles[:, None] * np.uint64(_COLUMNS) + columns, 1)
    if len(tiles) <= _FEW_TILES:
        # Python's integers are faster than NumPy for small arrays.
        rows = zip((weights >> np.uint64(16)).tolist(), sums.tolist())
        products = [[factor * int(number) for factor, number in zip(*row)] for row in rows]
        return [sum(column) for column in zip(*products)]
    high = (weights >> np.uint64(40)).astype(np.int64)
    low = (weights >> np.uint64(16) & np.uint64(0xFFFFFF)).astype(np.int64)
    integers = sums.astype(np.int64)
    upper, lower = integers >> 27, integers & 0x7FFFFFF
    parts = [(upper, high, 51), (upper, low, 27), (lower, high, 24), (lower, low, 0)]
    totals = [0] * _COLUMNS
    for numbers, factors, shift in parts:
        for column, total in enumerate(np.einsum("tc,tc->c", numbers, factors).tolist()):
            totals[column] += total << shift
    return totals


@cache
def _inner_weights() -> Floats:
    """b: shape (words of a tile, columns)."""
    drawn = _splitmix64(np.arange(_TILE * _COLUMNS, dtype=np.uint64).reshape(_TILE, _COLUMNS), 3)
    return (drawn >> np.uint64(63 - _INNER_BITS)).astype(np.float64) - float(1 << _INNER_BITS)


@cache
def _factors() -> list[int]:
    drawn = _splitmix64(np.arange(2 * _COLUMNS, dtype=np.uint64), 2).tolist()
    return [(high << 64 | low) % PRIME for high, low in zip(drawn[::2], drawn[1::2])]


def _splitmix64(counters: Numbers, stream: int) -> Numbers:
    """A random number for every counter; each use has a ``stream`` of its own."""
    golden = 0x9E3779B97F4A7C15
    begin = (stream << 60) * golden
    mixed = counters * np.uint64(golden) + np.uint64(begin % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def fingerprint(name: str, dtype: str, shape: Sequence[int], total: int) -> str:
    """The fingerprint of a parameter: 32 hexadecimal digits."""
    text = repr((VERSION, name, dtype, tuple(shape), total))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


_K = TypeVar("_K")

MAX_SLICES = 1 << 14
"""Slices in memory at a time: some MB."""


def sums(parts: Iterable[tuple[_K, Content, Box]], means: Reading) -> Iterator[tuple[_K, int]]:
    """Sum boxes of tensors, several at a time.

    Args:
        parts: per part a key, the tensor and the box; consumed lazily.
        means: files, threads and memory; the caller begins and ends the progress.

    Yields:
        The key of each part, and its sum, in order.
    """
    parts = iter(parts)
    spaces = threading.local()

    def block_sum(number: int, content: Content, block: Box) -> tuple[int, int]:
        if not hasattr(spaces, "space"):
            spaces.space = Workspace()
        words = content.read(block, means.handles)
        if content.cast:
            same_nans(words, content.dtype)
        content_bytes = words.reshape(-1).view(np.uint8)
        return number, spaces.space.sum(content.shape, content.item_size, block, content_bytes)

    while some := [*itertools.islice(parts, MAX_SLICES)]:
        totals = [0] * len(some)

        def tasks(some: Sequence[tuple[_K, Content, Box]] = some) -> Iterator[Task]:
            for number, (_, content, box) in enumerate(some):
                means.read.update(content.paths())
                for block in blocks(content, box, means) if volume_of(box) else ():
                    yield Task(volume_of(block) * content.item_size, block_sum, (number, content, block))

        def add(result: tuple[int, int], totals: list[int] = totals) -> None:
            number, total = result
            totals[number] = (totals[number] + total) % PRIME

        run_tasks(tasks(), means, add, Workspace.LEAST_MEMORY)
        yield from zip((key for key, _, _ in some), totals)


class Fingerprint(NamedTuple):
    """The fingerprint of a tensor, or of a value in the lowest file that holds it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fingerprint: str


class Fingerprints(NamedTuple):
    """The fingerprints of a checkpoint.

    Attributes:
        parameters: of every tensor and value, by name.
        differing: values whose copies differ between files, except those that belong to a rank.
    """

    parameters: list[Fingerprint]
    differing: list[str]

    def whole(self) -> str:
        """One fingerprint of the checkpoint.

        Text, map tensors and rank-specific values do not count: conversions may drop or change them.
        """
        counted = [each for each in self.parameters if each.dtype not in NO_ARRAYS and not belongs_to_rank(each.name)]
        text = repr((VERSION, [each.fingerprint for each in counted]))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The documented JSON."""
        parameters = [each._asdict() for each in self.parameters]
        return {"version": VERSION, "fingerprint": self.whole(), "parameters": parameters}


def fingerprints(
    source: Source,
    means: Reading,
    admit: Callable[[str], bool] = lambda name: True,
    model_names: Mapping[str, str] | None = None,
) -> Fingerprints:
    """Sum every distinct slice once, from its lowest file, and every copy of a value of a complete checkpoint.

    Tensors of a trainer's state count under their ``model_names``.

    Raises:
        CheckpointError: pipeline stages that share a parameter hold different values.
        ReshardError: a file cannot be read, or a parameter contradicts the strategy.
    """
    new_names = model_names or {}
    tensors = {new_names.get(name, name): source.tensors[name] for name in source.tensors if admit(name)}
    values = {name: files for name, files in source.values.items() if admit(name)}
    copies = [(name, value_content(source.indexes, name, file)) for name, files in values.items() for file in files]
    nbytes = sum(content.item_size * volume_of(whole_box(content.shape)) for _, content in copies)
    nbytes += sum(part.item_size * volume_of(box) for each in tensors.values() for _, part, box in _slices(each))
    result: list[Fingerprint] = []
    differing: list[str] = []
    with means.counting(nbytes, "reading"):
        parts = (((name, stage), part, box) for name, tensor in tensors.items() for stage, part, box in _slices(tensor))
        for name, group in itertools.groupby(sums(parts, means), key=lambda item: item[0][0]):
            totals: dict[int, int] = {}
            for (_, stage), slice_sum in group:
                totals[stage] = (totals.get(stage, 0) + slice_sum) % PRIME
            if len(set(totals.values())) > 1:
                raise _stages_differ(name, totals)
            tensor = tensors[name]
            digest = fingerprint(name, tensor.dtype, tensor.shape, next(iter(totals.values())))
            result.append(Fingerprint(name, tensor.dtype, tensor.shape, digest))
        value_sums = sums(((name, content, whole_box(content.shape)) for name, content in copies), means)
        for name, some_sums in itertools.groupby(value_sums, key=lambda item: item[0]):
            headers = [source.value(name, file) for file in values[name]]
            kinds = [(each.dtype, each.shape, total) for each, (_, total) in zip(headers, some_sums)]
            result.append(Fingerprint(name, *kinds[0][:2], fingerprint(name, *kinds[0])))
            if len(set(kinds)) > 1 and not belongs_to_rank(name):
                differing.append(name)
    return Fingerprints(sorted(result), sorted(differing))


def _slices(tensor: Content) -> Iterator[tuple[int, Content, Box]]:
    """The boxes to sum of a tensor: its stage, the tensor with the slices of that stage alone, and the box."""
    complete = tensor.whole_slice_sets() if isinstance(tensor, StoredTensor) else []
    if not isinstance(tensor, StoredTensor) or not complete:
        yield 0, tensor, whole_box(tensor.shape)
        return
    for slices in complete:
        for box in sorted(box for box, files in slices.files_of.items() if files):
            yield slices.number, replace(tensor, slice_sets=(slices,)), box


def _stages_differ(name: str, stages: Mapping[int, int]) -> CheckpointError:
    return CheckpointError(
        f"{quoted(name)} has different values in pipeline stages {number_ranges(stages)}, which share it",
        parameter=name,
        hint="`reshard verify --replicas` shows where copies differ",
    )
