"""Sums of what checkpoint files hold, read once, by several threads, in bounded memory."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Callable, NamedTuple, Optional, Protocol, TypeVar

import numpy as np

from reshard.checkpoints import FileHandles, Tensor, reading_error
from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.layout import Box
from reshard.storage import ReadableFile, fill, storage_of
from reshard.verification.rounding import same_nans
from reshard.verification.sums import PRIME, Workspace

# Larger parts are taken by several threads.
_PART_BYTES = 64 << 20
# Parts that are described at a time: some MB, and enough to keep all threads busy.
MOST_PARTS = 1 << 14
# A thread takes as many parts, or as many bytes, at a time.
_TAKEN_PARTS, _TAKEN_BYTES = 64, 1 << 20
# Contents up to this size are remembered with their sums, as many of them, because copies are equal.
_SMALL, _REMEMBERED = 4 << 10, 256
# Runs shorter than this are read with what lies between them, where that is no more than so many times as much and
# all of it so many bytes.
_SHORT, _SPARSE, _SPAN = 16 << 10, 4, 256 << 10
# Parts of fewer bytes on average are not worth a second thread where reading takes no waiting.
_TINY = 8 << 10

_T = TypeVar("_T")


class Progress(Protocol):
    """Told how much has been read; called from several threads, one at a time."""

    def begin(self, total: int, doing: str) -> None:
        """So many bytes will be read; ``doing`` is the word for it, such as ``verifying``."""

    def wrote(self, count: int) -> None:
        """So many bytes were read."""

    def end(self) -> None:
        """Nothing more will come."""


@dataclass(frozen=True)
class Means:
    """What may be used for reading.

    Attributes:
        handles: open files.
        jobs: CPUs to keep busy.
        max_memory: bytes for all buffers together.
        progress: told how much has been read.
        summed: files of which contents were read so far.
    """

    handles: FileHandles
    jobs: int
    max_memory: int
    progress: Progress
    summed: set[str] = field(default_factory=set)

    def check_unchanged(self) -> None:
        """Insist that nobody has written to files of which contents were read: what was compared is of one version.

        Raises:
            RetryableError: somebody has.
        """
        self.handles.check_unchanged(sorted(self.summed))


class Content(Protocol):
    """The bytes of a box in C order."""

    def read(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from ``offset`` on."""


class Readable(Protocol):
    """Elements of a parameter that can be summed."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full parameter."""

    @property
    def box(self) -> Box:
        """The box to sum."""

    @property
    def item_size(self) -> int:
        """Bytes of an element."""

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""

    @property
    def paths(self) -> Collection[str]:
        """The files that are read."""

    @property
    def like_type(self) -> Optional[str]:
        """A floating point type, where all that is no number counts as the same."""

    def of_box(self, box: Box) -> Readable:
        """A smaller box of it."""

    def pieces(self, memory: int) -> Iterable[Readable]:
        """The same in boxes that can be read with about so many bytes of memory."""

    def opened(self, handles: FileHandles, memory: int) -> Content:
        """Its bytes."""

    def with_like(self, dtype: Optional[str]) -> Readable:
        """The same with another ``like_type``."""


class Part(NamedTuple):
    """Elements of a parameter, as one file holds them; see `Readable`.

    Attributes:
        path: the file.
        tensor: the slice in it.
        shape: shape of the full parameter.
        held: the box of the parameter that the slice is.
        box: the box to sum, within ``held``.
        like_type: see `Readable`.
    """

    path: str
    tensor: Tensor
    shape: tuple[int, ...]
    held: Box
    box: Box
    like_type: Optional[str] = None

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return self.tensor.item_size

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return self.tensor.item_size * math.prod(stop - start for start, stop in self.box)

    @property
    def paths(self) -> tuple[str, ...]:
        """The file."""
        return (self.path,)

    def of_box(self, box: Box) -> Part:
        """A smaller box of it."""
        return self._replace(box=box)

    def pieces(self, memory: int) -> tuple[Part, ...]:
        """All of it: what is summed a block at a time is read so as well."""
        return (self,)

    def opened(self, handles: FileHandles, memory: int) -> BoxReader:
        """Its bytes."""
        return BoxReader(self, handles)

    def with_like(self, dtype: Optional[str]) -> Part:
        """The same with another ``like_type``."""
        return self._replace(like_type=dtype)


