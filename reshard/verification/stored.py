"""Tensors as the files of a checkpoint hold them, and their elements.

Names, types and files come from a `Checkpoint`, as in conversions: mistakes there show as refusals. The box of each
slice is computed here (see `boxes`) and has to fit the shape of every slice.
"""

from __future__ import annotations

import itertools
import math
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Callable, NamedTuple, Optional, Protocol

import numpy as np
import numpy.typing as npt

from reshard.checkpoints import CheckpointIndex, FileHandles, Tensor, reading_error
from reshard.checkpoints.by_name import ByName
from reshard.checkpoints.checkpoint import Checkpoint, FileSharding, GlobalTensor, Sharding
from reshard.checkpoints.formats.dtypes import NO_ARRAYS
from reshard.errors import CheckpointError, IncompleteSourceError
from reshard.forms.chunks import ChunkedCheckpoint
from reshard.forms.registry import form_named
from reshard.storage import ReadableFile, fill, storage_of
from reshard.strategies import Stage, Strategy
from reshard.text.messages import listing
from reshard.text.names import ACCUMULATED_GRADIENTS
from reshard.text.wording import quoted
from reshard.verification.boxes import (
    Box,
    Recorded,
    Shape,
    common,
    device_boxes,
    shape_of,
    volume_of,
    whole_box,
    within,
)

Words = npt.NDArray[Any]

# Shorter runs are read together with the gaps between them, if the gaps are small: in bytes on local disks,
# in multiples of the run on a network.
_SHORT_RUN, _NEAR, _NEAR_REMOTE, _MAX_SPAN = 32 << 10, 32 << 10, 4, 1 << 20


def words_of(item_size: int) -> str:
    """The NumPy type of elements of this size."""
    return f"<u{item_size}" if item_size in (1, 2, 4, 8) else f"V{item_size}"


class Rooms(threading.local):
    """Buffers of a thread, reused for each block so that they stay in the cache."""

    def __init__(self) -> None:
        self._rooms: dict[str, npt.NDArray[np.uint8]] = {}

    def room(self, name: str, shape: Shape, item_size: int) -> Words:
        """An array, valid until the next call with its name."""
        nbytes = math.prod(shape) * item_size
        if name not in self._rooms or len(self._rooms[name]) < nbytes:
            self._rooms[name] = np.empty(nbytes, np.uint8)
        return self._rooms[name][:nbytes].view(words_of(item_size)).reshape(shape)


def new_room(name: str, shape: Shape, item_size: int) -> Words:
    """A new array."""
    return np.empty(shape, words_of(item_size))


class Content(Protocol):
    """A tensor whose elements can be read."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def dtype(self) -> str:
        """MindSpore's name of its element type."""

    @property
    def item_size(self) -> int:
        """Bytes of one element."""

    @property
    def shape(self) -> Shape:
        """Shape of the full tensor."""

    @property
    def shards(self) -> Shards:
        """For accumulated gradients, whether recorded optimizer shards are made."""

    @property
    def cast(self) -> bool:
        """Whether its elements were cast, so that all NaN count as equal."""

    def read(self, box: Box, handles: FileHandles) -> Words:
        """The elements of a box, as words in its shape."""

    def paths(self) -> Collection[str]:
        """The files that its elements are read from."""


class Shards(NamedTuple):
    """Whether the optimizer shards that strategies record for accumulated gradients are made.

    Attributes:
        plain: some are recorded and not made.
        unrecorded: none is recorded.
        undecided: the ranks whose files would show it, if no present file does.
    """

    plain: bool = False
    unrecorded: bool = False
    undecided: tuple[int, ...] = ()


AS_RECORDED = Shards()
"""For all tensors except accumulated gradients."""


