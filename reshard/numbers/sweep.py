"""Going once through many tensors, block by block, by several threads.

Where a tensor is divided among threads, and where its blocks begin and end, depends on its shape and type
alone, so that sums come out the same to the last bit, however it is cut and however many threads there are.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Callable, NamedTuple, Optional, Protocol, TypeVar, Union

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.files import FileVersion
from reshard.execute import Progress
from reshard.execute.reader import in_order
from reshard.layout import boxes_of_range, intersection, volume_of
from reshard.opened import LazyTensor, OpenedCheckpoint
from reshard.processes import Crew, Tell, may_fork, private_bytes, worth_having

Bytes = npt.NDArray[np.uint8]

_P = TypeVar("_P", covariant=True)

CHUNK_ELEMENTS = 1 << 23
"""Elements that one thread takes at a time, and that have a result of their own."""

_BLOCK_BYTES = 512 << 10
# Of all that a thread needs here: blocks of two tensors, and what is computed of them.
_THREAD_BYTES = 3 << 20
# Threads may take as much beside what was asked for; see docs/benchmarks.md.
_SPARE = 32 << 20
_TOLD_BYTES = 4 << 20
# Chunks per thread that are under way, or wait for an earlier one.
_AHEAD = 4


class SweepBlock(NamedTuple):
    """The same elements of every tensor of an item.

    Attributes:
        first: the number of the first of them, counted in C order.
        raws: their bytes, per tensor; gone with the next block.
    """

    first: int
    raws: list[Bytes]


@dataclass(frozen=True)
class Location:
    """An element, and where it was read.

    Attributes:
        index: its index in the tensor.
        rank: of the file; the number of the file where a form has no ranks. None of an element that no file has.
        file: path of the file.
    """

    index: tuple[int, ...]
    rank: Optional[int] = None
    file: Optional[str] = None


class Computer(Protocol[_P]):
    """Computes something of blocks, in one thread."""

    def compute(self, number: int, blocks: Iterator[SweepBlock]) -> _P:
        """The result of some blocks of an item of this number, which follow each other; not all have to be taken."""


class SweepItem(NamedTuple):
    """Tensors of one shape that are gone through side by side, by the checkpoints that they are in."""

    tensors: tuple[LazyTensor, ...]

    @property
    def item_size(self) -> int:
        """Bytes of the largest element."""
        return max(tensor.itemsize for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


class _Chunk(NamedTuple):
    """Elements of an item, by their numbers in C order."""

    item: int
    first: int
    last: int


def location_of(tensor: LazyTensor, number: int) -> Location:
    """An element by its number in C order; of Int4 both of a byte."""
    index = tuple(int(place) for place in np.unravel_index(number, tensor.shape))
    box = tuple((start + place, start + place + 1) for (start, _), place in zip(tensor.target.box, index))
    for piece in tensor.target.pieces:
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
    make: Callable[[], Computer[_P]],
    max_memory: int,
    progress: Progress,
) -> list[list[_P]]:
    """Go through all items.

    Args:
        items: which; each with one tensor of every checkpoint.
        checkpoints: the checkpoints.
        make: makes a computer for a thread.
        max_memory: bytes that buffers may take, beside those of the checkpoints.
        progress: told how much was read.

    Returns:
        Per item the results of its parts, in their order; none of an item without elements.

    Raises:
        ReshardError: something cannot be read.
    """
    most = max(1, (max_memory + _SPARE) // _THREAD_BYTES)
    nbytes = sum(item.nbytes for item in items)
    own = threading.local()
    stop = threading.Event()
    lock = threading.Lock()

    def tell(count: int) -> None:
        with lock:
            progress.wrote(count)

    def work(chunk: _Chunk, tell: Callable[[int], None] = tell) -> _P:
        if not hasattr(own, "computer"):
            own.computer = make()
            own.rooms = [np.empty(_BLOCK_BYTES, np.uint8) for _ in checkpoints]
        with contextlib.closing(_blocks(items[chunk.item], checkpoints, chunk, own.rooms, stop, tell)) as blocks:
            computer: Computer[_P] = own.computer
            return computer.compute(chunk.item, blocks)

    results: list[list[_P]] = [[] for _ in items]
    with contextlib.ExitStack() as stack:
        processes = min(most, _processes(checkpoints, nbytes, max_memory))
        if processes > 1:
            threads, work_on = processes, stack.enter_context(_elsewhere(processes, checkpoints, work, tell))
        else:
            threads, work_on = min([most, *(checkpoint.reader.threads for checkpoint in checkpoints)]), work
        progress.begin(nbytes, "reading")
        stack.callback(progress.end)
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        done = in_order(pool, _chunks(items), lambda chunk: [partial(work_on, chunk)], _AHEAD * threads, stop=stop)
        for chunk, parts in done:
            results[chunk.item] += parts
    return results


def _processes(checkpoints: Sequence[OpenedCheckpoint], nbytes: int, max_memory: int) -> int:
    """How many worker processes read; less than 2 where this process does."""
    options = [checkpoint.reader.options for checkpoint in checkpoints]
    if not may_fork() or not all(one.storage.mappable for one in options):
        return 1
    return worth_having(min(one.jobs for one in options), nbytes, max_memory, private_bytes())


@contextlib.contextmanager
def _elsewhere(
    processes: int,
    checkpoints: Sequence[OpenedCheckpoint],
    work: Callable[[_Chunk, Callable[[int], None]], _P],
    tell: Callable[[int], None],
) -> Iterator[Callable[[_Chunk], _P]]:
    """Have worker processes do what is done with a chunk, while the block runs."""

    def serve(chunk: _Chunk, _: Sequence[int], told: Tell) -> tuple[_P, list[dict[str, FileVersion]]]:
        for number, checkpoint in enumerate(checkpoints):
            checkpoint.reader.overflowed = lambda *what, number=number: told((number, *what))
        known = [checkpoint.handles.seen for checkpoint in checkpoints]
        result = work(chunk, told)
        return result, [checkpoint.handles.seen_after(count) for checkpoint, count in zip(checkpoints, known)]

    def heard(message: Union[int, tuple[int, str, int]]) -> None:
        if isinstance(message, int):
            tell(message)
        else:
            number, name, count = message
            checkpoints[number].reader.overflowed(name, count)

    def call(chunk: _Chunk) -> _P:
        result: _P
        result, seen = crew.call(chunk, told=heard)
        for checkpoint, versions in zip(checkpoints, seen):
            checkpoint.handles.see(versions)
        return result

    for checkpoint in checkpoints:
        checkpoint.reader.share(processes)
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
    tell: Callable[[int], None],
) -> Generator[SweepBlock, None, None]:
    """The blocks of a chunk, read one after the other."""
    targets = [checkpoint.target(tensor.name) for checkpoint, tensor in zip(checkpoints, item.tensors)]
    shape = item.tensors[0].shape
    first = chunk.first
    untold = 0
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(checkpoint.reader.worker()) for checkpoint in checkpoints]
        for box in boxes_of_range(shape, chunk.first, chunk.last, max(1, _BLOCK_BYTES // item.item_size)):
            if stop.is_set():
                break
            count = volume_of(box)
            raws = []
            for target, worker, room in zip(targets, workers, rooms):
                raw = room[: count * target.item_size]
                worker.filler.fill(target, box, raw.data)
                raws.append(raw)
                untold += len(raw)
            yield SweepBlock(first, raws)
            first += count
            if untold >= _TOLD_BYTES:
                tell(untold)
                untold = 0
    tell(untold)
