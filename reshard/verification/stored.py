"""Tensors as the files of a checkpoint hold them, and their elements.

What is in which file is taken from a `Checkpoint`, as conversions take it: its mistakes show as refusals. Which box
of a tensor a file's slice is, is worked out here (see `boxes`), and has to fit the shape of every slice.
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
from reshard.errors import CheckpointError, IncompleteSourceError
from reshard.forms.checkpoint2 import Checkpoint2
from reshard.forms.chunks import ChunkedCheckpoint
from reshard.forms.ranks.checkpoint import RankCheckpoint
from reshard.storage import ReadableFile, fill, storage_of
from reshard.strategies import Strategy
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

# Runs shorter than this are read with what lies between them, as long as they are no farther apart, in bytes where
# reading takes no waiting, else in times of their own length.
_SHORT_RUN, _NEAR, _NEAR_REMOTE, _MAX_SPAN = 32 << 10, 32 << 10, 4, 1 << 20


def words_of(item_size: int) -> str:
    """The NumPy type of elements of this size."""
    return f"<u{item_size}" if item_size in (1, 2, 4, 8) else f"V{item_size}"


class Rooms(threading.local):
    """Memory of a thread that is used again for each block, so that it stays in the cache."""

    def __init__(self) -> None:
        self._rooms: dict[str, npt.NDArray[np.uint8]] = {}

    def room(self, name: str, shape: Shape, item_size: int) -> Words:
        """An array that holds until the next of its name is asked for."""
        nbytes = math.prod(shape) * item_size
        if name not in self._rooms or len(self._rooms[name]) < nbytes:
            self._rooms[name] = np.empty(nbytes, np.uint8)
        return self._rooms[name][:nbytes].view(words_of(item_size)).reshape(shape)


def new_room(name: str, shape: Shape, item_size: int) -> Words:
    """Likewise, an array of its own."""
    return np.empty(shape, words_of(item_size))


class Content(Protocol):
    """A tensor whose elements can be had."""

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
        """Of the full tensor."""

    @property
    def shards(self) -> Shards:
        """Of accumulated gradients, whether recorded optimizer shards are made."""

    @property
    def cast(self) -> bool:
        """Whether its elements were cast, so that all that is no number counts as the same."""

    def read(self, box: Box, handles: FileHandles) -> Words:
        """The elements of a box, as words in its shape."""

    def paths(self) -> Collection[str]:
        """The files of which something may be read."""


class Shards(NamedTuple):
    """Whether the optimizer shards that strategies record for accumulated gradients are made.

    Attributes:
        plain: some are recorded and not made.
        unrecorded: none is recorded.
        undecided: the ranks whose files would tell, where no file does.
    """

    plain: bool = False
    unrecorded: bool = False
    undecided: tuple[int, ...] = ()


AS_RECORDED = Shards()
"""Of all tensors but accumulated gradients."""


@dataclass(frozen=True)
class Way:
    """One way in which files hold a tensor: the slices of a pipeline stage, mostly.

    Attributes:
        number: of the stage.
        held: the files that hold each box, ascending; boxes in no order. May be empty.
    """

    number: int
    held: Mapping[Box, tuple[int, ...]]

    @cached_property
    def intervals(self) -> tuple[tuple[list[int], list[tuple[int, int]]], ...]:
        """Per dimension where the intervals of boxes with elements begin, and these, ascending."""
        boxes = [box for box in self.held if volume_of(box)]
        found = [sorted({box[dimension] for box in boxes}) for dimension in range(len(boxes[0]) if boxes else 0)]
        return tuple(([start for start, _ in each], each) for each in found)

    def meeting(self, box: Box) -> Iterator[tuple[Box, Box, tuple[int, ...]]]:
        """The slices that have elements of a box and are in some file: slice, common part, files."""
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
        """How many elements are in some file; slices of one way do not overlap."""
        return sum(volume_of(box) for box, files in self.held.items() if files)


@dataclass(frozen=True)
class Stored:
    """A tensor that files hold; see `Content`.

    Attributes:
        name: its name, which may be another than in the files.
        stored_name: its name in the files.
        dtype: see `Content`.
        item_size: see `Content`.
        shape: see `Content`.
        ways: how files hold it, at least one.
        indexes: what is in the files.
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
        """The ways that have every element."""
        return [way for way in self.ways if way.is_whole(self.shape)]

    def is_whole(self) -> bool:
        """Whether every element is in some file, however many ways that takes."""
        return bool(self.whole_ways()) or not self.lost(whole_box(self.shape))

    def lost(self, box: Box) -> bool:
        """Whether some element of a box is in no file."""
        if not volume_of(box):
            return False
        parts = [both for way in self.ways for _, both, _ in way.meeting(box)]
        edges = [sorted({edge for part in parts for edge in part[at]} | set(box[at])) for at in range(len(box))]
        cells = itertools.product(*(zip(each, each[1:]) for each in edges))
        return any(all(common(cell, part) is None for part in parts) for cell in cells)

    def read(self, box: Box, handles: FileHandles, room: Callable[[str, Shape, int], Words] = new_room) -> Words:
        """The elements of a box: of each slice those in its lowest file.

        Args:
            box: the box.
            handles: open files.
            room: gives memory.

        Raises:
            IncompleteSourceError: some are in no file.
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
        """Likewise, from some ways."""
        found = room("box", shape_of(box), self.item_size)
        there = None if len(ways) == 1 else np.zeros(found.shape, bool)
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
                if there is not None:
                    there[within(both, box)] = True
        if not (count == found.size if there is None else there.all()):
            raise IncompleteSourceError(
                f"{quoted(self.name)}: elements of {[list(interval) for interval in box]} are in no readable file",
                parameter=self.name,
            )
        return found

    def paths(self) -> set[str]:
        """The files of which something may be read."""
        return {self.indexes[file].path for file in self.first_files()}

    def first_files(self) -> set[int]:
        """The lowest file of each slice."""
        return {files[0] for way in self.ways for files in way.held.values() if files}


def read_box(index: CheckpointIndex, name: str, held: Box, box: Box, out: Words, handles: FileHandles) -> None:
    """Read a box of a slice, in C order.

    Args:
        index: what is in the file.
        name: of the tensor in it.
        held: the box that the slice is.
        box: what is wanted, within that.
        out: where it goes; contiguous.
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
    """The bytes of a box of a slice as runs that lie in the file one after the other."""

    def __init__(self, file: ReadableFile, tensor: Tensor, item_size: int, held: Box, box: Box) -> None:
        self._file, self._extents = file, tensor.extents
        self._run = stride = item_size
        self._first = 0
        # How many runs there are along the dimensions that tell them apart, innermost first, and how far apart.
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
        # As many runs at a time as are read with all that lies between them.
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
        """The slice's bytes from one on, through as many extents as that takes."""
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


