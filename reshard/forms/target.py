"""The target of a plan: numbered files, in sections with the same layouts; cuts of source tensors for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reshard.checkpoints.checkpoint import ByName, Checkpoint, GlobalTensor, Sharding
from reshard.checkpoints.formats.dtypes import MEMORY
from reshard.checkpoints.formats.output import OutputLayout, OutputTensor, lay_out_ckpt, lay_out_safetensors
from reshard.errors import CheckpointError, IncompleteSourceError, LayoutError
from reshard.forms.ranks.naming import FileNames
from reshard.layout import Box, Grid, Layout, Overlap, whole
from reshard.text.messages import quoted, rank_ranges

if TYPE_CHECKING:
    from reshard.layout.views import ViewOverlap


class Section(NamedTuple):
    """Files over which tensors are laid out: those of a pipeline stage, or one file by itself.

    Attributes:
        number: numbers the sections of a form.
        files: its files' numbers.
        layouts: layouts of these files by name, as recorded or whole.
        in_pipeline: whether it is one of several stages.
        label: its name in messages.
        devices: per file its device in the layouts; None where files and devices have the same order.
    """

    number: int
    files: range
    layouts: Mapping[str, Layout]
    in_pipeline: bool = False
    label: str = ""
    devices: tuple[int, ...] | None = None

    def position(self, file: int) -> int:
        """The device of a file in the layouts."""
        number = file - self.files.start
        return number if self.devices is None else self.devices[number]


def laid_out_names(sections: Iterable[Section]) -> set[str]:
    return set().union(*(section.layouts.keys() for section in sections))


class FinishingFile(NamedTuple):
    """A file that completes a directory.

    Attributes:
        name: relative to the target directory.
        make: its content in parts, once all other files are written; the same each time.
        size: bytes of all parts; None where they have to be counted.
        source: its source file, if any; reading errors come from the parts.
        compared: with another content, it is another conversion.
    """

    name: str
    make: Callable[[], Iterable[bytes]]
    size: int | None = None
    source: str | None = None
    compared: bool = False


class TargetForm(Protocol):
    """The files of a checkpoint to write.

    Attributes:
        name: of the form, as in `forms.registry`.
        by_rank: a file's number is the rank that loads it; a rank loads no other file.
        takes_everything: it contains every tensor of the source.
        format: ``ckpt`` or ``safetensors``.
        names: the files' names, by number.
        sections: all sections, in the order of their files; every file is in one section.
        metadata: of every safetensors file, instead of the usual.
        boxed: files record the boxes of their tensors, so slices of equal shape get different headers.
        limits_layouts: some layouts cannot be recorded; `check_layout` decides.
        checkpoint: the source cut into the tensors that files hold; None: files hold the converted tensors.
    """

    name: str
    by_rank: bool
    takes_everything: bool
    format: str
    names: FileNames
    sections: Sequence[Section]
    metadata: Mapping[str, str] | None
    limits_layouts: bool = False
    boxed: bool = False
    checkpoint: Checkpoint | None = None

    def lay_out(self, tensors: Sequence[OutputTensor], boxes: Sequence[Box]) -> OutputLayout:
        """The places of a file's bytes, from its tensors, in order, and the box of each in the full tensor.

        Raises:
            CheckpointError: the format cannot hold a tensor.
        """
        if self.format == MEMORY:
            return OutputLayout()
        return lay_out_ckpt(tensors) if self.format == "ckpt" else lay_out_safetensors(tensors, self.metadata)

    def planned(self, layout_of: Callable[[int], OutputLayout]) -> None:
        """Receive the plan's layouts of files, by number; called before `finishing`."""
        return

    def check_layout(self, name: str, layout: Layout) -> None:
        """Raise an InputError for a layout of a tensor that the form cannot record."""
        return

    @property
    def count(self) -> int:
        """The number of files, counted from 0."""

    def section_of(self, file: int) -> Section:
        """The section of a file."""

    def names_in(self, file: int) -> frozenset[str] | None:
        """The tensors of its section that a file holds; None for all."""
        return None

    def takes_value(self, name: str, file: int) -> bool:
        """Whether a file gets a copied value, unless the section lays the value out."""

    def copied_file(self, file: int) -> int | None:
        """The number of the source file that a file copies byte for byte; None if its bytes are computed."""
        return None

    @property
    def settings(self) -> bytes:
        """What options decide of the files beside tensors; another conversion has other bytes."""
        return b""

    def finishing(self) -> Sequence[FinishingFile]:
        """Files to write after all others, in this order; the last completes the directory."""


class WholeLayouts(ByName[Layout]):
    """Layouts of tensors that one device holds whole, all or some by name."""

    def __init__(self, tensors: Mapping[str, GlobalTensor], names: Collection[str] | None = None) -> None:
        super().__init__(tensors.keys() if names is None else names)
        self._tensors = tensors

    def __getitem__(self, name: str) -> Layout:
        if name not in self._names:
            raise KeyError(name)
        return whole(len(self._tensors[name].shape))


