"""Stored tensors of a checkpoint, and their elements.

Names, types and files come from a `Checkpoint`, as in conversions: mistakes there show as refusals. The box of each
slice is computed here (see `boxes`) and has to fit the slice's shape in its file.
"""

from __future__ import annotations

import itertools
import math
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.checkpoints import CheckpointIndex, FileHandles, Tensor, files_alike
from reshard.checkpoints.checkpoint import AS_RECORDED, ByName, Checkpoint, GlobalTensor, ShardReading
from reshard.checkpoints.formats.dtypes import NO_ARRAYS
from reshard.errors import CheckpointError, IncompleteSourceError
from reshard.forms.registry import form_named
from reshard.storage import ReadableFile, costs_of, fill, reading
from reshard.strategies import Stage, Strategy
from reshard.text.messages import listing, quoted
from reshard.text.names import ACCUMULATED_GRADIENTS
from reshard.threads import cached_property
from reshard.verification.boxes import (
    Box,
    LayoutValues,
    Shape,
    common,
    device_boxes,
    shape_of,
    volume_of,
    whole_box,
    within,
)

Words = npt.NDArray[Any]

# Shorter runs are read together with small gaps between them; the gap's limit is in bytes on local disks, in
# multiples of the run on a network.
_SHORT_RUN, _NEAR, _NEAR_REMOTE, _MAX_SPAN = 32 << 10, 32 << 10, 4, 1 << 20


def words_of(item_size: int) -> str:
    """The NumPy type of elements of this size."""
    return f"<u{item_size}" if item_size in (1, 2, 4, 8) else f"V{item_size}"


class Buffers(threading.local):
    """Buffers of a thread, reused for each block so that they stay in the cache."""

    def __init__(self) -> None:
        self._buffers: dict[str, npt.NDArray[np.uint8]] = {}

    def buffer(self, name: str, shape: Shape, item_size: int) -> Words:
        """An array, valid until the next call with its name."""
        nbytes = math.prod(shape) * item_size
        if name not in self._buffers or len(self._buffers[name]) < nbytes:
            self._buffers[name] = np.empty(nbytes, np.uint8)
        return self._buffers[name][:nbytes].view(words_of(item_size)).reshape(shape)


def new_buffer(name: str, shape: Shape, item_size: int) -> Words:
    """A new array."""
    return np.empty(shape, words_of(item_size))


@dataclass(frozen=True)
class Content:
    """A tensor whose elements can be read.

    Attributes:
        name: its name.
        dtype: MindSpore's name of its element type.
        item_size: bytes of one element.
        shape: shape of the full tensor.
        shards: for accumulated gradients, whether the files have the recorded optimizer shards.
        cast: whether its elements were cast, so that all NaN count as equal.
    """

    name: str
    dtype: str
    item_size: int
    shape: Shape

    shards = AS_RECORDED
    cast = False

    def read(self, box: Box, handles: FileHandles) -> Words:
        """The elements of a box, as words in its shape."""
        raise NotImplementedError

    def paths(self) -> Collection[str]:
        """The files of its elements."""
        raise NotImplementedError


