"""Tensors that are in no file, but made of the elements of others: read where these are, and put where they go.

A box of such a tensor is made in tiles that fit into memory. Of every tile `origins` tells which elements of which
tensors it has, index by index; these are read from the files, cast by `rounding`, and put into their places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, Union

import numpy as np
import numpy.typing as npt

from reshard.checkpoints import FileHandles
from reshard.errors import CheckpointError
from reshard.layout import Box
from reshard.names import SizedOperation
from reshard.text.wording import quoted
from reshard.verification.origins import Axis, Indices, Origin, Shape, origins
from reshard.verification.parameter import Parameter
from reshard.verification.parts import Readable
from reshard.verification.rounding import words_as
from reshard.verification.tree import Tree

Words = npt.NDArray[Any]
Selection = Union[slice, Indices]

_LEAST_TILE, _MOST_TILE = 1 << 18, 1 << 23
# What is read beside a tile, and on the way into it, together with the tile itself.
_COPIES = 6
# Where dimensions mix, every element has several indices of eight bytes.
_INDEXED = 16
# So many bytes are read anew rather than passed over.
_GAP = 4 << 10
_SPARSE = 8


@dataclass(frozen=True)
class Recipe:
    """How a tensor is made.

    Attributes:
        name: its name.
        shape: its shape.
        dtype: MindSpore's name of its element type.
        item_size: bytes of an element.
        sources: the tensors that the operations take, in order.
        operations: what is done with them, one after the other.
        number: of the tensor in the list that this makes.
        cast: whether elements of another type are cast; else there are none of another type.
    """

    name: str
    shape: Shape
    dtype: str
    item_size: int
    sources: tuple[Parameter, ...]
    operations: tuple[SizedOperation, ...]
    number: int
    cast: bool

    @property
    def mixes(self) -> bool:
        """Whether an operation may mix dimensions."""
        return any(operation.kind == "reshape" for operation in self.operations)

    def origins(self, box: Box) -> list[Origin]:
        """Where the elements of a box, at least one, come from."""
        return origins(self.operations, [source.shape for source in self.sources], self.number, box)


class MadePart(NamedTuple):
    """A box of a tensor that is made; see `reading.Readable`.

    Attributes:
        recipe: how it is made.
        tree: the files of its sources.
        box: the box.
        paths: the files of which some may be read.
        like_type: see `reading.Readable`.
    """

    recipe: Recipe
    tree: Tree
    box: Box
    paths: tuple[str, ...]
    like_type: Optional[str] = None

    @property
    def shape(self) -> Shape:
        """Shape of the full parameter."""
        return self.recipe.shape

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return self.recipe.item_size

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return self.item_size * _volume(self.box)

    def of_box(self, box: Box) -> MadePart:
        """A smaller box of it."""
        return self._replace(box=box)

    def with_like(self, dtype: Optional[str]) -> MadePart:
        """The same with another ``like_type``."""
        return self._replace(like_type=dtype)

    def pieces(self, memory: int) -> Iterator[MadePart]:
        """The same in tiles; one that is cut shows long runs of the source and of the tensor."""
        if not self.nbytes:
            return
        runs = self._run_dimensions() if self.nbytes > _LEAST_TILE else set()
        each = _COPIES * (_INDEXED if self.recipe.mixes and self._is_mixed(runs) else 1)
        most = max(_LEAST_TILE, min(memory // each, _MOST_TILE))
        for box in _tiles(self.box, most // self.item_size, runs):
            yield self.of_box(box)

    def opened(self, handles: FileHandles, memory: int) -> _Tile:
        """Its bytes."""
        return _Tile(_Reader(self, handles).made())

    def _is_mixed(self, runs: set[int]) -> bool:
        """Whether indices, of the elements of a small tile, are nearly as many as elements."""
        tile = next(_tiles(self.box, _LEAST_TILE // self.item_size, runs))
        lengths = (axis.length for origin in self.recipe.origins(tile) for axis in origin.axes)
        return max(lengths, default=0) > _volume(tile) // _INDEXED

    def _run_dimensions(self) -> set[int]:
        """The dimensions along which neighbours are neighbours in a file as well, or in the tensor."""
        found = {len(self.box) - 1}
        corner = tuple((start, min(start + 2, stop)) for start, stop in self.box)
        for origin in self.recipe.origins(corner):
            last = len(self.recipe.sources[origin.tensor].shape) - 1
            if last >= 0:
                found.update(list(origin.taken(last)[1].here)[-1:])
        return found


class _Tile:
    """Bytes that are in memory."""

    def __init__(self, array: Words) -> None:
        self._content = array.reshape(-1).view(np.uint8).data

    def read(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from ``offset`` on."""
        out[:] = self._content[offset : offset + len(out)]