def layout_in(tensor: GlobalTensor, recorded: Layout, in_pipeline: bool) -> Layout:
    """The real layout of a target tensor, from the recorded layout.

    Accumulated gradients keep the optimizer shards of the source's files. Where the source records no
    shard, a target with a pipeline gets none: MindSpore's compiler records one there, but writes none.

    Raises:
        LayoutError: the recorded layout does not fit the tensor.
        IncompleteSourceError: the files that decide it were not read.
    """
    plain, unsharded, undecided = tensor.shards
    if undecided and recorded.shards > 1:
        raise IncompleteSourceError(
            f"{quoted(tensor.name)}: whether it has optimizer shards depends on the files of "
            f"{rank_ranges(undecided)} only",
            rank=undecided[0],
            parameter=tensor.name,
            hint=f"bring one of {rank_ranges(undecided)}",
        )
    if plain or (unsharded and in_pipeline):
        recorded = recorded.without_shards()
    fitting = [
        layout
        for layout in recorded.regroupings()
        if len(layout.cuts) == len(tensor.shape) and layout.recorded_shape in (None, tensor.shape)
    ]
    if not fitting:
        of_shape = f" of a tensor of shape {list(recorded.recorded_shape)}" if recorded.recorded_shape else ""
        raise LayoutError(
            f"tensor map {recorded.map_text}{of_shape} does not lay out the checkpoint's tensor of shape "
            f"{list(tensor.shape)}"
        )
    for dimension, size in enumerate(tensor.shape):
        fitting[0].check_size(dimension, size)
    return fitting[0]


UNFINISHED = "reshard-unfinished.safetensors"
"""A file that makes loaders fail while others are missing."""

UNFINISHED_CONTENT = b"This checkpoint is not complete. Missing files: reshard status. To continue: reshard resume.\n"
"""Its content, which no loader accepts as a safetensors header."""


class Cut(NamedTuple):
    """The cut of tensors of one kind for one section of the target.

    Attributes:
        number: of the kind, counted from 0.
        overlap: the cells of every target slice.
        target: the target layout.
        shardings: the source's shardings of these tensors, or the shardings of all their sources in a row.
        firsts: per source, the index of its first sharding.
    """

    number: int
    overlap: Overlap | ViewOverlap
    target: Layout
    shardings: tuple[Sharding, ...]
    firsts: tuple[int, ...] = (0,)

    def slice_of(self, position: int) -> int:
        return int(self.target.slice_of_rank[position])


class Cuts:
    """The cuts of tensors for sections, one for each kind.

    A model has thousands of tensors but tens of kinds: combinations of full shape, source grids and target layout.
    """

    def __init__(self) -> None:
        self._cuts: dict[object, Cut] = {}
        # Cache by identity: equal tensors share layout and shardings. Without the references a new object could
        # get the id of a freed one.
        self._by_reading: dict[tuple[object, ...], tuple[Cut, Layout, tuple[Sharding, ...]]] = {}

    def of(self, tensor: GlobalTensor, section: Section) -> Cut:
        recorded = section.layouts[tensor.name]
        kind = (tensor.view, *(len(each.shardings) for each in tensor.stored))
        key = (section.number, id(recorded), *map(id, tensor.shardings), tensor.shape, tensor.shards, kind)
        cached = self._by_reading.get(key)
        if cached is None:
            cached = self._by_reading[key] = (self._make(tensor, section), recorded, tensor.shardings)
        return cached[0]

    def _make(self, tensor: GlobalTensor, section: Section) -> Cut:
        try:
            layout = layout_in(tensor, section.layouts[tensor.name], section.in_pipeline)
            # The cut references its shardings, so their ids stay unique.
            counts = [len(each.shardings) for each in tensor.sources]
            key = (section.number, tensor.shape, *map(id, tensor.shardings), layout, tensor.view, *counts)
            if key not in self._cuts:
                firsts = tuple(accumulate(counts[:-1], initial=0))
                overlap = _overlap(tensor, layout.grid(tensor.shape))
                self._cuts[key] = Cut(len(self._cuts), overlap, layout, tensor.shardings, firsts)
            return self._cuts[key]
        except LayoutError as error:
            raise CheckpointError(
                f"{quoted(tensor.name)}: {error.message} ({section.label})",
                parameter=tensor.name,
                hint="the target strategy has to be of the same model, and every dimension to divide by its slices",
            ) from error


def _overlap(tensor: GlobalTensor, target: Grid) -> Overlap | ViewOverlap:
    if tensor.view is None:
        return Overlap([sharding.grid for sharding in tensor.shardings], target)
    # Loaded only here: most conversions have no views.
    from reshard.layout.views import ViewOverlap

    grids = [[sharding.grid for sharding in source.shardings] for source in tensor.sources]
    return ViewOverlap(grids, tensor.view, target)