class Source:
    """A checkpoint, its tensors placed by this room's own reckoning.

    Args:
        checkpoint: the checkpoint.
        strategy: how rank directories are laid out; others say so themselves.
        chosen: numbers of the files to look into; all where None.

    Attributes:
        checkpoint: the checkpoint.
        indexes: what is in the files.
        tensors: what is laid out, by name; what no file holds is left out.
        values: names of all else, with the files that have it, ascending.
        listed: names that strategy or metadata lay out, whether files hold them or not.
        unread: names of what files hold that is neither laid out nor a value.
        tied: names of pairs of tensors of which only the first is taken, and which should be equal.
    """

    told_by = "in the source"
    tied: tuple[tuple[str, str], ...] = ()

    def __init__(self, checkpoint: Checkpoint, strategy: Strategy, chosen: Optional[Collection[int]] = None) -> None:
        self.checkpoint = checkpoint
        self.indexes: Mapping[int, CheckpointIndex] = (
            checkpoint.indexes
            if chosen is None
            else {number: index for number, index in checkpoint.indexes.items() if number in chosen}
        )
        self.tensors: Mapping[str, Content] = StoredTensors(self, strategy)
        groups, held = self._alike()
        if isinstance(checkpoint, RankCheckpoint):
            # What a strategy lists is laid out; without one, all that has several elements.
            self.listed = frozenset(self.tensors if strategy.is_none else strategy.parameters)
            values = held.keys() - self.listed
        else:
            self.listed = frozenset(self.tensors)
            values = {*checkpoint.values(), *checkpoint.without_layout()} & held.keys()
        # Values that the same files have, as most do, share what says so.
        files: dict[tuple[int, ...], tuple[int, ...]] = {}
        for name in values:
            key = tuple(held[name])
            if key not in files:
                files[key] = tuple(sorted(itertools.chain.from_iterable(groups[number] for number in key)))
        self.values = {name: files[tuple(held[name])] for name in sorted(values)}
        # The readers of other forms say what they leave out.
        ranks = isinstance(checkpoint, RankCheckpoint)
        self.unread = frozenset(held.keys() - {*self.tensors, *self.values} if ranks else ())

    def _alike(self) -> tuple[list[tuple[int, ...]], dict[str, list[int]]]:
        """Files that are built alike, and per name the numbers of those groups of files that have it."""
        alike: dict[int, list[int]] = {}
        for file, index in sorted(self.indexes.items()):
            alike.setdefault(id(index.tensors), []).append(file)
        groups = [tuple(files) for files in alike.values()]
        found: dict[str, list[int]] = {}
        for number, files in enumerate(groups):
            for name in self.indexes[files[0]].tensors:
                found.setdefault(name, []).append(number)
        return groups, found

    def check_read(self, wanted: Callable[[str], bool]) -> None:
        """Insist that all that files hold is laid out, or a value.

        Raises:
            CheckpointError: something is neither, and is wanted.
        """
        lacking = sorted(filter(wanted, self.unread))
        if lacking:
            raise CheckpointError(
                f"{self.checkpoint.place}: the files hold what nothing reads: " + listing(lacking), parameter=lacking[0]
            )

    @property
    def names(self) -> set[str]:
        """Everything that some file holds."""
        return self.checkpoint.names()

    def value(self, name: str, file: int) -> Tensor:
        """A file's copy of a value."""
        return self.indexes[file].tensors[name]

    @property
    def files_read(self) -> list[CheckpointIndex]:
        """The files whose contents are read where any copy will do."""
        files = {numbers[0] for numbers in self.values.values()}
        known: set[int] = set()
        for tensor in self.tensors.values():
            assert isinstance(tensor, Stored)
            new = [way for way in tensor.ways if id(way) not in known]
            known.update(map(id, new))
            files.update(held[0] for way in new for held in way.held.values() if held)
        return [self.indexes[file] for file in sorted(files)]