class _Reader:
    """Makes a tile."""

    def __init__(self, part: MadePart, handles: FileHandles) -> None:
        self._recipe, self._tree, self._box, self._handles = part.recipe, part.tree, part.box, handles

    def made(self) -> Words:
        """The tile's elements, of its shape."""
        tile = np.zeros([stop - start for start, stop in self._box], _word(self._recipe.item_size))
        for origin in self._recipe.origins(self._box):
            self._put(origin, tile)
        return tile

    def _put(self, origin: Origin, tile: Words) -> None:
        source = self._recipe.sources[origin.tensor]
        unique: list[Indices] = []
        places: list[Indices] = []
        for dimension in range(len(source.shape)):
            indices, inverse = np.unique(origin.taken(dimension)[1].there[dimension], return_inverse=True)
            unique.append(indices)
            places.append(inverse.reshape(-1))
        wanted = math.prod(axis.length for axis in origin.axes)
        if math.prod(map(len, unique)) > _SPARSE * wanted:
            # Of indices that are mixed few combinations are there; of a part of them fewer are not.
            number = max(range(len(origin.axes)), key=lambda each: origin.axes[each].length)
            axis = origin.axes[number]
            first_half = np.arange(axis.length) < axis.length // 2
            for half in (first_half, ~first_half):
                self._put(origin.with_axis(number, axis.chosen(half), origin.tensor), tile)
            return
        self._place(origin, self._stored(source, unique), places, tile)

    def _stored(self, source: Parameter, unique: Sequence[Indices]) -> Words:
        """All combinations of some indices per dimension, as words of the made tensor's type."""
        item_size = self._tree.sample(source).item_size
        found = np.empty([len(indices) for indices in unique], _word(item_size))
        inner = item_size
        spans: list[list[tuple[int, int]]] = []
        for indices in reversed(unique):
            spans.insert(0, _spans(indices, _GAP // inner))
            inner *= len(indices)
        for box in _products(spans):
            for some in _tiles(box, _LEAST_TILE * 4 // item_size, {len(box) - 1}):
                for _, part in self._tree.parts(source, [some]):
                    self._read(part, unique, found)
        if source.dtype == self._recipe.dtype:
            return found
        if not self._recipe.cast:
            raise CheckpointError(
                f"{quoted(self._recipe.name)} would be made of elements of types {self._recipe.dtype} and "
                f"{source.dtype} ({quoted(source.name)})",
                parameter=self._recipe.name,
            )
        return words_as(found, source.dtype, self._recipe.dtype)

    def _read(self, part: Readable, unique: Sequence[Indices], found: Words) -> None:
        """Read those of the elements that a file holds of a box."""
        here, there = [], []
        for indices, (start, stop) in zip(unique, part.box):
            first, last = np.searchsorted(indices, (start, stop))
            if first == last:
                # All of it lies between those that are wanted.
                return
            here.append(slice(int(first), int(last)))
            there.append(_selection(indices[first:last] - start))
        read = np.empty([stop - start for start, stop in part.box], found.dtype)
        part.opened(self._handles, 0).read(0, read.reshape(-1).view(np.uint8).data)
        found[tuple(here)] = _chosen(read, there)

    def _place(self, origin: Origin, stored: Words, places: Sequence[Indices], tile: Words) -> None:
        """Put elements where they go, all of which are a product of the origin's axes."""
        axes = origin.axes
        if all(len(axis.there) <= 1 and len(axis.here) <= 1 and (axis.there or axis.length == 1) for axis in axes):
            self._place_product(axes, stored, places, tile)
            return
        taken: list[Indices] = []
        for dimension in range(stored.ndim):
            number, _ = origin.taken(dimension)
            taken.append(_along(places[dimension], number, len(axes)))
        given: list[Indices] = []
        for dimension in range(tile.ndim):
            number = next(number for number, axis in enumerate(axes) if dimension in axis.here)
            given.append(_along(axes[number].here[dimension], number, len(axes)))
        tile[tuple(given)] = stored[tuple(taken)]

    def _place_product(self, axes: Sequence[Axis], stored: Words, places: Sequence[Indices], tile: Words) -> None:
        """Likewise, where each axis is a dimension of the source and one of the tile, or has one element."""
        behind = {here: there for axis in axes for here in axis.here for there in axis.there}
        alone = [there for axis in axes if not axis.here for there in axis.there]
        selections = [_selection(indices) for _, indices in sorted(_positions(axes), key=lambda one: one[0])]
        taken = _chosen(stored, [_selection(each) for each in places])
        shape = [taken.shape[behind[here]] if here in behind else 1 for here in range(tile.ndim)]
        taken = taken.transpose([*alone, *(behind[here] for here in sorted(behind))]).reshape(shape)
        if sum(not isinstance(each, slice) for each in selections) > 1:
            every = [np.arange(size)[each] for size, each in zip(tile.shape, selections)]
            tile[np.ix_(*every)] = taken
        else:
            tile[tuple(selections)] = taken


def _positions(axes: Sequence[Axis]) -> list[tuple[int, Indices]]:
    """Every dimension of a tile with the places in it."""
    return [(dimension, indices) for axis in axes for dimension, indices in axis.here.items()]


def _volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def _word(item_size: int) -> str:
    return f"<u{item_size}" if item_size in (1, 2, 4, 8) else f"V{item_size}"


def _tiles(box: Box, most: int, runs: set[int]) -> Iterator[Box]:
    """A box in boxes of at most so many elements; dimensions of runs are cut last, and then the longest first."""
    if _volume(box) <= max(1, most):
        yield box
        return
    lengths = [stop - start for start, stop in box]
    dimension = next(
        (number for number, length in enumerate(lengths) if length > 1 and number not in runs),
        max(range(len(box)), key=lengths.__getitem__),
    )
    start, stop = box[dimension]
    middle = (start + stop) // 2
    for interval in ((start, middle), (middle, stop)):
        yield from _tiles((*box[:dimension], interval, *box[dimension + 1 :]), most, runs)


def _spans(indices: Indices, gap: int) -> list[tuple[int, int]]:
    """Intervals that hold ascending indices and no more than so many others in a row."""
    edges = np.flatnonzero(np.diff(indices) > gap + 1) + 1
    return [(int(some[0]), int(some[-1]) + 1) for some in np.split(indices, edges)]


def _products(spans: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Box]:
    if not spans:
        yield ()
        return
    for interval in spans[0]:
        for rest in _products(spans[1:]):
            yield (interval, *rest)


def _selection(indices: Indices) -> Selection:
    """Indices as a slice, where they are evenly spaced."""
    if len(indices) == 1:
        return slice(int(indices[0]), int(indices[0]) + 1)
    steps = np.diff(indices)
    step = int(steps[0])
    if step > 0 and (steps == step).all():
        return slice(int(indices[0]), int(indices[-1]) + 1, step)
    return indices


def _chosen(array: Words, selections: Sequence[Selection]) -> Words:
    """The product of some indices per dimension."""
    found = array[tuple(each if isinstance(each, slice) else slice(None) for each in selections)]
    for dimension, each in enumerate(selections):
        if not isinstance(each, slice):
            found = np.take(found, each, dimension)
    return found


def _along(indices: Indices, number: int, count: int) -> Indices:
    """Indices that vary along one of so many axes."""
    return indices.reshape([-1 if each == number else 1 for each in range(count)])
