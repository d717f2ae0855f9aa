"""The model of a checkpoint of any form: global tensors, stored as boxes in files.

The files of a checkpoint are numbered; the number is the file's *holder number*. In a tree of rank directories it is
the rank. One or several grids (of stages that share a tensor) cut a tensor, and any number of files, replicas, hold
each box of a grid.

An edited checkpoint has other names, packing and types than its base. It is not stored: plans and checks use its
tensors, which will be written; only readers of bytes use the tensors in the files.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.checkpoints.formats.tensors import CheckpointIndex, files_alike
from reshard.layout import Box, Grid
from reshard.threads import cached_property

if TYPE_CHECKING:
    import numpy.typing as npt

    from reshard.layout.views import View

V = TypeVar("V")


class Sharding(Protocol):
    """A grid over a tensor, and the files of each of its boxes."""

    @property
    def grid(self) -> Grid: ...

    def holders(self, slice_number: int) -> Sequence[int]:
        """The recorded files of a box of the grid, ascending."""

    def stored_box(self, slice_number: int) -> Box:
        """The box that these files store: this box, or a larger one."""


@dataclass(frozen=True)
class FileSharding:
    """A sharding with a list of files per box.

    Attributes:
        grid: the grid.
        files_of: per box of the grid the files that hold it, ascending.
        parts_of: per box of the grid the larger box in files, if the stored boxes form no grid; None if files store
            the boxes of the grid.
    """

    grid: Grid
    files_of: tuple[tuple[int, ...], ...]
    parts_of: tuple[Box, ...] | None = None

    def holders(self, slice_number: int) -> Sequence[int]:
        return self.files_of[slice_number]

    def stored_box(self, slice_number: int) -> Box:
        return self.grid.slice_box(slice_number) if self.parts_of is None else self.parts_of[slice_number]

    @cached_property
    def present(self) -> frozenset[int]:
        """All files that hold some box."""
        return frozenset(chain.from_iterable(self.files_of))


class ShardReading(NamedTuple):
    """Evidence in files about optimizer shards that a strategy records for accumulated gradients.

    Attributes:
        plain: the files have no shards, although the strategy records them.
        unsharded: no shard is recorded.
        undecided: unread files that would show whether the recorded shard exists; empty if it is decided.
    """

    plain: bool = False
    unsharded: bool = False
    undecided: tuple[int, ...] = ()

    @classmethod
    def of_all(cls, readings: Sequence[ShardReading]) -> ShardReading:
        """The evidence for a tensor with several sources."""
        decided = [each for each in readings if not each.unsharded and not each.undecided]
        undecided = () if decided else tuple(sorted({file for each in readings for file in each.undecided}))
        return cls(any(each.plain for each in decided), not decided and not undecided, undecided)


AS_RECORDED = ShardReading()
"""The reading of all tensors except accumulated gradients."""


class Addition(Protocol):
    """An addition to the elements of a tensor.

    Attributes:
        paths: the files to read it from.
    """

    paths: frozenset[str]

    def add(self, box: Box, words: npt.NDArray[Any]) -> None:
        """Add to some elements in place.

        Args:
            box: the box of these elements in the full tensor.
            words: the elements as unsigned words of their size, in the shape of the box, with one more dimension of one
                word.
        """


class StoredSlice(NamedTuple):
    """A slice in a source file.

    Attributes:
        path: the file.
        rank: the source rank of the file.
        extents: (offset, bytes) runs in the file; joined they are the slice in C order.
        box: its box in the full tensor of the files.
        decoding: the conversion of its bytes to elements; None if they are elements.
    """

    path: str
    rank: int
    extents: tuple[tuple[int, int], ...]
    box: Box
    decoding: Decoding | None = None


ReadBytes = Callable[[StoredSlice, int, memoryview], None]
"""Fills a buffer with bytes of a stored slice, from an offset in it on."""


class Decoding(Protocol):
    """The conversion of a quantised tensor's bytes to elements.

    Attributes:
        name: of the tensor.
        stored: name of the tensor with the bytes, in the files.
        beside: names of the tensors with its scales and zero points.
        dtype: type of the elements, one of `dtypes.CAST_TO`.
    """

    name: str
    stored: str
    beside: tuple[str, ...]
    dtype: str

    def read_into(
        self,
        read: ReadBytes,
        source: StoredSlice,
        start: int,
        out: memoryview,
        memory: memoryview,
    ) -> int:
        """Fill ``out`` with elements of a slice.

        Args:
            read: reads stored bytes of slices.
            source: the slice; its box counts elements.
            start: offset of the first byte, in bytes of the slice's elements.
            out: a whole number of elements.
            memory: working memory; scales take up to half as much beside it.

        Returns:
            How many elements became infinite.

        Raises:
            ReshardError: the bytes cannot be read, or a scale is not a positive number.
        """

    def stored_bytes(self, elements: int) -> int:
        """Bytes in the files for a number of elements."""

    def to(self, dtype: str) -> Decoding:
        """The conversion to elements of another type, rounded once."""


class GlobalTensor(NamedTuple):
    """A tensor of a checkpoint, all of its slices together.

    Attributes:
        name: its name in the files.
        dtype: MindSpore's name of its element type.
        item_size: bytes of one element.
        shape: shape of the full tensor.
        shardings: its shardings in files, at least one; any of them is enough.
        shards: evidence about optimizer shards of accumulated gradients.
        stored: its source tensors in the files, if it is not in the files itself; the shardings are then
            those of all sources in a row. Types may differ from its own: its elements are cast.
        view: its elements of the sources; None for all elements of a single source.
        added: the addition to its elements; None without one.
        decoding: the conversion of bytes in the files to its elements; None if they are elements.
    """

    name: str
    dtype: str
    item_size: int
    shape: tuple[int, ...]
    shardings: tuple[Sharding, ...]
    shards: ShardReading = AS_RECORDED
    stored: tuple[GlobalTensor, ...] = ()
    view: View | None = None
    added: Addition | None = None
    decoding: Decoding | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        return math.prod(self.shape) * self.item_size

    @property
    def sources(self) -> tuple[GlobalTensor, ...]:
        return self.stored or (self,)

    @property
    def name_in_files(self) -> str:
        """The name of its bytes in the files: its own, or that of its codes."""
        return self.name if self.decoding is None else self.decoding.stored

    def decoded_to(self, dtype: str) -> GlobalTensor:
        """The tensor with elements of a type if they are decoded from codes; else the tensor itself."""
        if self.decoding is None:
            return self
        return self._replace(dtype=dtype, item_size=ITEM_SIZES[dtype], decoding=self.decoding.to(dtype))


class ByName(Mapping[str, V]):
    """Values by name; only the names, in order, are in memory."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class TensorsInOrder(ByName[GlobalTensor]):
    """A selection of tensors by name, in its own order. Only names are in memory."""

    def __init__(self, tensors: Mapping[str, GlobalTensor], names: Iterable[str]) -> None:
        super().__init__(dict.fromkeys(names))
        self._tensors = tensors

    def __getitem__(self, name: str) -> GlobalTensor:
        if name not in self._names:
            raise KeyError(name)
        return self._tensors[name]


