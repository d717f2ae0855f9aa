"""One pass through many tensors, block by block, in several threads.

The division of a tensor into parts and blocks depends only on its shape and type, so that sums are
identical to the last bit, for any layout and any number of threads.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from reshard.execute import Progress
from reshard.execute.reader import in_order
from reshard.layout import boxes_of_range, intersection, volume_of
from reshard.opened import LazyTensor, OpenedCheckpoint
from reshard.plan.pieces import TargetTensor
from reshard.processes import Crew, Notify, may_fork, private_bytes, process_count, reuse_memory
from reshard.storage import FileStatus
from reshard.threads import thread_pool

Bytes = npt.NDArray[np.uint8]

_P = TypeVar("_P")

CHUNK_ELEMENTS = 1 << 23
"""Elements per thread and task; each chunk has its own result."""

_BLOCK_BYTES = 512 << 10
# Memory of a thread: blocks of two tensors, and temporaries.
_THREAD_BYTES = 3 << 20
# Additional memory of threads, a part of the 100 MiB that a run may take beside --max-memory.
_SPARE = 32 << 20
_REPORTED_BYTES = 4 << 20
# Chunks per thread that are in work, or wait for an earlier one.
_AHEAD = 4


class SweepBlock(NamedTuple):
    """The same elements of every tensor: the number of the first in C order, and bytes, until the next block."""

    first: int
    raws: list[Bytes]


@dataclass(frozen=True)
class Location:
    """An element, and its place in the files.

    Attributes:
        index: its index in the tensor.
        rank: rank of the file, or number of the file if the form has no ranks. None for an element in no file.
        file: path of the file.
    """

    index: tuple[int, ...]
    rank: int | None = None
    file: str | None = None


class SweepItem(NamedTuple):
    """Tensors of one shape that are read together, one per checkpoint; and which copy, see `OpenedContents.target`."""

    tensors: tuple[LazyTensor, ...]
    copy: int = 0

    @property
    def item_size(self) -> int:
        """Bytes of the largest element."""
        return max(tensor.itemsize for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class _Chunk(NamedTuple):
    """Elements of an item, by their numbers in C order."""

    item: int
    first: int
    last: int


def location_of(tensor: TargetTensor, number: int) -> Location:
    """The place of an element by its number in C order; a byte of Int4 has one place."""
    index = tuple(int(place) for place in np.unravel_index(number, tensor.shape))
    box = tuple((start + place, start + place + 1) for (start, _), place in zip(tensor.box, index))
    for piece in tensor.pieces:
        if piece.region is None:
            inside = intersection(piece.box, box) is not None
        else:
            inside = any(True for _ in piece.region.within_box(box))
        if inside:
            return Location(index, piece.source.rank, piece.source.path)
    return Location(index)


def sweep(
    items: Sequence[SweepItem],
    checkpoints: Sequence[OpenedCheckpoint],
    compute: Callable[[SweepItem, Iterator[SweepBlock]], _P],
    max_memory: int,
    progress: Progress,
) -> list[list[_P]]:
    """Read all items once, each with one tensor of every checkpoint.

    Args:
        items: the items.
        checkpoints: the checkpoints.
        compute: the result of some consecutive blocks of an item.
        max_memory: maximum bytes of buffers, in addition to those of the checkpoints.
        progress: counts bytes.

    Returns:
        Per item the results of its parts, in order; none for an item without elements.
    """
    reuse_memory(_THREAD_BYTES)
    most = max(1, (max_memory + _SPARE) // _THREAD_BYTES)
    nbytes = sum(item.nbytes for item in items)
    thread = threading.local()
    stop = threading.Event()
    lock = threading.Lock()

    def count_read(count: int) -> None:
        with lock:
            progress.wrote(count)

    def work(chunk: _Chunk, count_read: Callable[[int], None] = count_read) -> _P:
        if not hasattr(thread, "rooms"):
            thread.rooms = [np.empty(_BLOCK_BYTES, np.uint8) for _ in checkpoints]
        blocks_of_chunk = _blocks(items[chunk.item], checkpoints, chunk, thread.rooms, stop, count_read)
        with contextlib.closing(blocks_of_chunk) as blocks:
            return compute(items[chunk.item], blocks)

    results: list[list[_P]] = [[] for _ in items]
    with contextlib.ExitStack() as stack:
        processes = min(most, _processes(checkpoints, nbytes, max_memory))
        if processes > 1:
            threads, work_on = processes, stack.enter_context(_elsewhere(processes, checkpoints, work, count_read))
        else:
            threads, work_on = min([most, *(checkpoint.reader.threads for checkpoint in checkpoints)]), work
        progress.begin(nbytes, "reading")
        stack.callback(progress.end)
        pool = stack.enter_context(thread_pool(threads))
        finished = in_order(pool, _chunks(items), lambda chunk: [partial(work_on, chunk)], _AHEAD * threads, stop=stop)
        for chunk, parts in finished:
            results[chunk.item] += parts
    return results


def _processes(checkpoints: Sequence[OpenedCheckpoint], nbytes: int, max_memory: int) -> int:
    """The number of worker processes that read; less than 2 if this process reads."""
    budgets = [checkpoint.reader.budget for checkpoint in checkpoints]
    if not may_fork() or not all(each.costs.mappable for each in budgets):
        return 1
    return process_count(min(each.cpus for each in budgets), nbytes, max_memory, private_bytes())


@contextlib.contextmanager
def _elsewhere(
    processes: int,
    checkpoints: Sequence[OpenedCheckpoint],
    work: Callable[[_Chunk, Callable[[int], None]], _P],
    count_read: Callable[[int], None],
) -> Iterator[Callable[[_Chunk], _P]]:
    """Worker processes that compute chunks while the block runs."""

    def serve(chunk: _Chunk, _: Sequence[int], notify: Notify) -> tuple[_P, list[dict[str, FileStatus]]]:
        for number, checkpoint in enumerate(checkpoints):
            checkpoint.reader.overflowed = lambda *overflow, number=number: notify((number, *overflow))
        seen_before = [checkpoint.handles.seen for checkpoint in checkpoints]
        result = work(chunk, notify)
        return result, [checkpoint.handles.seen_after(count) for checkpoint, count in zip(checkpoints, seen_before)]

    def receive(message: int | tuple[int, str, int]) -> None:
        if isinstance(message, int):
            count_read(message)
        else:
            number, name, count = message
            checkpoints[number].reader.overflowed(name, count)

    def call(chunk: _Chunk) -> _P:
        result: _P
        result, versions_seen = crew.call(chunk, notify=receive)
        for checkpoint, versions in zip(checkpoints, versions_seen):
            checkpoint.handles.see(versions)
        return result

    for checkpoint in checkpoints:
        checkpoint.share(processes)
    with Crew(processes, 1, serve) as crew:
        yield call


def _chunks(items: Sequence[SweepItem]) -> Iterator[_Chunk]:
    for number, item in enumerate(items):
        size = math.prod(item.tensors[0].shape)
        for first in range(0, size, CHUNK_ELEMENTS):
            yield _Chunk(number, first, min(size, first + CHUNK_ELEMENTS))


def _blocks(
    item: SweepItem,
    checkpoints: Sequence[OpenedCheckpoint],
    chunk: _Chunk,
    rooms: Sequence[Bytes],
    stop: threading.Event,
    count_read: Callable[[int], None],
) -> Generator[SweepBlock, None, None]:
    """The blocks of a chunk, in order."""
    targets = [checkpoint.target(tensor.name, item.copy) for checkpoint, tensor in zip(checkpoints, item.tensors)]
    shape = item.tensors[0].shape
    first = chunk.first
    unreported = 0
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(checkpoint.reader.reader()) for checkpoint in checkpoints]
        for box in boxes_of_range(shape, chunk.first, chunk.last, max(1, _BLOCK_BYTES // item.item_size)):
            if stop.is_set():
                break
            count = volume_of(box)
            raws = []
            for target, reader, room in zip(targets, readers, rooms):
                raw = room[: count * target.item_size]
                reader.fill(target, box, raw.data)
                raws.append(raw)
                unreported += len(raw)
            yield SweepBlock(first, raws)
            first += count
            if unreported >= _REPORTED_BYTES:
                count_read(unreported)
                unreported = 0
    count_read(unreported)
