"""Sums of what checkpoint files hold, read once, by several threads, in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Callable, Protocol, TypeVar

import numpy as np

from reshard.checkpoints import FileHandles
from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.layout import Box
from reshard.storage import storage_of
from reshard.verification.parts import Content, Readable
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