class TiedTensors(NamedTuple):
    """Tied tensors. Readers compare them, then use the representative.

    One that has another type than its source, `GlobalTensor.stored`, is compared after a cast; then all NaN are equal.

    Attributes:
        representative: the tensor to use.
        copies: the tensors equal to it.
        reason: the consequence of a difference, for the error's text after ``... differ:``.
        hint: the error's hint.
        only_if_equal: names of further tensors that may be used only then.
        optional: to be compared only where a run converts all of them whole.
    """

    representative: GlobalTensor
    copies: tuple[GlobalTensor, ...]
    reason: str
    hint: str
    only_if_equal: tuple[str, ...] = ()
    optional: bool = False

    def concerns(self, names: Collection[str]) -> bool:
        """Whether they have to be equal for tensors of the files with these names to be used."""
        if self.optional:
            return all(tensor.name in names for tensor in (self.representative, *self.copies))
        return any(name in names for name in (self.representative.name, *self.only_if_equal))


class StoredObject(NamedTuple):
    """An object other than a tensor, such as an optimizer's parameter groups: a pickle, copied and never executed.

    Attributes:
        path: its file.
        offset: its first byte in the file.
        length: its bytes.
        archived: whether it is an archive of ``torch.save``, not a bare pickle.
    """

    path: str
    offset: int
    length: int
    archived: bool


