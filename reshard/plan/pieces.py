"""Types of the plan: boxes of stored tensors that make a target tensor, and the tensors of a target file.

All boxes are in elements of the full logical tensor, so that source and target need no common origin. The executor
uses these types and no layouts.

A file may have hundreds of thousands of tensors, and several files are written at a time. Tensors of one kind share
everything but their names and the places of their slices, so objects are made on demand.

Groups of files are written together. Where the target cuts a tensor's inner dimensions more finely than the source,
several target files contain columns of the same rows. Written one by one, each reads all of these rows; written
together, they read them once. Files that share rows of a tensor are linked; groups are linked files. A kill loses the
files that are being written. So groups are small, unless it costs too much to read shared rows again.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, overload

from reshard.checkpoints import OutputLayout, OutputTensor, Tensor
from reshard.checkpoints.checkpoint import Addition, GlobalTensor
from reshard.checkpoints.checkpoint import StoredSlice as StoredSlice
from reshard.checkpoints.formats.dtypes import ITEM_SIZES, MEMORY
from reshard.forms.target import Cut, Section, TargetForm
from reshard.layout import Box, Cell, Overlap, shape_of, volume_of, whole_box

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
    region: Region | None = None
    dtype: str | None = None

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
    dtype: str | None = None
    padded: bool = False
    added: Addition | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.box)

    @property
    def nbytes(self) -> int:
        return volume_of(self.box) * self.item_size


class SharedRows(NamedTuple):
    """Rows of one tensor of which several members hold columns.

    Rows are numbered in C order over the outer dimensions, in which all members hold the same box.

    Attributes:
        tensors: the tensor as each member holds it.
        outer: their common box of the outer dimensions.
        row_bytes: bytes of a row, per member.
        uses: per stored slice, the members that take a box of it.
        dtype: type of the stored elements, if they are cast.
    """

    tensors: tuple[TargetTensor, ...]
    outer: Box
    first: int
    last: int
    row_bytes: tuple[int, ...]
    uses: tuple[tuple[StoredSlice, tuple[tuple[int, Box], ...]], ...]
    dtype: str | None = None

    @property
    def stored_size(self) -> int:
        return self.tensors[0].item_size if self.dtype is None else ITEM_SIZES[self.dtype]


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


Order = tuple[Sequence[str], Sequence[int], OutputLayout]
"""The names of a file's tensors in the order of the file, a number of each, and the file's layout."""


class TargetTensors(Sequence[TargetTensor]):
    """The tensors of one file.

    Args:
        names: their names, in the order of the file.
        numbers: of each the place in ``kinds``, or behind them in ``single``.
        kinds: an example of each kind of tensor, without name and extents.
        stored: returns the slice of a tensor's source in a file: its name, number of the source, file, box.
        added: returns the addition to a tensor, by name; None without any.
    """

    def __init__(
        self,
        names: Sequence[str],
        numbers: Sequence[int],
        kinds: Sequence[TargetTensor],
        single: Sequence[TargetTensor],
        stored: Callable[[str, int, int, Box], StoredSlice],
        added: Callable[[str], Addition | None] | None = None,
    ) -> None:
        self.names = names
        self._numbers = numbers
        self._kinds = kinds
        self._single = single
        self._stored = stored
        self._added = added
        # A writer needs each tensor a few times.
        self._last: tuple[int, TargetTensor] | None = None

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, place: int) -> TargetTensor: ...

    @overload
    def __getitem__(self, place: slice) -> list[TargetTensor]: ...

    def __getitem__(self, place: int | slice) -> TargetTensor | list[TargetTensor]:
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
        number = self._numbers[place]
        if number >= len(self._kinds):
            return self._single[number - len(self._kinds)]
        name, kind = self.names[place], self._kinds[number]
        pieces = []
        for piece in kind.pieces:
            stored = self._stored(name, piece.source_number, piece.source.rank, piece.source.box)
            pieces.append(piece._replace(source=stored))
        return kind._replace(name=name, pieces=tuple(pieces), added=None if self._added is None else self._added(name))


class TensorKind(NamedTuple):
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

    def count(self, names: Collection[str] | None) -> int:
        """The number of its tensors with these names; None counts all."""
        return len(self.tensors) if names is None else sum(tensor.name in names for tensor in self.tensors)

    def holders(self, cell: Cell) -> list[tuple[int, int]]:
        """The files that hold a cell, each with the number of its sharding; none for elements without a source."""
        first = self.cut.firsts[cell.source_number] if cell.slices else 0
        holders: list[tuple[int, int]] = []
        for index, number in enumerate(cell.slices, first):
            sharding, present = self.cut.shardings[index], self.present[index]
            holders += [(holder, index) for holder in sharding.holders(number) if holder in present]
        return holders


def order_of(
    form: TargetForm,
    kinds: Sequence[TensorKind],
    boxes: Sequence[Box],
    values: Sequence[Tensor],
    names: Collection[str] | None,
) -> Order:
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
    return [name for name, _ in entries], array("I", (number for _, number in entries)), layout


# Every file of a group is open and has a share of the buffers.
MAX_GROUP = 16
# Bytes that are read again for smaller groups, of all bytes that are moved.
_MAX_READ_AGAIN = 0.2


class GroupLimits(NamedTuple):
    """Limits of the number of files that are written at a time.

    Attributes:
        most: of the files of a group.
        in_flight: wanted maximum of files that are written at a time.
        reads_only: whether the time is that of reading, as from a store to a local disk.
    """

    most: int = MAX_GROUP
    in_flight: int = MAX_GROUP
    reads_only: bool = False

    def together(self, files: int, shared: int, nbytes: int) -> int:
        """The number of linked files to write together."""
        allowed = _MAX_READ_AGAIN * nbytes * (1 if self.reads_only else 2)
        passes = 1 + int(allowed / shared) if shared else files
        return min(self.most, max(self.in_flight, -(-files // passes)))


ALL_LINKED = GroupLimits()
ONE_FILE = GroupLimits(1, 1)


def linked_files(files: Sequence[int], section: Section, cuts: Iterable[Cut]) -> list[list[int]]:
    """Target files that read the same rows, each ascending.

    Args:
        files: target files of one section, ascending.
        cuts: how its tensors are cut, each kind once.
    """
    leader = {file: file for file in files}

    def find(file: int) -> int:
        while leader[file] != file:
            leader[file] = leader[leader[file]]
            file = leader[file]
        return file

    for cut in cuts:
        if not splits_rows(cut):
            continue
        first_with: dict[object, int] = {}
        for file in files:
            first = first_with.setdefault(_rows_of(cut, section.position(file)), file)
            lower, higher = sorted((find(first), find(file)))
            leader[higher] = lower
    linked: dict[int, list[int]] = {}
    for file in files:
        linked.setdefault(find(file), []).append(file)
    return list(linked.values())


def splits_rows(cut: Cut) -> bool:
    """Whether some part of the source's inner dimensions goes to several target slices."""
    if not isinstance(cut.overlap, Overlap):
        # Packed tensors have rows of other lengths.
        return False
    for dimension in range(1, len(cut.target.cuts)):
        intervals = [cut.overlap.intervals(dimension, position) for position in range(cut.target.cuts[dimension])]
        if any(interval[1] > following[0] for interval, following in itertools.pairwise(intervals)):
            return True
    return False


def _rows_of(cut: Cut, position: int) -> object:
    """A key; target files that contain parts of the same rows of the same source slices have equal keys."""
    assert isinstance(cut.overlap, Overlap)
    index = cut.target.slice_index(cut.slice_of(position))
    inner = (cut.overlap.intervals(dimension, index[dimension]) for dimension in range(1, len(index)))
    return index[0], tuple(inner)


def share_of(sizes: Mapping[int, int], index: int, count: int) -> tuple[int, ...]:
    """The ranks that one of ``count`` runs writes, ascending.

    Neighbouring ranks stay together, since they tend to read the same source files; so shares are only
    nearly equal in bytes. Every rank is in exactly one share.
    """
    total = sum(sizes.values())
    chosen = []
    before = 0
    for rank, size in sorted(sizes.items()):
        # The middle of a rank's bytes decides its share.
        middle = 2 * before + size
        if total:
            if min(count - 1, middle * count // (2 * total)) == index:
                chosen.append(rank)
        elif rank % count == index:
            chosen.append(rank)
        before += size
    return tuple(chosen)