@dataclass(frozen=True)
class SliceSet:
    """One complete or partial set of slices of a tensor, such as the slices of a pipeline stage.

    Attributes:
        number: number of the stage.
        files_of: the files of each box, ascending; boxes are unordered. May be empty.
    """

    number: int
    files_of: Mapping[Box, tuple[int, ...]]

    @cached_property
    def intervals(self) -> tuple[tuple[list[int], list[tuple[int, int]]], ...]:
        """Per dimension the starts of the intervals of non-empty boxes, and the intervals, ascending."""
        boxes = [box for box in self.files_of if volume_of(box)]
        distinct = [sorted({box[dimension] for box in boxes}) for dimension in range(len(boxes[0]) if boxes else 0)]
        return tuple(([start for start, _ in each], each) for each in distinct)

    def overlapping(self, box: Box) -> Iterator[tuple[Box, Box, tuple[int, ...]]]:
        """The slices in files that overlap a box: slice, common part, files."""
        if math.prod(len(each) for _, each in self.intervals) > self._filled:
            # The boxes form no grid: the intervals' product has more boxes.
            candidates = ((slice_box, common(slice_box, box), files) for slice_box, files in self.files_of.items())
            yield from ((slice_box, both, files) for slice_box, both, files in candidates if both is not None and files)
            return
        chosen = []
        for (starts, intervals), (start, stop) in zip(self.intervals, box):
            chosen.append(intervals[max(0, bisect_right(starts, start) - 1) : bisect_left(starts, stop)])
        for slice_box in itertools.product(*chosen):
            both = common(slice_box, box)
            files = self.files_of.get(slice_box, ())
            if both is not None and files:
                yield slice_box, both, files

    @cached_property
    def _filled(self) -> int:
        """The number of boxes with elements."""
        return sum(1 for box in self.files_of if volume_of(box))

    def is_whole(self, shape: Shape) -> bool:
        """Whether every element is in some file."""
        return self._elements == math.prod(shape)

    @cached_property
    def _elements(self) -> int:
        """The number of elements in files; slices of one set do not overlap."""
        return sum(volume_of(box) for box, files in self.files_of.items() if files)


@dataclass(frozen=True)
class StoredTensor(Content):
    """A tensor in files.

    Attributes:
        stored_name: its name in the files; `name` may be another.
        slice_sets: its complete or partial sets of slices, at least one.
        indexes: the headers of the files.
    """

    stored_name: str
    slice_sets: tuple[SliceSet, ...]
    indexes: Mapping[int, CheckpointIndex] = field(repr=False, compare=False)
    shards: ShardReading = AS_RECORDED
    cast: bool = False

    def whole_slice_sets(self) -> list[SliceSet]:
        """The sets with every element."""
        return [slices for slices in self.slice_sets if slices.is_whole(self.shape)]

    def is_whole(self) -> bool:
        """Whether all sets together have every element."""
        return bool(self.whole_slice_sets()) or not self.lost(whole_box(self.shape))

    def lost(self, box: Box) -> bool:
        """Whether an element of a box is missing in all files."""
        if not volume_of(box):
            return False
        parts = [both for slices in self.slice_sets for _, both, _ in slices.overlapping(box)]
        edges = [sorted({edge for part in parts for edge in part[at]} | set(box[at])) for at in range(len(box))]
        cells = itertools.product(*(itertools.pairwise(each) for each in edges))
        return any(all(common(cell, part) is None for part in parts) for cell in cells)

    def read(self, box: Box, handles: FileHandles, buffer: Callable[[str, Shape, int], Words] = new_buffer) -> Words:
        """The elements of a box, from the lowest file of each slice.

        Raises:
            IncompleteSourceError: no file holds some of the elements.
            ReshardError: a file cannot be read.
        """
        complete = self.whole_slice_sets()[:1]
        return self.read_slice_sets(complete or self.slice_sets, box, handles, buffer)

    def read_slice_sets(
        self,
        slice_sets: Sequence[SliceSet],
        box: Box,
        handles: FileHandles,
        buffer: Callable[[str, Shape, int], Words] = new_buffer,
    ) -> Words:
        """Likewise, from these sets of slices."""
        elements = buffer("box", shape_of(box), self.item_size)
        covered = None if len(slice_sets) == 1 else np.zeros(elements.shape, bool)
        count = 0
        for slices in slice_sets:
            for slice_box, both, files in slices.overlapping(box):
                if both == box:
                    read_box(self.indexes[files[0]], self.stored_name, slice_box, both, elements, handles)
                    return elements
                part = buffer("part", shape_of(both), self.item_size)
                read_box(self.indexes[files[0]], self.stored_name, slice_box, both, part, handles)
                elements[within(both, box)] = part
                count += part.size
                if covered is not None:
                    covered[within(both, box)] = True
        if not (count == elements.size if covered is None else covered.all()):
            raise IncompleteSourceError(
                f"{quoted(self.name)}: elements of {[list(interval) for interval in box]} are in no readable file",
                parameter=self.name,
            )
        return elements

    def paths(self) -> set[str]:
        """The files of its elements."""
        first_files = {files[0] for slices in self.slice_sets for files in slices.files_of.values() if files}
        return {self.indexes[file].path for file in first_files}