class Checkpoint(Protocol):
    """One step of a source, from its headers and metadata."""

    @property
    def form(self) -> str:
        """The name of its form, as `forms.registry` lists them."""

    @property
    def step(self) -> str | None:
        """The step in the notation of its form, such as ``3_10`` or ``20``; None if unknown."""

    @property
    def label(self) -> str: ...

    @property
    def place(self) -> str:
        """The common directory of its files."""

    @property
    def files(self) -> Mapping[int, str]:
        """Path of every file, by holder number."""

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
        """Metadata of the training, as in common.json of Checkpoint 2.0."""

    @property
    def extra_files(self) -> Sequence[str]:
        """Files beside the weights that belong to the model, relative to the directory."""

    @property
    def objects(self) -> Mapping[str, StoredObject]:
        """Objects other than tensors, by name."""

    @property
    def nested(self) -> Mapping[str, tuple[Any, ...]]:
        """Keys of the nested dictionaries that names were made of, where that is recorded."""

    def order(self) -> list[str]: ...

    def tied_tensors(self) -> Sequence[TiedTensors]:
        """Tied tensors, which should be equal; headers cannot show it."""

    def names(self) -> set[str]:
        """Names of all entries of all files."""

    def values(self) -> Sequence[str]:
        """Names in files without a layout, such as scalars and text, sorted."""

    def without_layout(self) -> Sequence[str]:
        """Names of weights without a layout, each whole in every file that holds it, sorted.

        If the target has no layout for them either, they are copied like values.
        """

    def holders(self, name: str) -> list[int]:
        """The files that hold an entry of this name, ascending."""

    def present(self, tensor: GlobalTensor) -> tuple[frozenset[int], ...]:
        """Per sharding of a tensor, the existing files that hold it."""


def order_in_files(checkpoint: Checkpoint) -> list[str]:
    """Names of all tensors, in the order of the files."""
    names: dict[str, None] = {}
    for first, *_ in files_alike(checkpoint.indexes):
        names.update(dict.fromkeys(checkpoint.indexes[first].tensors))
    return [name for name in names if name in checkpoint.tensors]


class Recipe(NamedTuple):
    """The sources of an edited tensor.

    Attributes:
        sources: names of tensors of the base, numbered as in the view.
        view: its elements of the sources; None for a single unchanged source.
        dtype: its element type; None for that of its sources.
        added: the addition to its elements; None without one.
    """

    sources: tuple[str, ...]
    view: View | None = None
    dtype: str | None = None
    added: Addition | None = None


class Packing(NamedTuple):
    """The table of names that gave tensors their packing, with all that other packing would differ in.

    Attributes:
        table: the name of a built-in table, or the absolute path of a file.
        config: the absolute path of the model's configuration; None if none was named.
        options: those that decide between rules for the same names, and those that were stated.
        sizes: the sizes of the model that its rules used.
    """

    table: str
    config: str | None
    options: Mapping[str, str]
    sizes: Mapping[str, int]

    @property
    def words(self) -> list[str]:
        """The options --names and --config that ask for it."""
        options = (f"{name}={value}" for name, value in self.options.items())
        config = [] if self.config is None else ["--config", self.config]
        return ["--names", ",".join([self.table, *options]), *config]


class EditedTensors(ByName[GlobalTensor]):
    """Edited tensors by name, in the order of the recipes, created on demand."""

    def __init__(self, base: Mapping[str, GlobalTensor], recipes: Mapping[str, Recipe]) -> None:
        super().__init__(recipes.keys())
        self._base = base
        self._recipes = recipes
        self._tensors: dict[str, GlobalTensor] = {}

    def __getitem__(self, name: str) -> GlobalTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            recipe = self._recipes[name]
            stored = tuple(self._base[source] for source in recipe.sources)
            if recipe.dtype is not None:
                # A cast would round quantised tensors a second time.
                stored = tuple(source.decoded_to(recipe.dtype) for source in stored)
            first = stored[0]
            dtype = first.dtype if recipe.dtype is None else recipe.dtype
            tensor = self._tensors[name] = GlobalTensor(
                name,
                dtype,
                first.item_size if dtype == first.dtype else ITEM_SIZES[dtype],
                first.shape if recipe.view is None else recipe.view.shape,
                tuple(chain.from_iterable(source.shardings for source in stored)),
                ShardReading.of_all([source.shards for source in stored]),
                stored,
                recipe.view,
                recipe.added,
            )
        return tensor


