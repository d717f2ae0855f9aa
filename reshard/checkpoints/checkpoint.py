"""A checkpoint as the plan sees it, whatever its form: global tensors, stored as boxes in files.

The files of a checkpoint are numbered; the number is the file's *holder number*. In a tree of rank
directories it is the rank. A tensor is cut by one grid or by several (stages that share it), and each box
of a grid is held by any number of files: replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Callable, NamedTuple, Optional, Protocol

import numpy.typing as npt

from reshard.checkpoints.by_name import ByName
from reshard.checkpoints.formats.tensors import CheckpointIndex
from reshard.errors import InputError, one_error
from reshard.layout import Box, Grid, View
from reshard.text.wording import step_words


class Sharding(Protocol):
    """A grid over a tensor, and who holds each of its boxes."""

    @property
    def grid(self) -> Grid:
        """How the tensor is cut."""

    def holders(self, slice_number: int) -> Sequence[int]:
        """The recorded files of a box of the grid, ascending."""

    def stored_box(self, slice_number: int) -> Box:
        """The box that these files hold: this one, or a larger one that it is part of."""


@dataclass(frozen=True)
class FileSharding:
    """A sharding that is known file by file.

    Attributes:
        grid: how the tensor is cut.
        held_by: per box of the grid the files that hold it, ascending.
        parts_of: per box of the grid the stored box that it is part of, where files hold boxes that are no grid; None
            where they hold those of the grid.
    """

    grid: Grid
    held_by: tuple[tuple[int, ...], ...]
    parts_of: Optional[tuple[Box, ...]] = None

    def holders(self, slice_number: int) -> Sequence[int]:
        """The files that hold a box of the grid, ascending."""
        return self.held_by[slice_number]

    def stored_box(self, slice_number: int) -> Box:
        """The box that these files hold."""
        return self.grid.slice_box(slice_number) if self.parts_of is None else self.parts_of[slice_number]

    @cached_property
    def present(self) -> frozenset[int]:
        """All files that hold some box."""
        return frozenset(chain.from_iterable(self.held_by))


class ShardReading(NamedTuple):
    """Evidence in files about optimizer shards that a strategy records for accumulated gradients.

    Attributes:
        plain: recorded shards are not made.
        unsharded: no shard is recorded.
        undecided: unread files that would show whether the recorded shard exists; empty if it is decided.
    """

    plain: bool = False
    unsharded: bool = False
    undecided: tuple[int, ...] = ()

    @classmethod
    def of_all(cls, readings: Sequence[ShardReading]) -> ShardReading:
        """The evidence for a tensor made of several."""
        told = [each for each in readings if not each.unsharded and not each.undecided]
        undecided = () if told else tuple(sorted({file for each in readings for file in each.undecided}))
        return cls(any(each.plain for each in told), not told and not undecided, undecided)


AS_RECORDED = ShardReading()
"""Of all tensors but accumulated gradients."""


class Addition(Protocol):
    """An addition to the elements of a tensor.

    Attributes:
        paths: the files that it is read from.
    """

    paths: frozenset[str]

    def add(self, box: Box, words: npt.NDArray[Any]) -> None:
        """Add to some elements in place.

        Args:
            box: which elements of the full tensor they are.
            words: the elements as unsigned words of their size, in the shape of the box, with one more dimension of one
                word.
        """


class StoredSlice(NamedTuple):
    """A slice in a source file.

    Attributes:
        path: the file.
        rank: the source rank it belongs to.
        extents: (offset, bytes) runs in the file that make up the slice in C order.
        box: the part of the full tensor that it holds, of the tensor in the files.
        decoding: how its bytes become elements; None where they are elements.
    """

    path: str
    rank: int
    extents: tuple[tuple[int, int], ...]
    box: Box
    decoding: Optional[Decoding] = None


ReadBytes = Callable[[StoredSlice, int, memoryview], None]
"""Fills a buffer with bytes of a stored slice, from an offset in it on."""

CastWords = Callable[[npt.NDArray[Any], str], npt.NDArray[Any]]
"""Returns elements of Float32, as words, as words of a type."""


class Decoding(Protocol):
    """How the bytes of a quantised tensor become elements.

    Attributes:
        name: of the tensor.
        stored: name of the tensor in the files that holds the bytes.
        beside: names of those that hold its scales and zero points.
        dtype: type that the elements get, one of `dtypes.CAST_TO`.
    """

    name: str
    stored: str
    beside: tuple[str, ...]
    dtype: str

    def read_into(self, read: ReadBytes, source: StoredSlice, start: int, out: memoryview, cast: CastWords) -> int:
        """Fill ``out`` with elements of a slice.

        Args:
            read: reads the bytes of slices as they are stored.
            source: the slice; its box counts elements.
            start: where to begin, in bytes of elements from the first one of the slice.
            out: a whole number of elements.
            cast: from Float32 to the type of the elements.

        Returns:
            How many elements became infinite.

        Raises:
            ReshardError: the bytes cannot be read, or a scale is no positive number.
        """

    def stored_bytes(self, elements: int) -> int:
        """Bytes in the files of so many elements."""


class GlobalTensor(NamedTuple):
    """A tensor of a checkpoint, all of its slices together.

    Attributes:
        name: its name in the files.
        dtype: MindSpore's name of its element type.
        item_size: bytes of one element.
        shape: shape of the full tensor.
        shardings: the ways in which files hold it, at least one; any of them will do.
        shards: of accumulated gradients, whether recorded optimizer shards are made.
        stored: its source tensors in the files, if it is not one itself; the shardings are then
            theirs, one after the other. Types may differ from its own: its elements are cast.
        view: its elements of them; None for all of a single one.
        added: the addition to its elements; None without one.
        decoding: how bytes in the files become its elements; None where they are elements.
    """

    name: str
    dtype: str
    item_size: int
    shape: tuple[int, ...]
    shardings: tuple[Sharding, ...]
    shards: ShardReading = AS_RECORDED
    stored: tuple[GlobalTensor, ...] = ()
    view: Optional[View] = None
    added: Optional[Addition] = None
    decoding: Optional[Decoding] = None

    @property
    def sources(self) -> tuple[GlobalTensor, ...]:
        """The tensors in the files: its sources, or itself."""
        return self.stored or (self,)


class TensorsInOrder(ByName[GlobalTensor]):
    """Some tensors by name, in an order of their own; none is held here, since there may be very many.

    Args:
        tensors: all tensors.
        names: the names, in order.
    """

    def __init__(self, tensors: Mapping[str, GlobalTensor], names: Iterable[str]) -> None:
        super().__init__(dict.fromkeys(names))
        self._tensors = tensors

    def __getitem__(self, name: str) -> GlobalTensor:
        if name not in self._names:
            raise KeyError(name)
        return self._tensors[name]


class Equal(NamedTuple):
    """Tied tensors, of which only one is read. Readers compare them first.

    Attributes:
        taken: the one that is read.
        others: the tensors equal to it.
        reason: the consequence of a difference, to follow ``... differ:``.
        hint: the hint of that error.
    """

    taken: GlobalTensor
    others: tuple[GlobalTensor, ...]
    reason: str
    hint: str


class StoredObject(NamedTuple):
    """What is no tensor, such as the groups of an optimizer's parameters: a pickle, carried and never run.

    Attributes:
        path: the file that holds it.
        offset: its first byte there.
        length: its bytes.
        archived: whether it is an archive of ``torch.save``, not a bare pickle.
    """

    path: str
    offset: int
    length: int
    archived: bool


class Checkpoint(Protocol):
    """One step of a source, from its headers and metadata.

    Attributes:
        form: the name of its form, as `forms.registry` lists them.
        step: the step in the notation of its form, such as ``3_10`` or ``20``; None if unknown.
        label: how the step is called in messages.
        place: the common directory of its files.
        files: path of every file that counts, by holder number.
        indexes: their headers.
        tensors: tensors with a layout, by name.
        laid_out: names with a known layout, in files or not.
        unseen: those that may be in missing files.
        training: metadata of the training, as in common.json of Checkpoint 2.0.
        others: files beside the weights that belong to the model, relative to the directory.
        objects: what is no tensor, by name.
    """

    @property
    def form(self) -> str:
        """The name of its form, as `forms.registry` lists them."""

    @property
    def step(self) -> Optional[str]:
        """The step in words of its form."""

    @property
    def label(self) -> str:
        """How the step is called in messages."""

    @property
    def place(self) -> str:
        """The common directory of its files."""

    @property
    def files(self) -> Mapping[int, str]:
        """Path of every file that counts, by holder number."""

    @property
    def indexes(self) -> Mapping[int, CheckpointIndex]:
        """Their headers."""

    @property
    def tensors(self) -> Mapping[str, GlobalTensor]:
        """Tensors with a layout, by name."""

    @property
    def laid_out(self) -> Collection[str]:
        """Names with a known layout, in files or not."""

    @property
    def unseen(self) -> Collection[str]:
        """Names that may be in missing files."""

    @property
    def training(self) -> Mapping[str, Any]:
        """Metadata of the training."""

    @property
    def others(self) -> Sequence[str]:
        """Files beside the weights that belong to the model, relative to the directory."""

    @property
    def objects(self) -> Mapping[str, StoredObject]:
        """What is no tensor, by name."""

    def order(self) -> list[str]:
        """Names of all tensors, in the order in which files hold them."""

    def equal(self) -> Sequence[Equal]:
        """Tied tensors; headers do not show that they are equal."""

    def names(self) -> set[str]:
        """Names of all entries of all files."""

    def values(self) -> Sequence[str]:
        """Names that files hold and that are not laid out: scalars, text; sorted."""

    def without_layout(self) -> Sequence[str]:
        """Names of weights, each whole wherever it is, that nothing lays out, sorted.

        Where a target does not lay them out either, they are copied as values are.
        """

    def holders(self, name: str) -> list[int]:
        """The files that hold an entry of this name, ascending."""

    def present(self, tensor: GlobalTensor) -> tuple[frozenset[int], ...]:
        """The files that do hold a tensor, per way of holding it."""


def order_in_files(checkpoint: Checkpoint) -> list[str]:
    """Names of all tensors, in the order in which files hold them."""
    found: dict[str, None] = {}
    known: set[int] = set()
    for holder in sorted(checkpoint.indexes):
        tensors = checkpoint.indexes[holder].tensors
        if id(tensors) not in known:
            known.add(id(tensors))
            found.update(dict.fromkeys(tensors))
    return [name for name in found if name in checkpoint.tensors]


@dataclass
class RecordedCheckpoint:
    """A checkpoint whose files and metadata record all of it; see `Checkpoint` for what is not described here.

    Attributes:
        plain: names that are not laid out, such as ``global_step``.
        unlaid: names of weights without a layout, each whole wherever it is.
        faults: tensors that cannot be read, and why, by name.
    """

    form: str
    place: str
    files: Mapping[int, str]
    indexes: Mapping[int, CheckpointIndex]
    tensors: Mapping[str, GlobalTensor]
    plain: Collection[str] = ()
    others: Sequence[str] = ()
    step: Optional[str] = None
    label: str = step_words(None)
    unlaid: Collection[str] = ()
    training: Mapping[str, Any] = field(default_factory=dict)
    faults: Mapping[str, InputError] = field(default_factory=dict)
    objects: Mapping[str, StoredObject] = field(default_factory=dict)

    @property
    def laid_out(self) -> Collection[str]:
        """Names of all tensors."""
        return self.tensors.keys()

    @property
    def unseen(self) -> Collection[str]:
        """None: what is recorded and not there is refused."""
        return ()

    def order(self) -> list[str]:
        """Names of all tensors, in the order in which files hold them."""
        return order_in_files(self)

    def equal(self) -> Sequence[Equal]:
        """None: every tensor stands for itself."""
        return ()

    def names(self) -> set[str]:
        """Names of all that is read."""
        return {*self.tensors, *self.plain}

    def values(self) -> Sequence[str]:
        """Names of what is not laid out, sorted."""
        return sorted(self.plain)

    def without_layout(self) -> Sequence[str]:
        """Names of weights without a layout, sorted."""
        return sorted(self.unlaid)

    def holders(self, name: str) -> list[int]:
        """The files that hold an entry of this name, ascending."""
        known: dict[int, bool] = {}
        found = []
        for file, index in self.indexes.items():
            contents = id(index.tensors)
            if contents not in known:
                known[contents] = name in index.tensors
            if known[contents]:
                found.append(file)
        return sorted(found)

    def present(self, tensor: GlobalTensor) -> tuple[frozenset[int], ...]:
        """The files that do hold a tensor, per way of holding it."""
        return tuple(sharding.present for sharding in tensor.shardings if isinstance(sharding, FileSharding))

    def check(self, wanted: Optional[Callable[[str], bool]] = None) -> None:
        """Insist that every tensor that is wanted can be read.

        Args:
            wanted: whether a name is; all are by default.

        Raises:
            InputError: some cannot; all of them are named.
        """
        faults = [error for name, error in self.faults.items() if wanted is None or wanted(name)]
        if faults:
            raise one_error(faults, f"{self.label} in {self.place} contradicts itself")
