"""The tensors of an opened checkpoint, from a plan with one file.

Only this module uses the plan, so that names, types and shapes are those of a conversion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from reshard.checkpoints import Tensor
from reshard.layout import shape_of, whole_box
from reshard.named_tuple import NamedTuple
from reshard.plan.pieces import Piece, StoredSlice, TargetTensor
from reshard.plan.plan import Plan
from reshard.plan.target_tensors import TargetTensors
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
        entries = [_entry_of(value.name, value.tensor) for value in self._values.values()]
        section = plan.form.section_of(file)
        position = section.position(file)
        for kind in plan.kinds_of(section):
            shape = shape_of(kind.box_of(position))
            entries += (TensorEntry(tensor.name, tensor.dtype, kind.item_size, shape) for tensor in kind.tensors)
        self.entries: Mapping[str, TensorEntry] = {entry.name: entry for entry in sorted(entries)}

    def target(self, name: str) -> TargetTensor:
        """The stored pieces of a tensor."""
        value = self._values.get(name)
        if value is not None:
            entry = self.entries[name]
            box = whole_box(entry.shape)
            path = self.plan.checkpoint.files[value.holder]
            piece = Piece(StoredSlice(path, value.holder, value.tensor.extents, box), box)
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