class EditedCheckpoint:
    """A checkpoint with edits; see `checkpoint.Checkpoint`. Files are the base's.

    Args:
        base: the unedited checkpoint.
        recipes: of its tensors, by name, in order.
        kept_values: names of the base's values that it keeps.
        identity: a text; equal edits have equal texts.
        tied: further tied tensors of the base.
        nested: per name the keys of nested dictionaries in a trainer's state; None for those of the base.
        unseen: per parameter that the base's strategy lists and no file holds, its new name; None if only shapes
            could determine it.
        packing: that of a table which was asked for and applied; None where names are Hugging Face's.
        with_objects: whether the base's objects belong to it.
    """

    def __init__(
        self,
        base: Checkpoint,
        recipes: Mapping[str, Recipe],
        kept_values: Collection[str],
        identity: str,
        tied: Sequence[TiedTensors] = (),
        unseen: Mapping[str, str | None] = MappingProxyType({}),
        nested: Mapping[str, tuple[Any, ...]] | None = None,
        packing: Packing | None = None,
        with_objects: bool = True,
    ) -> None:
        self.identity = identity
        self.packing = packing
        self.base = base
        self.form, self.step = base.form, base.step
        self.files, self.indexes = base.files, base.indexes
        self.training, self.extra_files = base.training, base.extra_files
        self.objects = base.objects if with_objects else {}
        self.recipes = recipes
        self.tensors: Mapping[str, GlobalTensor] = EditedTensors(base.tensors, recipes)
        self.unseen = unseen
        self.nested: Mapping[str, tuple[Any, ...]] = base.nested if nested is None else nested
        self._kept_values = frozenset(kept_values)
        self._tied = tuple(tied)

    def with_more(
        self, recipes: Mapping[str, Recipe], nested: Mapping[str, tuple[Any, ...]], tied: Sequence[TiedTensors]
    ) -> EditedCheckpoint:
        """The checkpoint with further tensors, their keys, and tied tensors of the base."""
        other = copy.copy(self)
        other.recipes = {**self.recipes, **recipes}
        other.tensors = EditedTensors(self.base.tensors, other.recipes)
        other.nested = {**self.nested, **nested}
        other._tied = (*self._tied, *tied)
        return other

    @property
    def label(self) -> str:
        return self.base.label

    @property
    def place(self) -> str:
        return self.base.place

    @property
    def laid_out(self) -> Collection[str]:
        return self.tensors.keys()

    def order(self) -> list[str]:
        """The order of each tensor's first source in the base."""
        places = {name: place for place, name in enumerate(self.base.order())}
        return sorted(self.recipes, key=lambda name: places[self.recipes[name].sources[0]])

    def tied_tensors(self) -> Sequence[TiedTensors]:
        return (*self.base.tied_tensors(), *self._tied)

    def names(self) -> set[str]:
        return {*self.recipes, *self._kept_values}

    def values(self) -> Sequence[str]:
        return [name for name in self.base.values() if name in self._kept_values]

    def without_layout(self) -> Sequence[str]:
        return [name for name in self.base.without_layout() if name in self._kept_values]

    def holders(self, name: str) -> list[int]:
        if name in self._kept_values:
            return self.base.holders(name)
        return sorted(frozenset().union(*self.present(self.tensors[name])))

    def present(self, tensor: GlobalTensor) -> tuple[frozenset[int], ...]:
        return tuple(chain.from_iterable(map(self.base.present, tensor.stored)))


def tied_among(checkpoint: Checkpoint, names: Iterable[str]) -> list[TiedTensors]:
    """The sets of tied tensors among the sources of some tensors and values."""
    tensors = checkpoint.tensors
    stored = {source.name for name in names if name in tensors for source in tensors[name].sources}
    return [tied for tied in checkpoint.tied_tensors() if tied.concerns(stored)]


def stored_checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint in the files."""
    while isinstance(checkpoint, EditedCheckpoint):
        checkpoint = checkpoint.base
    return checkpoint
