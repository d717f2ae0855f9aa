"""Types of the plan: boxes of stored tensors that make a target tensor, and the tensors of a target file.

All boxes are in elements of the full logical tensor, so that source and target need no common origin. The executor
uses these types and no layouts.

A file may have hundreds of thousands of tensors, and several files are written at a time. Tensors of one kind share
everything but their names and the places of their slices, so objects are made on demand.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Optional, Union, overload

from reshard.checkpoints import OutputLayout, OutputTensor, Tensor
from reshard.checkpoints.checkpoint import Addition, GlobalTensor
from reshard.checkpoints.checkpoint import StoredSlice as StoredSlice
from reshard.checkpoints.formats.dtypes import ITEM_SIZES, MEMORY
from reshard.forms.target import Cut, TargetForm
from reshard.layout import Box, Cell, shape_of, volume_of, whole_box

if TYPE_CHECKING:
    from reshard.layout.views import Region


class Piece(NamedTuple):
    """A part of the full tensor, contained in one stored slice.

    Attributes:
        box: a box around the part.
        region: its elements of the box, and of the slice's tensor; None for the whole box, at the same place in
            that tensor.
        dtype: type of the stored elements, where they are cast; None where they are copied.
    """

    source: StoredSlice
    box: Box
    region: Optional[Region] = None
    dtype: Optional[str] = None

    @property
    def source_number(self) -> int:
        """The number of the source tensor, of an edited tensor made of several."""
        return 0 if self.region is None else self.region.source

    @property
    def volume(self) -> int:
        return volume_of(self.box) if self.region is None else self.region.volume

    @property
    def elements(self) -> object:
        """A key of the elements of the stored tensor; pieces with the same elements have equal keys."""
        if self.region is None:
            return self.box
        loops = sorted((loop.source_dimension, loop.source_step, loop.length) for loop in self.region.loops)
        return self.region.source_origin, tuple(loops)

    def stored_size(self, item_size: int) -> int:
        """Bytes of a stored element; ``item_size`` where elements are not cast."""
        return item_size if self.dtype is None else ITEM_SIZES[self.dtype]


class TargetTensor(NamedTuple):
    """One tensor of a target file: a box of the full tensor, exactly covered by pieces, or zero elsewhere.

    Attributes:
        item_size: bytes of an element.
        pieces: its pieces, without overlaps.
        dtype: its type, where elements are cast; None where all are copied.
        padded: whether some elements are in no piece.
        added: the addition to the elements.
    """

    name: str
    item_size: int
    box: Box
    pieces: tuple[Piece, ...]
    dtype: Optional[str] = None
    padded: bool = False
    added: Optional[Addition] = None

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.box)

    @property
    def nbytes(self) -> int:
        return volume_of(self.box) * self.item_size


class TargetFile(NamedTuple):
    """A target file: its layout and the sources of its bytes.

    Attributes:
        layout: literal bytes and tensor data in file order.
        tensors: the tensors, numbered as in ``layout``.
        source_paths: the source files of its bytes.
    """

    rank: int
    path: str
    layout: OutputLayout
    tensors: Sequence[TargetTensor]
    source_paths: frozenset[str]


class FileOrder:
    """The names, numbers and layout of files with the same tensors, in the order of the file."""

    def __init__(self, names: list[str], numbers: array[int], layout: OutputLayout) -> None:
        self.names = names
        self.numbers = numbers
        self.layout = layout


class TargetTensors(Sequence[TargetTensor]):
    """The tensors of one file.

    Args:
        order: the order; its numbers count ``kinds``, then ``single``.
        kinds: an example of each kind of tensor, without name and extents.
        stored: returns the slice for a tensor's name and a piece of its kind.
        added: returns the addition to a tensor, by name; None without any.
    """

    def __init__(
        self,
        order: FileOrder,
        kinds: Sequence[TargetTensor],
        single: Sequence[TargetTensor],
        stored: Callable[[str, Piece], StoredSlice],
        added: Optional[Callable[[str], Optional[Addition]]] = None,
    ) -> None:
        self._order = order
        self._kinds = kinds
        self._single = single
        self._stored = stored
        self._added = added
        # A writer needs each tensor a few times.
        self._last: Optional[tuple[int, TargetTensor]] = None

    @property
    def names(self) -> Sequence[str]:
        """Their names, in the order of the file, without making a tensor."""
        return self._order.names

    def __len__(self) -> int:
        return len(self._order.names)

    @overload
    def __getitem__(self, place: int) -> TargetTensor: ...

    @overload
    def __getitem__(self, place: slice) -> list[TargetTensor]: ...

    def __getitem__(self, place: Union[int, slice]) -> Union[TargetTensor, list[TargetTensor]]:
        if isinstance(place, slice):
            return [self._tensor(at) for at in range(*place.indices(len(self)))]
        # Several threads write the parts of a file: another may replace the attribute at any moment.
        last = self._last
        if last is None or last[0] != place:
            last = self._last = place, self._tensor(place)
        return last[1]

    def __iter__(self) -> Iterator[TargetTensor]:
        return map(self._tensor, range(len(self)))

    def _tensor(self, place: int) -> TargetTensor:
        number = self._order.numbers[place]
        if number >= len(self._kinds):
            return self._single[number - len(self._kinds)]
        name, kind = self._order.names[place], self._kinds[number]
        pieces = tuple(piece._replace(source=self._stored(name, piece)) for piece in kind.pieces)
        return kind._replace(name=name, pieces=pieces, added=None if self._added is None else self._added(name))


class Kind(NamedTuple):
    """Tensors that are cut alike and held by the same source files.

    Attributes:
        present: the files that hold them, per sharding of the cut.
        item_size: bytes of an element.
        tensors: the tensors, sorted by name, at least one; their sources have the same types.
    """

    cut: Cut
    present: tuple[frozenset[int], ...]
    item_size: int
    tensors: list[GlobalTensor]

    def box_of(self, position: int) -> Box:
        """The slice of a file of the section."""
        return self.cut.overlap.target.slice_box(self.cut.slice_of(position))

    def count(self, names: Optional[Collection[str]]) -> int:
        """The number of its tensors with these names; None counts all."""
        return len(self.tensors) if names is None else sum(tensor.name in names for tensor in self.tensors)

    def holders(self, cell: Cell) -> list[tuple[int, int]]:
        """The files that hold a cell, each with the number of its sharding; none for elements without a source."""
        first = 0 if cell.region is None else self.cut.firsts[cell.region.source] if cell.slices else 0
        holders: list[tuple[int, int]] = []
        for index, number in enumerate(cell.slices, first):
            sharding, present = self.cut.shardings[index], self.present[index]
            holders += [(holder, index) for holder in sharding.holders(number) if holder in present]
        return holders


def order_of(
    form: TargetForm,
    kinds: Sequence[Kind],
    boxes: Sequence[Box],
    values: Sequence[Tensor],
    names: Optional[Collection[str]],
) -> FileOrder:
    """The order and layout of a file.

    Args:
        boxes: the slice, per kind.
        names: the kinds' tensors in this file; None for all.
    """
    shapes = [shape_of(box) for box in boxes]
    entries = [
        (tensor.name, number)
        for number, kind in enumerate(kinds)
        for tensor in kind.tensors
        if names is None or tensor.name in names
    ]
    entries += ((stored.name, len(kinds) + number) for number, stored in enumerate(values))
    # The choice of source files must not change the order. In .safetensors wider
    # elements come first, which keeps every tensor aligned.
    if form.format not in ("ckpt", MEMORY):
        widths = [kind.item_size if math.prod(shape) else 0 for kind, shape in zip(kinds, shapes)]
        widths += (stored.item_size if stored.nbytes and math.prod(stored.shape) else 0 for stored in values)
        entries.sort(key=lambda entry: (-widths[entry[1]], entry[0]))
    else:
        entries.sort(key=lambda entry: entry[0])
    # Tensors of one kind are of one type.
    described = [
        (kind.tensors[0].dtype, shape, math.prod(shape) * kind.item_size) for kind, shape in zip(kinds, shapes)
    ]
    in_ckpt = form.format == "ckpt"
    described += ((stored.dtype, stored.dims if in_ckpt else stored.shape, stored.nbytes) for stored in values)
    outputs = [OutputTensor(name, *described[number]) for name, number in entries]
    parts = [*boxes, *(whole_box(stored.shape) for stored in values)]
    layout = form.lay_out(outputs, [parts[number] for _, number in entries])
    return FileOrder([name for name, _ in entries], array("I", (number for _, number in entries)), layout)