@dataclass(frozen=True)
class Way:
    """One complete or partial set of slices of a tensor, such as those of a pipeline stage.

    Attributes:
        number: number of the stage.
        held: the files of each box, ascending; boxes are unordered. May be empty.
    """

    number: int
    held: Mapping[Box, tuple[int, ...]]

    @cached_property
    def intervals(self) -> tuple[tuple[list[int], list[tuple[int, int]]], ...]:
        """Per dimension the starts of the intervals of non-empty boxes, and the intervals, ascending."""
        boxes = [box for box in self.held if volume_of(box)]
        found = [sorted({box[dimension] for box in boxes}) for dimension in range(len(boxes[0]) if boxes else 0)]
        return tuple(([start for start, _ in each], each) for each in found)

    def meeting(self, box: Box) -> Iterator[tuple[Box, Box, tuple[int, ...]]]:
        """The slices in files that meet a box: slice, common part, files."""
        if math.prod(len(each) for _, each in self.intervals) > self._filled:
            # No grid, as in a brick wall.
            every = ((held, common(held, box), files) for held, files in self.held.items())
            yield from ((held, both, files) for held, both, files in every if both is not None and files)
            return
        chosen = []
        for (starts, intervals), (start, stop) in zip(self.intervals, box):
            chosen.append(intervals[max(0, bisect_right(starts, start) - 1) : bisect_left(starts, stop)])
        for held in itertools.product(*chosen):
            both = common(held, box)
            files = self.held.get(held, ())
            if both is not None and files:
                yield held, both, files

    @cached_property
    def _filled(self) -> int:
        """How many boxes have elements."""
        return sum(1 for box in self.held if volume_of(box))

    def is_whole(self, shape: Shape) -> bool:
        """Whether every element is in some file."""
        return self._elements == math.prod(shape)

    @cached_property
    def _elements(self) -> int:
        """Number of elements in files; slices of one way do not overlap."""
        return sum(volume_of(box) for box, files in self.held.items() if files)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in files; see `Content`.

    Attributes:
        name: its name, perhaps another than in the files.
        stored_name: its name in the files.
        dtype: see `Content`.
        item_size: see `Content`.
        shape: see `Content`.
        ways: its complete or partial sets of slices, at least one.
        indexes: the headers of the files.
        shards: see `Content`.
        cast: see `Content`.
    """

    name: str
    stored_name: str
    dtype: str
    item_size: int
    shape: Shape
    ways: tuple[Way, ...]
    indexes: Mapping[int, CheckpointIndex] = field(repr=False, compare=False)
    shards: Shards = AS_RECORDED
    cast: bool = False

    def whole_ways(self) -> list[Way]:
        """The ways with every element."""
        return [way for way in self.ways if way.is_whole(self.shape)]

    def is_whole(self) -> bool:
        """Whether every element is in some file, in any number of ways."""
        return bool(self.whole_ways()) or not self.lost(whole_box(self.shape))

    def lost(self, box: Box) -> bool:
        """Whether an element of a box is in no file."""
        if not volume_of(box):
            return False
        parts = [both for way in self.ways for _, both, _ in way.meeting(box)]
        edges = [sorted({edge for part in parts for edge in part[at]} | set(box[at])) for at in range(len(box))]
        cells = itertools.product(*(zip(each, each[1:]) for each in edges))
        return any(all(common(cell, part) is None for part in parts) for cell in cells)

    def read(self, box: Box, handles: FileHandles, room: Callable[[str, Shape, int], Words] = new_room) -> Words:
        """The elements of a box; of each slice those in its lowest file.

        Args:
            box: the box.
            handles: open files.
            room: returns buffers.

        Raises:
            IncompleteSourceError: elements are in no file.
            ReshardError: a file cannot be read.
        """
        whole = self.whole_ways()[:1]
        return self.read_ways(whole or self.ways, box, handles, room)

    def read_ways(
        self,
        ways: Sequence[Way],
        box: Box,
        handles: FileHandles,
        room: Callable[[str, Shape, int], Words] = new_room,
    ) -> Words:
        """Likewise, from some of the ways."""
        found = room("box", shape_of(box), self.item_size)
        covered = None if len(ways) == 1 else np.zeros(found.shape, bool)
        count = 0
        for way in ways:
            for held, both, files in way.meeting(box):
                if both == box:
                    read_box(self.indexes[files[0]], self.stored_name, held, both, found, handles)
                    return found
                part = room("part", shape_of(both), self.item_size)
                read_box(self.indexes[files[0]], self.stored_name, held, both, part, handles)
                found[within(both, box)] = part
                count += part.size
                if covered is not None:
                    covered[within(both, box)] = True
        if not (count == found.size if covered is None else covered.all()):
            raise IncompleteSourceError(
                f"{quoted(self.name)}: elements of {[list(interval) for interval in box]} are in no readable file",
                parameter=self.name,
            )
        return found

    def paths(self) -> set[str]:
        """The files that its elements are read from."""
        return {self.indexes[file].path for file in self.first_files()}

    def first_files(self) -> set[int]:
        """The lowest file of each slice."""
        return {files[0] for way in self.ways for files in way.held.values() if files}


def read_box(index: CheckpointIndex, name: str, held: Box, box: Box, out: Words, handles: FileHandles) -> None:
    """Read a box of a slice, in C order.

    Args:
        index: the header of the file.
        name: name of the tensor in it.
        held: the box of the slice.
        box: the box to read, within that of the slice.
        out: contiguous, of the shape of the box.
        handles: open files.

    Raises:
        ReshardError: the file cannot be read.
    """
    tensor = index.tensors[name]
    target = out.reshape(-1).view(np.uint8).data if out.nbytes else memoryview(b"")
    try:
        with handles.borrow(index.path) as file:
            _Runs(file, tensor, out.dtype.itemsize, held, box).read(target)
    except OSError as error:
        raise reading_error(index.path, error) from error


class _Runs:
    """The bytes of a box of a slice, as runs in file order."""

    def __init__(self, file: ReadableFile, tensor: Tensor, item_size: int, held: Box, box: Box) -> None:
        self._file, self._extents = file, tensor.extents
        self._run = stride = item_size
        self._first = 0
        # Count and distance of the runs along each outer dimension, innermost first.
        self._steps: list[tuple[int, int]] = []
        joined = True
        for (start, stop), (low, high) in zip(reversed(box), reversed(held)):
            self._first += (start - low) * stride
            if joined:
                self._run *= stop - start
            else:
                self._steps.append((stop - start, stride))
            joined = joined and (start, stop) == (low, high)
            stride *= high - low

    def read(self, out: memoryview) -> None:
        """Read all of them."""
        if not self._steps or not self._run:
            self._stored(self._first, out)
            return
        (count, stride), outer = self._steps[0], self._steps[1:]
        # Runs that are read at a time, with the gaps between them.
        several = 1
        near = _NEAR_REMOTE * self._run if storage_of(self._file.path).remote else max(_NEAR, 4 * self._run)
        if self._run < _SHORT_RUN and stride <= near:
            several = max(1, min(count, _MAX_SPAN // stride))
        done = 0
        for place in itertools.product(*(range(size) for size, _ in reversed(outer))):
            start = self._first + sum(at * step for at, (_, step) in zip(place, reversed(outer)))
            for first in range(0, count, several):
                runs = min(several, count - first)
                part = out[done : done + runs * self._run]
                if runs == 1:
                    self._stored(start + first * stride, part)
                else:
                    self._with_gaps(start + first * stride, stride, runs, part)
                done += len(part)

    def _with_gaps(self, start: int, stride: int, runs: int, out: memoryview) -> None:
        span = np.empty(runs * stride, np.uint8)
        self._stored(start, span.data[: (runs - 1) * stride + self._run])
        np.frombuffer(out, np.uint8).reshape(runs, -1)[:] = span.reshape(runs, stride)[:, : self._run]

    def _stored(self, start: int, out: memoryview) -> None:
        """The slice's bytes from one on, through any number of extents."""
        done = 0
        for offset, size in self._extents:
            if start < size and done < len(out):
                length = min(size - start, len(out) - done)
                fill(self._file, offset + start, out[done : done + length])
                done += length
                start = 0
            else:
                start -= min(start, size)
        assert done == len(out)