class StoredTensors(ByName[Content]):
    """The tensors of a checkpoint; one is made as an object when it is asked for.

    Raises:
        CheckpointError: when it is asked for, a slice is not what strategy or metadata make of it.
    """

    def __init__(self, source: Source, strategy: Strategy) -> None:
        checkpoint = source.checkpoint
        self._checkpoint, self._strategy = checkpoint, strategy
        self._indexes = source.indexes
        self._all = len(source.indexes) == len(checkpoint.indexes)
        # Most tensors are cut and held like another.
        self._known: dict[object, Way] = {}
        self._kept: dict[int, object] = {}
        self._made: dict[str, Stored] = {}
        self._samples: dict[int, tuple[int, ...]] = {}
        super().__init__([*checkpoint.tensors] if self._all else [*filter(self._there, checkpoint.tensors)])
        self._set = frozenset(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._set

    def _there(self, name: str) -> bool:
        return any(self._indexes.keys() & files for files in self._checkpoint.present(self._checkpoint.tensors[name]))

    def __getitem__(self, name: str) -> Stored:
        if name not in self._set:
            raise KeyError(name)
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = self._stored(name)
        return found

    def _stored(self, name: str) -> Stored:
        tensor = self._checkpoint.tensors[name]
        shards = AS_RECORDED
        if isinstance(self._checkpoint, RankCheckpoint):
            ways, shards = self._of_ranks(tensor, self._checkpoint)
        else:
            ways = [self._of_sharding(tensor, at, sharding) for at, sharding in enumerate(tensor.shardings)]
        return Stored(name, name, tensor.dtype, tensor.item_size, tensor.shape, tuple(ways), self._indexes, shards)

    def _of_ranks(self, tensor: GlobalTensor, checkpoint: RankCheckpoint) -> tuple[list[Way], Shards]:
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
            ranks = checkpoint.source.ranks_with(name, stage) if stage.number in recorded else frozenset()
            if not ranks:
                continue
            layout = recorded[stage.number]
            readings = [layout, layout.unsharded()] if gradients and layout.shards > 1 else [layout]
            chosen = next((each for each in readings if self._fits(tensor, each, stage.first_rank, ranks)), None)
            if chosen is None:
                rank = min(ranks)
                raise CheckpointError(
                    f"{self._indexes[rank].path}: {quoted(name)} of shape {list(self._tensor(name, rank).shape)} is no "
                    f"slice that the strategy gives to rank {rank} of a tensor of shape {list(tensor.shape)}",
                    file=self._indexes[rank].path,
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

    def _fits(self, tensor: GlobalTensor, layout: Recorded, first: int, ranks: Collection[int]) -> bool:
        """Whether the slices in the files have the shapes that a layout gives them."""
        boxes = device_boxes(layout, tensor.shape)
        if layout.uneven is None:
            # All boxes are of one shape, and of files that are built alike one tells.
            if id(ranks) not in self._samples:
                self._kept[id(ranks)] = ranks
                self._samples[id(ranks)] = tuple({id(self._indexes[rank].tensors): rank for rank in ranks}.values())
            ranks = self._samples[id(ranks)]
        return boxes is not None and all(
            shape_of(boxes[rank - first]) == self._tensor(tensor.name, rank).shape for rank in ranks
        )

    def _tensor(self, name: str, file: int) -> Tensor:
        return self._indexes[file].tensors[name]

    def _of_sharding(self, tensor: GlobalTensor, number: int, sharding: Sharding) -> Way:
        """The boxes that files hold of a tensor of another form, as what is recorded of each file says."""
        placement = self._checkpoint.placements.get(tensor.name) if isinstance(self._checkpoint, Checkpoint2) else None
        if placement is not None and placement.layout is not None:
            key: object = (id(placement), number)
            if key not in self._known:
                recorded = recorded_layout(placement.layout)
                boxes = device_boxes(recorded, tensor.shape) or ()
                place = {rank: at for at, rank in enumerate(placement.ranks)}
                held: dict[Box, list[int]] = {box: [] for box in boxes}
                for file, rank in sorted(placement.rank_of):
                    if file in self._indexes:
                        held[boxes[place[rank]]].append(file)
                self._known[key] = Way(number, {box: tuple(files) for box, files in held.items()})
                self._kept[id(placement)] = placement
            return self._known[key]
        if isinstance(self._checkpoint, ChunkedCheckpoint):
            return self._of_chunks(tensor, self._checkpoint, number)
        key = (id(sharding), number)
        if key not in self._known:
            self._kept[id(sharding)] = sharding
            # What metadata states box by box, in C order; of boxes that are no grid those that files hold.
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
            if shape_of(box) != self._tensor(tensor.name, holder).shape:
                raise CheckpointError(
                    f"{self._indexes[holder].path}: {quoted(tensor.name)} is no chunk of shape {list(shape_of(box))}",
                    file=self._indexes[holder].path,
                    parameter=tensor.name,
                )
            held.setdefault(box, []).append(holder)
        return Way(number, {box: tuple(sorted(files)) for box, files in held.items()})


_WHOLE = Recorded((), ())


def recorded_layout(layout: Any) -> Recorded:
    """What a strategy records of a layout, and nothing that is computed from it."""
    return Recorded(
        layout.device_matrix,
        layout.tensor_map,
        layout.shard_size,
        layout.uneven,
        layout.recorded_shape,
        layout.expandable,
    )


def by_box(boxes: Sequence[Box], first: int, ranks: Iterable[int]) -> dict[Box, tuple[int, ...]]:
    """The ranks that hold each box, ascending."""
    held: dict[Box, list[int]] = {box: [] for box in boxes}
    for rank in sorted(ranks):
        held[boxes[rank - first]].append(rank)
    return {box: tuple(found) for box, found in held.items()}
