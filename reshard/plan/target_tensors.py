"""The tensors of a target file, in columns, and their order; objects are made on demand.

A file may have hundreds of thousands, and several files are written at a time. Tensors of one kind share everything
but their names and the places of their slices.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Optional, Union, overload
from weakref import WeakValueDictionary

from reshard.checkpoints import OutputLayout, OutputTensor, Tensor
from reshard.checkpoints.checkpoint import Addition, GlobalTensor
from reshard.checkpoints.formats.dtypes import MEMORY
from reshard.forms.target import Cut, TargetForm
from reshard.layout import Box, Cell, shape_of, whole_box
from reshard.plan.pieces import Piece, StoredSlice, TargetTensor

if TYPE_CHECKING:
    from reshard.layout.views import Region

StoredAt = Callable[[str, int, int, Box], StoredSlice]
"""The stored slice for a parameter's name, the number of its source tensor, a rank and a box."""


class CellSource(NamedTuple):
    """A cell of one kind of parameter, and its source rank and slice.

    Attributes:
        box: the cell.
        rank: the source rank.
        source_box: the slice.
        region: elements of the cell and of the slice; None for the whole cell.
        dtype: type of the stored elements, where they are cast.
    """

    box: Box
    rank: int
    source_box: Box
    region: Optional[Region] = None
    dtype: Optional[str] = None


class Alike(NamedTuple):
    """Tensors of one target file with equal slices and sources.

    Attributes:
        item_size: bytes of an element.
        box: the slice of each of them.
        takes: the sources of its cells.
        dtype: their type, where elements are cast.
        padded: whether some elements are in no source.
    """

    item_size: int
    box: Box
    takes: tuple[CellSource, ...]
    dtype: Optional[str] = None
    padded: bool = False


class FileOrder:
    """The order and layout of files with the same tensors.

    Args:
        names: the names, in the order of the file.
        numbers: the caller's number of each tensor.
        layout: the layout.
    """

    def __init__(self, names: list[str], numbers: array[int], layout: OutputLayout) -> None:
        self.names = names
        self.numbers = numbers
        self.layout = layout


class TargetTensors(Sequence[TargetTensor]):
    """The tensors of one file.

    Args:
        order: the order; its numbers count ``alike``, then ``single``.
        alike: the kinds of parameters.
        single: tensors that are of no kind.
        stored_at: the places of slices.
        added: the addition to a tensor, by name; None without one.
    """

    def __init__(
        self,
        order: FileOrder,
        alike: Sequence[Alike],
        single: Sequence[TargetTensor],
        stored_at: StoredAt,
        added: Optional[Callable[[str], Optional[Addition]]] = None,
    ) -> None:
        self._order = order
        self._alike = alike
        self._single = single
        self._stored_at = stored_at
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
        if number >= len(self._alike):
            return self._single[number - len(self._alike)]
        name = self._order.names[place]
        item_size, box, takes, dtype, padded = self._alike[number]
        pieces = tuple(self._piece(name, take) for take in takes)
        added = None if self._added is None else self._added(name)
        return TargetTensor(name, item_size, box, pieces, dtype, padded, added)

    def _piece(self, name: str, take: CellSource) -> Piece:
        source = 0 if take.region is None else take.region.source
        stored = self._stored_at(name, source, take.rank, take.source_box)
        return Piece(stored, take.box, take.region, take.dtype)


class Kind(NamedTuple):
    """Tensors that are cut alike and held by the same source files.

    Attributes:
        cut: how they are cut.
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


class Orders:
    """The orders of target files; files of the same tensors share one.

    Args:
        form: the target files.
    """

    def __init__(self, form: TargetForm) -> None:
        self._form = form
        self._format = form.format
        self._orders: WeakValueDictionary[object, FileOrder] = WeakValueDictionary()
        self._last: Optional[FileOrder] = None

    def of(
        self,
        section: int,
        kinds: Sequence[Kind],
        boxes: Sequence[Box],
        values: Sequence[Tensor],
        names: Optional[Collection[str]],
    ) -> FileOrder:
        """The order and layout of a file of these tensors.

        Args:
            section: number of the file's section.
            kinds: the kinds of its tensors.
            boxes: the slice, per kind.
            values: its copied values.
            names: the kinds' tensors in this file; None for all.
        """
        value_types = tuple((value.name, value.dtype, value.dims, value.nbytes) for value in values)
        shapes = [shape_of(box) for box in boxes]
        differing = tuple(boxes) if self._form.boxed else tuple(shapes)
        key = (section, differing, value_types, None if names is None else frozenset(names))
        order = self._orders.get(key)
        if order is None:
            order = self._orders[key] = self._make(kinds, boxes, shapes, values, names)
        # Other orders live as long as a file that is being written refers to them.
        self._last = order
        return order

    def _make(
        self,
        kinds: Sequence[Kind],
        boxes: Sequence[Box],
        shapes: Sequence[tuple[int, ...]],
        values: Sequence[Tensor],
        names: Optional[Collection[str]],
    ) -> FileOrder:
        entries = [
            (tensor.name, number)
            for number, kind in enumerate(kinds)
            for tensor in kind.tensors
            if names is None or tensor.name in names
        ]
        entries += ((stored.name, len(kinds) + number) for number, stored in enumerate(values))
        # The choice of source files must not change the order. In .safetensors wider
        # elements come first, which keeps every tensor aligned.
        if self._format not in ("ckpt", MEMORY):
            widths = [kind.item_size if math.prod(shape) else 0 for kind, shape in zip(kinds, shapes)]
            widths += (stored.item_size if stored.nbytes and math.prod(stored.shape) else 0 for stored in values)
            entries.sort(key=lambda entry: (-widths[entry[1]], entry[0]))
        else:
            entries.sort(key=lambda entry: entry[0])
        sizes = [math.prod(shape) * kind.item_size for kind, shape in zip(kinds, shapes)]
        outputs = []
        for name, number in entries:
            if number < len(kinds):
                # Tensors of one kind are of one type.
                dtype = kinds[number].tensors[0].dtype
                outputs.append(OutputTensor(name, dtype, shapes[number], sizes[number]))
            else:
                stored = values[number - len(kinds)]
                dims = stored.dims if self._format == "ckpt" else stored.shape
                outputs.append(OutputTensor(name, stored.dtype, dims, stored.nbytes))
        parts = [*boxes, *(whole_box(stored.shape) for stored in values)]
        layout = self._form.lay_out(outputs, [parts[number] for _, number in entries])
        return FileOrder([name for name, _ in entries], array("I", (number for _, number in entries)), layout)