class StoredSource:
    """A checkpoint with tensors placed by the loops of `boxes`.

    Args:
        checkpoint: the checkpoint.
        strategy: the layouts of rank directories; other forms record their own.
        chosen: numbers of the files to read; None for all.

    Attributes:
        checkpoint: the checkpoint.
        indexes: the headers of the files, by number.
        held: per name its files, ascending.
        tensors: the tensors with a layout, by name; without those in no file.
        values: all other entries, with their files, ascending.
        listed: names that the strategy or the metadata lists, in files or not.
        unread: names in the files that are neither tensors nor values.
        tied: pairs of names that should be equal; only the first is used.
    """

    origin = "in the source"
    tied: tuple[tuple[str, str], ...] = ()

    def __init__(self, checkpoint: Checkpoint, strategy: Strategy, chosen: Optional[Collection[int]] = None) -> None:
        self.checkpoint = checkpoint
        self.indexes: Mapping[int, CheckpointIndex] = (
            checkpoint.indexes
            if chosen is None
            else {number: index for number, index in checkpoint.indexes.items() if number in chosen}
        )
        self.held = _holders(self.indexes)
        self.tensors: Mapping[str, Content] = _StoredTensors(self, strategy)
        if form_named(checkpoint.form).options.needs_strategy:
            # Without a strategy, every tensor of several elements has a layout: it is whole.
            self.listed = frozenset(self.tensors if strategy.is_none else strategy.parameters)
            values = self.held.keys() - self.listed
            self.unread = frozenset(self.held.keys() - self.tensors.keys() - values)
        else:
            self.listed = frozenset(self.tensors)
            values = {*checkpoint.values(), *checkpoint.without_layout()} & self.held.keys()
            # The readers of these forms report entries that they skip.
            self.unread = frozenset()
        self.values = {name: self.held[name] for name in sorted(values)}

    def check_read(self, wanted: Callable[[str], bool]) -> None:
        """Raise if an entry of the files is neither a tensor nor a value.

        Raises:
            CheckpointError: a requested entry is neither.
        """
        unread = sorted(filter(wanted, self.unread))
        if unread:
            raise CheckpointError(
                f"{self.checkpoint.place}: the files contain unread entries: " + listing(unread), parameter=unread[0]
            )

    @property
    def names(self) -> set[str]:
        """The names of all entries of all files."""
        return self.checkpoint.names()

    def value(self, name: str, file: int) -> Tensor:
        """The header of a value in a file."""
        return self.indexes[file].tensors[name]

    @property
    def files_read(self) -> list[CheckpointIndex]:
        """The files whose contents are read if any replica suffices."""
        files = {numbers[0] for numbers in self.values.values()}
        known: set[int] = set()
        for tensor in self.tensors.values():
            assert isinstance(tensor, StoredTensor)
            new = [way for way in tensor.ways if id(way) not in known]
            known.update(map(id, new))
            files.update(held[0] for way in new for held in way.held.values() if held)
        return [self.indexes[file] for file in sorted(files)]


