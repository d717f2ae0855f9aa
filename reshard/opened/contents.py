"""The tensors of an opened checkpoint, from a plan with one file.

Only this module uses the plan, so that names, types and shapes are those of a conversion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from reshard.checkpoints import Tensor
from reshard.layout import Box, shape_of, whole_box
from reshard.plan.pieces import Piece, StoredSlice, TargetTensor
from reshard.plan.plan import Plan
from reshard.plan.target_tensors import Kind, TargetTensors
from reshard.plan.values import CopiedValue
from reshard.threads import ThreadLock


class TensorEntry(NamedTuple):
    """A tensor.

    Attributes:
        name: its name.
        dtype: MindSpore's name of its element type.
        item_size: bytes of an element.
        shape: of the full tensor, or of a rank's slice if a strategy was named.
    """

    name: str
    dtype: str
    item_size: int
    shape: tuple[int, ...]


class OpenedContents:
    """The tensors of one file of a plan, by name; for any number of threads.

    Args:
        plan: the plan.
        file: number of the target file.

    Attributes:
        plan: the plan.
        entries: every tensor, sorted by name.
    """

    def __init__(self, plan: Plan, file: int) -> None:
        self.plan = plan
        self._file = file
        self._lock = ThreadLock()
        self._places: Mapping[str, int] = {}
        self._tensors: TargetTensors
        self._values = {value.name: value for value in plan.values_of(file)}
        self._kinds: dict[str, Kind] = {}
        self._copies: dict[int, list[list[tuple[int, Box]]]] = {}
        entries = [_entry_of(value.name, value.tensor) for value in self._values.values()]
        section = plan.form.section_of(file)
        position = section.position(file)
        for kind in plan.kinds_of(section):
            shape = shape_of(kind.box_of(position))
            self._kinds.update((tensor.name, kind) for tensor in kind.tensors)
            entries += (TensorEntry(tensor.name, tensor.dtype, kind.item_size, shape) for tensor in kind.tensors)
        self.entries: Mapping[str, TensorEntry] = {entry.name: entry for entry in sorted(entries)}

    def copies(self, name: str) -> int:
        """The largest number of files that hold a part of a tensor."""
        if name in self._values:
            return len(self._holders(self._values[name]))
        return max(map(len, self._copies_of(name)), default=1)

    def unread(self, names: Iterable[str]) -> set[int]:
        """The files with copies of these tensors' slices that `target` does not read."""
        examples = {id(self._kinds[name]): name for name in names if name in self._kinds}
        return {
            holder
            for name in examples.values()
            for piece, copies in zip(self.target(name).pieces, self._copies_of(name))
            for holder, _ in copies
            if holder != piece.source.rank
        }

    def _copies_of(self, name: str) -> list[list[tuple[int, Box]]]:
        kind = self._kinds[name]
        if id(kind) not in self._copies:
            self._copies[id(kind)] = self.plan.copies(kind, self._file)
        return self._copies[id(kind)]

    def _holders(self, value: CopiedValue) -> list[int]:
        """The files that hold a value of the same type and shape, the one that is read first."""
        indexes, entry = self.plan.checkpoint.indexes, _entry_of(value.name, value.tensor)
        holders = self.plan.checkpoint.holders(value.name)
        alike = [one for one in holders if _entry_of(value.name, indexes[one].tensors[value.name]) == entry]
        return sorted(alike, key=lambda holder: holder != value.holder)

    def target(self, name: str, copy: int = 0) -> TargetTensor:
        """The stored pieces of a tensor.

        Args:
            name: its name.
            copy: each number below `copies` gives other files; where fewer hold a piece, some again.
        """
        if copy and name in self._kinds:
            pieces = []
            for piece, copies in zip(self.target(name).pieces, self._copies_of(name)):
                first = next(place for place, (holder, _) in enumerate(copies) if holder == piece.source.rank)
                holder, box = copies[(first + copy) % len(copies)]
                source = 0 if piece.region is None else piece.region.source
                pieces.append(piece._replace(source=self.plan.stored(name, source, holder, box)))
            return self.target(name)._replace(pieces=tuple(pieces))
        value = self._values.get(name)
        if value is not None:
            entry = self.entries[name]
            box = whole_box(entry.shape)
            holder = self._holders(value)[copy] if copy else value.holder
            stored = self.plan.checkpoint.indexes[holder].tensors[name]
            piece = Piece(StoredSlice(self.plan.checkpoint.files[holder], holder, stored.extents, box), box)
            return TargetTensor(name, entry.item_size, box, (piece,) if value.tensor.nbytes else ())
        with self._lock:
            if not self._places:
                tensors = self.plan.target_file(self._file).tensors
                assert isinstance(tensors, TargetTensors)
                self._tensors = tensors
                self._places = {tensor_name: place for place, tensor_name in enumerate(tensors.names)}
            return self._tensors[self._places[name]]


def _entry_of(name: str, tensor: Tensor) -> TensorEntry:
    # A text is one element.
    return TensorEntry(name, tensor.dtype, tensor.item_size, tensor.shape)


class ReadingOrder(NamedTuple):
    """Tensors in the order of their first bytes in the files, and these files."""

    names: list[str]
    paths: set[str]


def in_file_order(contents: OpenedContents, names: Iterable[str]) -> ReadingOrder:
    """Sort tensors by their place in the files, so that files are read sequentially."""
    paths: set[str] = set()

    def key(name: str) -> tuple[str, int, str]:
        # Pieces are not kept: there may be very many.
        pieces = contents.target(name).pieces
        paths.update(piece.source.path for piece in pieces)
        for piece in pieces:
            for offset, _ in piece.source.extents:
                return piece.source.path, offset, name
        return "", 0, name

    return ReadingOrder(sorted(names, key=key), paths)