def read_box(index: CheckpointIndex, name: str, slice_box: Box, box: Box, out: Words, handles: FileHandles) -> None:
    """Read a box of the slice of ``slice_box`` into ``out``, which is contiguous and has the shape of the box."""
    tensor = index.tensors[name]
    target = out.reshape(-1).view(np.uint8).data if out.nbytes else memoryview(b"")
    with reading(index.path), handles.borrow(index.path) as file:
        _Runs(file, tensor, out.dtype.itemsize, slice_box, box).read(target)


class _Runs:
    """The bytes of a box of a slice, as runs in file order."""

    def __init__(self, file: ReadableFile, tensor: Tensor, item_size: int, slice_box: Box, box: Box) -> None:
        self._file, self._extents = file, tensor.extents
        self._run = stride = item_size
        self._first = 0
        # Count and distance of the runs along each outer dimension, innermost first.
        self._steps: list[tuple[int, int]] = []
        joined = True
        for (start, stop), (low, high) in zip(reversed(box), reversed(slice_box)):
            self._first += (start - low) * stride
            if joined:
                self._run *= stop - start
            else:
                self._steps.append((stop - start, stride))
            joined = joined and (start, stop) == (low, high)
            stride *= high - low

    def read(self, out: memoryview) -> None:
        """Read all runs."""
        if not self._steps or not self._run:
            self._stored(self._first, out)
            return
        (count, stride), outer = self._steps[0], self._steps[1:]
        # The number of runs to read at a time, with the gaps between them.
        batch = 1
        near = _NEAR_REMOTE * self._run if costs_of(self._file.path).remote else max(_NEAR, 4 * self._run)
        if self._run < _SHORT_RUN and stride <= near:
            batch = max(1, min(count, _MAX_SPAN // stride))
        filled = 0
        for place in itertools.product(*(range(size) for size, _ in reversed(outer))):
            start = self._first + sum(at * step for at, (_, step) in zip(place, reversed(outer)))
            for first in range(0, count, batch):
                runs = min(batch, count - first)
                part = out[filled : filled + runs * self._run]
                if runs == 1:
                    self._stored(start + first * stride, part)
                else:
                    self._with_gaps(start + first * stride, stride, runs, part)
                filled += len(part)

    def _with_gaps(self, start: int, stride: int, runs: int, out: memoryview) -> None:
        span = np.empty(runs * stride, np.uint8)
        self._stored(start, span.data[: (runs - 1) * stride + self._run])
        np.frombuffer(out, np.uint8).reshape(runs, -1)[:] = span.reshape(runs, stride)[:, : self._run]

    def _stored(self, start: int, out: memoryview) -> None:
        """Read the slice's bytes from an offset on, across its extents."""
        filled = 0
        for offset, size in self._extents:
            if start < size and filled < len(out):
                length = min(size - start, len(out) - filled)
                fill(self._file, offset + start, out[filled : filled + length])
                filled += length
                start = 0
            else:
                start -= min(start, size)
        assert filled == len(out)


@dataclass
class Source:
    """A checkpoint whose tensors are placed by the loops of `boxes`.

    Attributes:
        checkpoint: the checkpoint.
        tensors: the tensors with a layout, by name.
        values: all other entries, with their files, ascending.
        holders: per name in the files its files, ascending.
        unread: names in the files that are neither tensors nor values.
        origin: where types come from, for messages.
        model_names: names in the model by name, where others are those of a trainer's state.
        last_names: names by the names before the last renaming.
        tied: pairs of tensors that should be equal; only the first is used.
    """

    checkpoint: Checkpoint
    tensors: Mapping[str, Content]
    values: Mapping[str, tuple[int, ...]]
    holders: Mapping[str, tuple[int, ...]]
    unread: frozenset[str] = frozenset()
    origin: str = "in the source"
    model_names: Mapping[str, str] = field(default_factory=dict)
    last_names: Mapping[str, str] = field(default_factory=dict)
    tied: Sequence[tuple[Content, Content]] = ()

    @property
    def indexes(self) -> Mapping[int, CheckpointIndex]:
        """The headers of the files, by number."""
        return self.checkpoint.indexes

    @property
    def names(self) -> set[str]:
        """The names of all entries."""
        return {*self.tensors, *self.values, *self.unread}

    def value(self, name: str, file: int) -> Tensor:
        """The header of a value in a file."""
        return self.indexes[file].tensors[name]

    def with_elements(self, name: str) -> tuple[int, ...]:
        """The files with elements of a value, ascending: a cut by rows leaves an empty entry to other ranks."""
        holders = self.holders[name]
        return tuple(file for file in holders if self.value(name, file).elements) or holders

    def check_read(self, is_requested: Callable[[str], bool]) -> None:
        """Raise if a requested entry of the files is neither a tensor nor a value.

        Raises:
            CheckpointError: a requested entry is neither.
        """
        unread = sorted(filter(is_requested, self.unread))
        if unread:
            raise CheckpointError(
                f"{self.checkpoint.place}: the files contain unread entries: " + listing(unread), parameter=unread[0]
            )


def stored_source(checkpoint: Checkpoint, strategy: Strategy) -> Source:
    """A checkpoint as it is stored; ``strategy`` has the layouts of rank directories, other forms record their own."""
    holders, options = _holders(checkpoint.indexes), form_named(checkpoint.form).options
    tensors = _StoredTensors(checkpoint, strategy, holders)
    if options.needs_strategy:
        # Without a strategy, every tensor of several elements is whole.
        values = holders.keys() - (tensors if strategy.is_none else strategy.parameters)
    else:
        values = {*checkpoint.values(), *checkpoint.without_layout()} & holders.keys()
    # The readers of other forms report skipped entries.
    unread = holders.keys() - tensors.keys() - values if options.needs_strategy else ()
    source = Source(checkpoint, tensors, {name: holders[name] for name in sorted(values)}, holders, frozenset(unread))
    if options.shards:
        source.values = {name: source.with_elements(name) for name in source.values}
    return source


def files_read(source: Source) -> list[CheckpointIndex]:
    """The files of stored tensors to read if any replica suffices."""
    files = {numbers[0] for numbers in source.values.values()}
    slice_sets = {
        id(slices): slices
        for tensor in source.tensors.values()
        if isinstance(tensor, StoredTensor)
        for slices in tensor.slice_sets
    }
    files.update(numbers[0] for slices in slice_sets.values() for numbers in slices.files_of.values() if numbers)
    return [source.indexes[file] for file in sorted(files)]


def _holders(indexes: Mapping[int, CheckpointIndex]) -> dict[str, tuple[int, ...]]:
    """Per name its files, ascending; names in the same files share one tuple."""
    groups = files_alike(indexes)
    groups_of: dict[str, list[int]] = {}
    for number, files in enumerate(groups):
        for name in indexes[files[0]].tensors:
            groups_of.setdefault(name, []).append(number)
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}
    holders = {}
    for name, numbers in groups_of.items():
        key = tuple(numbers)
        if key not in shared:
            shared[key] = tuple(sorted(itertools.chain.from_iterable(groups[number] for number in key)))
        holders[name] = shared[key]
    return holders


class _StoredTensors(ByName[Content]):
    """The tensors of a checkpoint, each created at its first use.

    Raises:
        CheckpointError: at its first use, a slice in a file does not fit the strategy or metadata.
    """

    def __init__(self, checkpoint: Checkpoint, strategy: Strategy, holders: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(checkpoint.tensors.keys())
        self._checkpoint, self._strategy, self._holders = checkpoint, strategy, holders
        form, self._indexes = form_named(checkpoint.form), checkpoint.indexes
        self._by_strategy, self._cut = form.options.needs_strategy, form.cut(checkpoint)
        # Most tensors share cuts and files with others. Keys have the identity of objects in `_referenced`.
        self._slice_sets: dict[object, SliceSet] = {}
        self._referenced: list[object] = []
        self._tensors: dict[str, StoredTensor] = {}
        self._ranks: dict[tuple[int, int], tuple[frozenset[int], list[int]]] = {}

    def __getitem__(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            tensor, shards = self._checkpoint.tensors[name], AS_RECORDED
            if self._by_strategy:
                slice_sets, shards = self._of_ranks(tensor)
            else:
                slice_sets = [self._as_recorded(tensor)]
            self._tensors[name] = StoredTensor(
                name, tensor.dtype, tensor.item_size, tensor.shape, name, tuple(slice_sets), self._indexes, shards
            )
        return self._tensors[name]

    def _of_ranks(self, tensor: GlobalTensor) -> tuple[list[SliceSet], ShardReading]:
        """The slices of a tensor per stage, and whether the files have the recorded optimizer shards."""
        name, slice_sets, plain = tensor.name, [], set()
        gradients = name.startswith(ACCUMULATED_GRADIENTS)
        recording: list[Stage] = []
        for stage in self._strategy.stages:
            if not self._strategy.is_none and name not in stage.layouts:
                continue
            layout = stage_layout(self._strategy, stage, name, tensor.shape)
            ranks, samples = self._ranks_with(name, stage)
            if layout.shards > 1:
                recording.append(stage)
            if not ranks:
                continue
            readings = [layout, layout.unsharded()] if gradients and layout.shards > 1 else [layout]
            # Where all boxes have one shape, one file of each header is enough.
            compared = samples if layout.uneven is None else ranks
            chosen = next((each for each in readings if self._fits(tensor, each, stage.first_rank, compared)), None)
            if chosen is None:
                rank = min(ranks)
                index = self._indexes[rank]
                raise CheckpointError(
                    f"{index.path}: {quoted(name)} of shape {list(index.tensors[name].shape)} is no slice that the "
                    f"strategy gives to rank {rank} of a tensor of shape {list(tensor.shape)}",
                    file=index.path,
                    rank=rank,
                    parameter=name,
                )
            if layout.shards > 1:
                plain.add(chosen.shards == 1)
            key = (chosen, tensor.shape, stage.number, id(ranks))
            if key not in self._slice_sets:
                boxes = device_boxes(chosen, tensor.shape) or ()
                self._slice_sets[key] = SliceSet(stage.number, by_box(boxes, stage.ranks, zip(ranks, ranks)))
            slice_sets.append(self._slice_sets[key])
        if not gradients:
            return slice_sets, AS_RECORDED
        undecided = () if plain else tuple(rank for stage in recording for rank in stage.ranks)
        return slice_sets, ShardReading(True in plain, not recording, undecided)

    def _ranks_with(self, name: str, stage: Stage) -> tuple[frozenset[int], list[int]]:
        """The ranks of a stage whose file holds a name, and one of each header; names in the same files share them."""
        files = self._holders.get(name, ())
        key = (stage.number, id(files))
        if key not in self._ranks:
            ranks = frozenset(rank for rank in files if rank in stage.ranks)
            groups = files_alike({rank: self._indexes[rank] for rank in ranks})
            self._ranks[key] = ranks, [group[0] for group in groups]
        return self._ranks[key]

    def _fits(self, tensor: GlobalTensor, layout: LayoutValues, first: int, ranks: Iterable[int]) -> bool:
        """Whether the slices in the files have the shapes of a layout."""
        boxes = device_boxes(layout, tensor.shape)
        return boxes is not None and all(
            shape_of(boxes[rank - first]) == self._indexes[rank].tensors[tensor.name].shape for rank in ranks
        )

    def _as_recorded(self, tensor: GlobalTensor) -> SliceSet:
        """The boxes of a tensor of another form, by its recorded layout or as metadata lists them; else it is whole."""
        name = tensor.name
        if self._cut is None:
            return SliceSet(0, {whole_box(tensor.shape): tuple(self._checkpoint.holders(name))})
        saved = self._cut.saved_layout(name)
        if saved is not None and id(saved) in self._slice_sets:
            return self._slice_sets[id(saved)]
        if saved is not None and saved.layout is not None:
            boxes = device_boxes(recorded_layout(saved.layout), tensor.shape) or ()
            slices = SliceSet(0, by_box(boxes, saved.ranks, saved.rank_of))
        else:
            slices = SliceSet(0, self._listed(name, self._cut.boxes_of(name)))
        if saved is not None:
            self._referenced.append(saved)
            self._slice_sets[id(saved)] = slices
        return slices

    def _listed(self, name: str, boxes: Iterable[tuple[Box, int]]) -> dict[Box, tuple[int, ...]]:
        """The files of each box in metadata, ascending; boxes have to fit the files."""
        files_of: dict[Box, list[int]] = {}
        for box, file in boxes:
            if shape_of(box) != self._indexes[file].tensors[name].shape:
                path = self._indexes[file].path
                raise CheckpointError(
                    f"{path}: {quoted(name)} is no chunk of shape {list(shape_of(box))}", file=path, parameter=name
                )
            files_of.setdefault(box, []).append(file)
        return {box: tuple(sorted(files)) for box, files in files_of.items()}


def recorded_layout(layout: Any) -> LayoutValues:
    """The recorded values of a layout, without its computed properties."""
    return LayoutValues(
        layout.device_matrix,
        layout.tensor_map,
        layout.shard_size,
        layout.uneven,
        layout.recorded_shape,
        layout.expandable,
    )


def stage_layout(strategy: Strategy, stage: Stage, name: str, shape: Shape) -> LayoutValues:
    """The recorded layout of a tensor in a stage; without a strategy, every device has all of it."""
    if strategy.is_none:
        return LayoutValues((stage.device_count,), ((),) * len(shape))
    return recorded_layout(stage.layouts[name])


def value_content(indexes: Mapping[int, CheckpointIndex], name: str, file: int) -> StoredTensor:
    """A file's copy of a value, as a tensor of that file alone."""
    tensor = indexes[file].tensors[name]
    # Text has no elements: its bytes are compared.
    text = tensor.dtype in NO_ARRAYS
    shape: Shape = (tensor.nbytes,) if text else tensor.shape
    slices = SliceSet(0, {whole_box(shape): (file,)})
    return StoredTensor(name, tensor.dtype, 1 if text else tensor.item_size, shape, name, (slices,), indexes)


def number_in(value: Content, handles: FileHandles) -> int:
    """The integer that a value of one element is."""
    data = value.read(whole_box(value.shape), handles).tobytes()
    return int.from_bytes(data, "little", signed=value.dtype.startswith("Int"))


def by_box(
    boxes: Sequence[Box], ranks: Sequence[int], rank_of: Iterable[tuple[int, int]]
) -> dict[Box, tuple[int, ...]]:
    """The files of each box, ascending.

    Args:
        boxes: the box of each rank.
        ranks: these ranks, in the order of the boxes.
        rank_of: files, each with its rank.
    """
    files_of: dict[Box, list[int]] = {box: [] for box in boxes}
    box_of = dict(zip(ranks, boxes))
    for file, rank in sorted(rank_of):
        files_of[box_of[rank]].append(file)
    return {box: tuple(files) for box, files in files_of.items()}