def _holders(indexes: Mapping[int, CheckpointIndex]) -> dict[str, tuple[int, ...]]:
    """Per name its files, ascending; names in the same files share one tuple."""
    alike: dict[int, list[int]] = {}
    for file, index in sorted(indexes.items()):
        alike.setdefault(id(index.tensors), []).append(file)
    groups = [*alike.values()]
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
    """The tensors of a checkpoint; each is made at its first use.

    Raises:
        CheckpointError: at its first use, a slice differs from the one that strategy or metadata give to its file.
    """

    def __init__(self, source: StoredSource, strategy: Strategy) -> None:
        checkpoint = source.checkpoint
        self._checkpoint, self._strategy = checkpoint, strategy
        self._form = form_named(checkpoint.form)
        self._indexes, self._held = source.indexes, source.held
        # Most tensors have the cuts and files of another.
        self._known: dict[object, Way] = {}
        self._kept: dict[int, object] = {}
        self._made: dict[str, StoredTensor] = {}
        self._samples: dict[int, tuple[int, ...]] = {}
        self._ranks: dict[tuple[int, int], frozenset[int]] = {}
        everything = len(source.indexes) == len(checkpoint.indexes)
        super().__init__([*checkpoint.tensors] if everything else [*filter(self._is_held, checkpoint.tensors)])
        self._set = frozenset(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._set

    def _is_held(self, name: str) -> bool:
        return any(self._indexes.keys() & files for files in self._checkpoint.present(self._checkpoint.tensors[name]))

    def __getitem__(self, name: str) -> StoredTensor:
        if name not in self._set:
            raise KeyError(name)
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = self._stored(name)
        return found

    def _stored(self, name: str) -> StoredTensor:
        tensor = self._checkpoint.tensors[name]
        shards = AS_RECORDED
        if self._form.options.needs_strategy:
            ways, shards = self._of_ranks(tensor)
        else:
            ways = [self._of_sharding(tensor, at, sharding) for at, sharding in enumerate(tensor.shardings)]
        return StoredTensor(
            name, name, tensor.dtype, tensor.item_size, tensor.shape, tuple(ways), self._indexes, shards
        )

    def _of_ranks(self, tensor: GlobalTensor) -> tuple[list[Way], Shards]:
        """The stages that hold a tensor, and whether recorded optimizer shards are made."""
        name, ways, plain = tensor.name, [], set()
        recorded = {
            stage.number: Recorded((stage.device_count,), ((),) * len(tensor.shape))
            if self._strategy.is_none
            else recorded_layout(stage.layouts[name])
            for stage in self._strategy.stages
            if self._strategy.is_none or name in stage.layouts
        }
        gradients = name.startswith(ACCUMULATED_GRADIENTS)
        for stage in self._strategy.stages:
            ranks = self._ranks_with(name, stage) if stage.number in recorded else frozenset()
            if not ranks:
                continue
            layout = recorded[stage.number]
            readings = [layout, layout.unsharded()] if gradients and layout.shards > 1 else [layout]
            chosen = next((each for each in readings if self._fits(tensor, each, stage.first_rank, ranks)), None)
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
            if key not in self._known:
                boxes = device_boxes(chosen, tensor.shape) or ()
                self._known[key] = Way(stage.number, by_box(boxes, stage.first_rank, ranks))
            ways.append(self._known[key])
        if not gradients:
            return ways, AS_RECORDED
        recording = [stage for stage in self._strategy.stages if recorded.get(stage.number, _WHOLE).shards > 1]
        undecided = () if plain else tuple(rank for stage in recording for rank in stage.ranks)
        return ways, Shards(True in plain, not recording, undecided)

    def _ranks_with(self, name: str, stage: Stage) -> frozenset[int]:
        """The ranks of a stage whose file holds a name; names in the same files share one object."""
        files = self._held.get(name, ())
        key = (stage.number, id(files))
        if key not in self._ranks:
            self._ranks[key] = frozenset(rank for rank in files if rank in stage.ranks)
        return self._ranks[key]

    def _fits(self, tensor: GlobalTensor, layout: Recorded, first: int, ranks: Collection[int]) -> bool:
        """Whether the slices in the files have the shapes of a layout."""
        boxes = device_boxes(layout, tensor.shape)
        if layout.uneven is None:
            # All boxes have one shape, and one file stands for all with the same header.
            if id(ranks) not in self._samples:
                self._samples[id(ranks)] = tuple({id(self._indexes[rank].tensors): rank for rank in ranks}.values())
            ranks = self._samples[id(ranks)]
        return boxes is not None and all(
            shape_of(boxes[rank - first]) == self._indexes[rank].tensors[tensor.name].shape for rank in ranks
        )

    def _of_sharding(self, tensor: GlobalTensor, number: int, sharding: Sharding) -> Way:
        """The boxes of a tensor of another form in files, as metadata records them for each file."""
        saved = self._form.saved_cut(self._checkpoint, tensor.name)
        if saved is not None and saved.layout is not None:
            key: object = (id(saved), number)
            if key not in self._known:
                boxes = device_boxes(recorded_layout(saved.layout), tensor.shape) or ()
                place = {rank: at for at, rank in enumerate(saved.ranks)}
                held: dict[Box, list[int]] = {box: [] for box in boxes}
                for file, rank in sorted(saved.rank_of):
                    if file in self._indexes:
                        held[boxes[place[rank]]].append(file)
                self._known[key] = Way(number, {box: tuple(files) for box, files in held.items()})
                self._kept[id(saved)] = saved
            return self._known[key]
        if isinstance(self._checkpoint, ChunkedCheckpoint):
            return self._of_chunks(tensor, self._checkpoint, number)
        key = (id(sharding), number)
        if key not in self._known:
            self._kept[id(sharding)] = sharding
            # Metadata lists the boxes one by one, in C order.
            edges = [list(zip(each, each[1:])) for each in sharding.grid.edges]
            stored = sharding.parts_of if isinstance(sharding, FileSharding) else None
            self._known[key] = Way(
                number,
                {
                    tuple(box): tuple(file for file in sharding.holders(at) if file in self._indexes)
                    for at, box in enumerate(itertools.product(*edges) if stored is None else stored)
                },
            )
        return self._known[key]

    def _of_chunks(self, tensor: GlobalTensor, checkpoint: ChunkedCheckpoint, number: int) -> Way:
        """The boxes that metadata states one by one, each of the shape that the file has of it."""
        chunks, holders = checkpoint.chunks[tensor.name].chunks, checkpoint.chunk_holders[tensor.name]
        held: dict[Box, list[int]] = {}
        for chunk, holder in zip(chunks, holders):
            box = tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes))
            if holder is None or holder not in self._indexes:
                continue
            if shape_of(box) != self._indexes[holder].tensors[tensor.name].shape:
                raise CheckpointError(
                    f"{self._indexes[holder].path}: {quoted(tensor.name)} is no chunk of shape {list(shape_of(box))}",
                    file=self._indexes[holder].path,
                    parameter=tensor.name,
                )
            held.setdefault(box, []).append(holder)
        return Way(number, {box: tuple(sorted(files)) for box, files in held.items()})


_WHOLE = Recorded((), ())


def recorded_layout(layout: Any) -> Recorded:
    """The recorded values of a layout, without computed ones."""
    return Recorded(
        layout.device_matrix,
        layout.tensor_map,
        layout.shard_size,
        layout.uneven,
        layout.recorded_shape,
        layout.expandable,
    )


def value_content(indexes: Mapping[int, CheckpointIndex], name: str, file: int) -> StoredTensor:
    """A file's copy of a value, as a tensor of that file alone."""
    tensor = indexes[file].tensors[name]
    # Text has no elements: its bytes are compared.
    text = tensor.dtype in NO_ARRAYS
    shape: Shape = (tensor.nbytes,) if text else tensor.shape
    way = Way(0, {whole_box(shape): (file,)})
    return StoredTensor(name, name, tensor.dtype, 1 if text else tensor.item_size, shape, (way,), indexes)


def by_box(boxes: Sequence[Box], first: int, ranks: Iterable[int]) -> dict[Box, tuple[int, ...]]:
    """The ranks that hold each box, ascending."""
    held: dict[Box, list[int]] = {box: [] for box in boxes}
    for rank in sorted(ranks):
        held[boxes[rank - first]].append(rank)
    return {box: tuple(found) for box, found in held.items()}