def batches(items: Iterable[_T], parts_of: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Items in groups that have no more parts together than should be described at a time."""
    batch: list[_T] = []
    total = 0
    for item in items:
        parts = parts_of(item)
        if batch and total + parts > MOST_PARTS:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += parts
    if batch:
        yield batch


def sum_parts(parts: Sequence[Readable], means: Means, told: bool = True) -> list[int]:
    """The sum of every part, in their order.

    Args:
        parts: what to read; equal ones should be neighbours.
        means: what may be used for it.
        told: whether the progress, which the caller begins and ends, is told.

    Raises:
        ReshardError: a file cannot be read, or was cut short meanwhile.
    """
    sums = [0] * len(parts)
    if not parts:
        return sums
    paths = dict.fromkeys(path for part in parts for path in part.paths)
    means.summed.update(paths)
    storage = storage_of(next(iter(paths), "."))
    in_flight = means.jobs * storage.in_flight
    threads = max(1, min(in_flight, len(parts) if len(parts) > 1 else means.jobs))
    if not storage.remote and sum(part.nbytes for part in parts) < len(parts) * _TINY:
        # Nearly all of the time goes to the interpreter, which runs one thread at a time.
        threads = 1
    threads = max(1, min(threads, means.max_memory // Workspace.LEAST_MEMORY))
    tasks = _tasks(parts)
    lock = threading.Lock()
    stop = threading.Event()

    def work() -> None:
        adder = _Adder(means.handles, means.max_memory // threads)
        while not stop.is_set():
            with lock:
                taken = _take(tasks)
            if not taken:
                return
            totals = [adder.sum(part) for _, part in taken]
            with lock:
                for (number, _), total in zip(taken, totals):
                    sums[number] = (sums[number] + total) % PRIME
                if told:
                    means.progress.wrote(sum(part.nbytes for _, part in taken))

    with ThreadPoolExecutor(threads) as pool:
        try:
            for done in as_completed([pool.submit(work) for _ in range(threads)]):
                done.result()
        except BaseException:
            # Also Ctrl-C: nobody waits for terabytes to be read.
            stop.set()
            raise
    return sums


def sum_boxes(parts: Iterable[tuple[int, Readable]], count: int, means: Means, told: bool = True) -> list[int]:
    """The sums of boxes that are in several parts, and perhaps in more of them than should be described at a time.

    Args:
        parts: every part, with the number of its box.
        count: how many boxes there are.
        means: what may be used for it.
        told: whether the progress is told.

    Raises:
        ReshardError: a file cannot be read, or was cut short meanwhile.
    """
    sums = [0] * count
    for some in batches(parts, lambda _: 1):
        for (number, _), total in zip(some, sum_parts([part for _, part in some], means, told)):
            sums[number] = (sums[number] + total) % PRIME
    return sums


class _Adder:
    """Sums parts, in one thread; content that it has summed before, at the same place, only read."""

    def __init__(self, handles: FileHandles, memory: int) -> None:
        self._handles = handles
        self._space = Workspace(memory)
        self._memory = max(0, memory - Workspace.MOST_MEMORY)
        self._small = bytearray(_SMALL)
        self._known: dict[tuple[tuple[int, ...], int, Box, bytes], int] = {}

    def sum(self, part: Readable) -> int:
        """The sum of a part."""
        return sum(map(self._sum, part.pieces(self._memory))) % PRIME

    def _sum(self, part: Readable) -> int:
        item_size, nbytes = part.item_size, part.nbytes
        reader = part.opened(self._handles, self._memory)
        if part.like_type is not None:
            reader = _Alike(reader, part.like_type)
        if nbytes > _SMALL:
            return self._space.sum(part.shape, item_size, part.box, reader.read)
        content = memoryview(self._small)[:nbytes]
        reader.read(0, content)
        key = (part.shape, item_size, part.box, bytes(content))
        total = self._known.get(key)
        if total is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()

            def give(offset: int, out: memoryview) -> None:
                out[:] = content[offset : offset + len(out)]

            total = self._known[key] = self._space.sum(part.shape, item_size, part.box, give)
        return total


class _Alike:
    """Content in which all that is no number is the same."""

    def __init__(self, content: Content, dtype: str) -> None:
        self._content, self._dtype = content, dtype

    def read(self, offset: int, out: memoryview) -> None:
        """Fill ``out``, which begins and ends with an element."""
        self._content.read(offset, out)
        same_nans(np.frombuffer(out, f"<u{ITEM_SIZES[self._dtype]}"), self._dtype)


def _take(tasks: Iterator[tuple[int, Readable]]) -> list[tuple[int, Readable]]:
    """The next parts for one thread; none when all are taken."""
    taken: list[tuple[int, Readable]] = []
    nbytes = 0
    while len(taken) < _TAKEN_PARTS and nbytes < _TAKEN_BYTES:
        task = next(tasks, None)
        if task is None:
            break
        taken.append(task)
        nbytes += task[1].nbytes
    return taken


def _tasks(parts: Sequence[Readable]) -> Iterator[tuple[int, Readable]]:
    """Every part with its number, large ones in several pieces along their first long dimension."""
    for number, part in enumerate(parts):
        pieces = -(-part.nbytes // _PART_BYTES)
        dimension = next((d for d, (start, stop) in enumerate(part.box) if stop - start > 1), None)
        if pieces <= 1 or dimension is None:
            yield number, part
            continue
        start, stop = part.box[dimension]
        length = -(-(stop - start) // pieces)
        for begin in range(start, stop, length):
            interval = (begin, min(begin + length, stop))
            yield number, part.of_box((*part.box[:dimension], interval, *part.box[dimension + 1 :]))


class BoxReader:
    """Reads the bytes of a part's box, which may be scattered over the slice, in C order."""

    def __init__(self, part: Part, handles: FileHandles) -> None:
        self._part = part
        self._handles = handles
        self._extents = part.tensor.extents
        self._ends = list(accumulate(size for _, size in self._extents))
        # The box is runs of `_run` bytes; all dimensions before the last one it cuts tell them apart.
        self._run, stride = part.tensor.item_size, part.tensor.item_size
        self._first = 0
        self._steps: list[tuple[int, int]] = []
        joined = True
        for (start, stop), (low, high) in zip(reversed(part.box), reversed(part.held)):
            self._first += (start - low) * stride
            if joined:
                self._run *= stop - start
            else:
                self._steps.append((stop - start, stride))
            joined = joined and (start, stop) == (low, high)
            stride *= high - low

    def read(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the box's bytes from ``offset`` on."""
        path = self._part.path
        try:
            with self._handles.borrow(path) as file:
                self._read(file, offset, out)
        except OSError as error:
            raise reading_error(path, error) from error

    def _read(self, file: ReadableFile, offset: int, out: memoryview) -> None:
        done = 0
        while done < len(out):
            number, inside = divmod(offset + done, self._run)
            several = 1 if inside else self._close_together(number, len(out) - done)
            if several > 1:
                length = several * self._run
                self._read_rows(file, self._start(number), out[done : done + length], several)
            else:
                length = min(self._run - inside, len(out) - done)
                self._read_stored(file, self._start(number) + inside, out[done : done + length])
            done += length

    def _close_together(self, run: int, nbytes: int) -> int:
        """How many short runs, from one on, are read faster with all that lies between them."""
        if not self._steps or self._run >= _SHORT:
            return 1
        size, stride = self._steps[0]
        if stride > _SPARSE * self._run:
            return 1
        return min(nbytes // self._run, size - run % size, _SPAN // stride)

    def _read_rows(self, file: ReadableFile, start: int, out: memoryview, count: int) -> None:
        """Fill ``out`` with so many runs that follow each other evenly."""
        stride = self._steps[0][1]
        span = bytearray(count * stride)
        used = (count - 1) * stride + self._run
        self._read_stored(file, start, memoryview(span)[:used])
        np.frombuffer(out, np.uint8).reshape(count, -1)[:] = np.frombuffer(span, np.uint8).reshape(count, -1)[
            :, : self._run
        ]

    def _start(self, run: int) -> int:
        start = self._first
        for size, stride in self._steps:
            run, position = divmod(run, size)
            start += position * stride
        return start

    def _read_stored(self, file: ReadableFile, start: int, out: memoryview) -> None:
        """Fill ``out`` with the slice's bytes from ``start`` on, through as many extents as that takes."""
        number = bisect_right(self._ends, start)
        done = 0
        while done < len(out):
            offset, size = self._extents[number]
            inside = start + done - (self._ends[number] - size)
            length = min(size - inside, len(out) - done)
            fill(file, offset + inside, out[done : done + length])
            done += length
            number += 1
